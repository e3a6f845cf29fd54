// Package explain finds the limits that a connection or a packet meets under a policy, their
// buckets, and the bottlenecks among them. It reads neither traffic nor a clock; the daemon adds the
// state of the buckets. Its functions may be called by several goroutines.
package explain

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// Question is the traffic to explain: a connection, or packets.
type Question struct {
	Source      netip.Addr
	Protocol    shaper.Protocol
	Address     netip.Addr // requested by the client; invalid when it was not given
	Port        uint16
	Listener    string     // "" means the one that accepts it
	Attach      string     // attachment; "" means a listener
	Destination netip.Addr // of the packets; invalid when it was not given
	DSCP        shaper.DSCP
	Mark        uint32
	Cgroup      string // of the process that sends, "" if it is not local
	Downstream  string // "" means the only one of the listener
	TLVType     uint8  // of a value in the PROXY header, 0 without one
	TLV         string // the value

	// AnyBucket allows a question that does not say all that tells buckets apart.
	AnyBucket bool
}

// Request is a question as users ask it: by the values of flags, or of a query string.
type Request struct{ Source, To, Listener, Attach, Destination, DSCP, Mark, Downstream, TLV, Cgroup string }

// A QuestionError reports a question that is invalid, or does not say enough.
type QuestionError struct{ error }

// Parse parses a question. Its errors are QuestionErrors, and name the flags of "explain".
func Parse(ask Request) (*Question, error) {
	q := &Question{Listener: ask.Listener, Attach: ask.Attach, Downstream: ask.Downstream}
	var err error
	if q.Source, err = parseAddr("source", ask.Source); err != nil {
		return nil, err
	}
	if err = q.ParseTo(ask.To); err != nil {
		return nil, err
	}
	switch {
	case q.Attach != "" && q.Listener != "":
		return nil, QuestionError{errors.New("--listener and --attach cannot be combined")}
	case q.Attach != "" && q.Downstream != "":
		return nil, QuestionError{errors.New("--downstream and --attach cannot be combined")}
	case q.Attach != "" && q.Address.IsValid():
		return nil, QuestionError{errors.New("--to: with --attach, use --destination to name the address")}
	case q.Address.IsValid() && q.Source.Is4() != q.Address.Is4():
		return nil, QuestionError{fmt.Errorf("--source %v and --to %v: must be of the same address family", q.Source, q.Address)}
	}
	for _, f := range []struct{ flag, value string }{{"destination", ask.Destination}, {"dscp", ask.DSCP}, {"mark", ask.Mark}, {"cgroup", ask.Cgroup}} {
		if f.value != "" && ask.Attach == "" {
			return nil, QuestionError{fmt.Errorf("--%s requires --attach", f.flag)}
		}
	}
	if ask.TLV != "" {
		number, value, ok := strings.Cut(ask.TLV, "=")
		n, err := strconv.ParseUint(number, 0, 8)
		switch {
		case !ok || err != nil || n == 0:
			return nil, QuestionError{fmt.Errorf("--tlv %q: must be a type and a value, such as 0xE0=tenant-7", ask.TLV)}
		case q.Attach != "":
			return nil, QuestionError{errors.New("--tlv and --attach cannot be combined")}
		}
		q.TLVType, q.TLV = uint8(n), value
	}
	if ask.DSCP != "" {
		if q.DSCP, err = shaper.ParseDSCP(ask.DSCP); err != nil {
			return nil, QuestionError{fmt.Errorf("--dscp: %w", err)}
		}
	}
	if ask.Cgroup != "" {
		if q.Cgroup, err = shaper.ParseCgroup(ask.Cgroup); err != nil {
			return nil, QuestionError{fmt.Errorf("--cgroup: %w", err)}
		}
	}
	if ask.Mark != "" {
		mark, err := strconv.ParseUint(ask.Mark, 0, 32)
		if err != nil {
			return nil, QuestionError{fmt.Errorf("--mark %q: must be a number of 32 bits, such as 0x10", ask.Mark)}
		}
		q.Mark = uint32(mark)
	}
	if ask.Destination == "" {
		return q, nil
	}
	if q.Destination, err = parseAddr("destination", ask.Destination); err != nil {
		return nil, err
	}
	if q.Source.Is4() != q.Destination.Is4() {
		return nil, QuestionError{fmt.Errorf("--source %v and --destination %v: must be of the same address family", q.Source, q.Destination)}
	}
	return q, nil
}

func parseAddr(flag, s string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(s)
	if err != nil {
		return addr, QuestionError{fmt.Errorf("--%s %q: must be an IPv4 or IPv6 address", flag, s)}
	}
	return addr.Unmap().WithZone(""), nil
}

// ParseTo parses --to. Its errors are QuestionErrors.
func (q *Question) ParseTo(s string) error {
	attached := q.Attach != ""
	if attached && s == shaper.ICMP.String() {
		q.Protocol = shaper.ICMP
		return nil
	}
	name, number, ok := strings.Cut(s, "/")
	if to, err := netip.ParseAddrPort(number); err == nil {
		q.Address, number = to.Addr().Unmap().WithZone(""), strconv.Itoa(int(to.Port()))
	}
	port, err := strconv.ParseUint(number, 10, 16)
	if !ok || err != nil || port == 0 || name != "tcp" && name != "udp" {
		or := ""
		if attached {
			or = ", or icmp"
		}
		return QuestionError{fmt.Errorf("--to %q: must be a protocol and a port, such as tcp/5432 or udp/53%s", s, or)}
	}
	q.Protocol, q.Port = shaper.UDP, uint16(port)
	if name == "tcp" {
		q.Protocol = shaper.TCP
	}
	return nil
}

// Target formats protocol, address and port as --to takes them.
func (q *Question) Target() string {
	switch {
	case q.Port == 0:
		return q.Protocol.String()
	case q.Address.IsValid():
		return fmt.Sprintf("%v/%v", q.Protocol, netip.AddrPortFrom(q.Address, q.Port))
	}
	return fmt.Sprintf("%v/%d", q.Protocol, q.Port)
}

// DestinationText formats the destination of the packets or the connection.
func (q *Question) DestinationText() string {
	text := q.Target()
	if q.Destination.IsValid() {
		text = fmt.Sprintf("%v, %s", q.Destination, text)
	}
	if q.DSCP != 0 {
		text += fmt.Sprintf(", dscp %v", q.DSCP)
	}
	if q.Mark != 0 {
		text += fmt.Sprintf(", mark %#x", q.Mark)
	}
	if q.Cgroup != "" {
		text += ", cgroup " + q.Cgroup
	}
	return text
}
