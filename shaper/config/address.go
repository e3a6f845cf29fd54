package config

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// parseAddress parses the address of a listener: "tcp://0.0.0.0:5432" or
// "udp://[::]:8000-8010".
func parseAddress(s string) (shaper.Address, error) {
	bad := func(problem string) (shaper.Address, error) {
		return shaper.Address{}, fmt.Errorf("%s %s", quote(s), problem)
	}
	scheme, rest, ok := strings.Cut(s, "://")
	var a shaper.Address
	switch {
	case !ok:
		return bad(`has no protocol: write "tcp://0.0.0.0:5432" or "udp://[::]:53"`)
	case scheme == "tcp":
		a.Protocol = shaper.TCP
	case scheme == "udp":
		a.Protocol = shaper.UDP
	default:
		return bad(`has an unknown protocol: must be "tcp://" or "udp://"`)
	}
	colon := strings.LastIndexByte(rest, ':')
	if colon < 0 || strings.HasSuffix(rest, "]") {
		return bad(`has no port: add one such as ":5432", or a range such as ":8000-8010"`)
	}
	host := rest[:colon]
	addr, err := parseIP(host)
	if err != nil {
		return bad(`has no IP address to listen on, such as "0.0.0.0" or "[::]"`)
	}
	if addr.Zone() != "" {
		return bad("has an unsupported IPv6 zone")
	}
	a.Addr = addr.Unmap()
	if a.Ports, err = parsePorts(rest[colon+1:]); err != nil {
		return bad("has an invalid port: " + err.Error())
	}
	return a, nil
}

// parseIP parses an IPv4 address, or an IPv6 address in brackets.
func parseIP(host string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"))
	if err == nil && addr.Is6() != (strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]")) {
		err = errors.New("brackets are for IPv6 alone")
	}
	return addr, err
}

// parsePorts parses a port, "5432", or a range, "8000-8010".
func parsePorts(s string) (shaper.PortRange, error) {
	first, last, isRange := strings.Cut(s, "-")
	if !isRange {
		last = first
	}
	a, errA := parsePort(first)
	b, errB := parsePort(last)
	switch {
	case errA != nil || errB != nil:
		return shaper.PortRange{}, fmt.Errorf("%s is not a port from 1 to 65535, or a range such as \"8000-8010\"", quote(s))
	case a > b:
		return shaper.PortRange{}, fmt.Errorf("%s is reversed: write \"%d-%d\"", quote(s), b, a)
	}
	return shaper.PortRange{First: a, Last: b}, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err == nil && n == 0 {
		err = strconv.ErrRange
	}
	return uint16(n), err
}

// parseDownstream parses "10.0.0.5:5432", "db.local:5432", "[fd00::5]:5432", or
// any of these without the port.
func parseDownstream(s string) (shaper.Downstream, error) {
	bad := func(problem string) (shaper.Downstream, error) {
		return shaper.Downstream{}, fmt.Errorf("%s %s", quote(s), problem)
	}
	if strings.Contains(s, "://") {
		return bad("has a protocol: write host:port alone")
	}
	if addr, err := netip.ParseAddr(s); err == nil && addr.Is6() {
		return bad(fmt.Sprintf("is an IPv6 address without brackets: write %q, and the port after them, if any", "["+s+"]"))
	}
	d := shaper.Downstream{Weight: 1}
	host := s
	if colon := strings.LastIndexByte(s, ':'); colon >= 0 && !strings.HasSuffix(s, "]") {
		port, err := parsePort(s[colon+1:])
		if err != nil {
			return bad("has an invalid port: must be from 1 to 65535, or none for the port that the source connected to")
		}
		host, d.Port = s[:colon], port
	}
	addr, err := parseIP(host)
	switch {
	case err == nil && addr.Zone() != "":
		return bad("has an unsupported IPv6 zone")
	case err == nil && addr.IsUnspecified():
		return bad("is a wildcard address: must be the address of a host")
	case err == nil:
		d.Host = addr.Unmap().String()
	case isHostname(host):
		d.Host = host
	default:
		return bad(`is not a valid host with an optional port, such as "10.0.0.5:5432", "db.local" or "[fd00::5]:5432"`)
	}
	return d, nil
}

// isHostname reports whether s is a valid host name. A name whose last label is a
// number is a mistyped address (RFC 3696, section 2).
func isHostname(s string) bool {
	if len(s) > 253 {
		return false
	}
	labels := strings.Split(strings.TrimSuffix(s, "."), ".")
	for _, label := range labels {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		if strings.Trim(strings.ToLower(label), "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	return strings.Trim(labels[len(labels)-1], "0123456789") != ""
}

// parsePrefix is [shaper.ParsePrefix] with an error that names s.
func parsePrefix(s string) (netip.Prefix, error) {
	p, err := shaper.ParsePrefix(s)
	if err != nil {
		return p, fmt.Errorf("%s %w", quote(s), err)
	}
	return p, nil
}

// checkEndpoint returns an error if s is neither a host:port to serve at nor "". Port 0
// is any free port.
func checkEndpoint(s, example string) error {
	if s == "" {
		return nil
	}
	colon := strings.LastIndexByte(s, ':')
	if colon < 0 {
		return fmt.Errorf("%s has no port: write an address such as %q, or \"\" for none", quote(s), example)
	}
	host := s[:colon]
	addr, err := parseIP(host)
	_, errPort := strconv.ParseUint(s[colon+1:], 10, 16)
	if host != "" && (err != nil && !isHostname(host) || addr.Zone() != "") || errPort != nil {
		return fmt.Errorf("%s is not an address such as %q, or \"\" for none", quote(s), example)
	}
	return nil
}
