package shaper

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// ParsePrefix parses a prefix such as "192.0.2.0/24", or an address, which is a prefix of full
// length. IPv4-mapped addresses are returned as IPv4. It rejects zones and host bits, which could be
// meant otherwise. Its errors say what is wrong with s; they do not repeat it.
func ParsePrefix(s string) (netip.Prefix, error) {
	if strings.Contains(s, "%") {
		return netip.Prefix{}, errors.New("has an unsupported IPv6 zone")
	}
	if addr, err := netip.ParseAddr(s); err == nil {
		addr = addr.Unmap()
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, errors.New(`is not an address, or a prefix such as "192.0.2.0/24" or "2001:db8::/32"`)
	}
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	if p != p.Masked() {
		return netip.Prefix{}, fmt.Errorf("has host bits set: write %q", p.Masked())
	}
	return p, nil
}
