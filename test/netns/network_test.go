package netns

import (
	"errors"
	"net/netip"
	"testing"

	"shaperd.dev/shaperd/test/lab"
)

// A network is three hosts in a row.
type network struct {
	client, shaper, downstream *host
}

// A family is the addresses of one IP version in every network.
type family struct {
	name       string
	sources    [3]netip.Addr // of the client, each in a /24 or a /56 of its own
	proxy      netip.Addr    // of the shaper, on the client's side
	alias      netip.Addr    // second address on the client's side
	inner      netip.Addr    // of the shaper, on the downstream's side
	downstream netip.Addr
	any        netip.Addr
	outerBits  int
	innerBits  int
}

var (
	ipv4 = family{
		name:       "ipv4",
		sources:    addrs("10.1.1.10", "10.1.2.10", "10.1.3.10"),
		proxy:      netip.MustParseAddr("10.1.0.1"),
		alias:      netip.MustParseAddr("10.1.0.2"),
		inner:      netip.MustParseAddr("10.2.0.1"),
		downstream: netip.MustParseAddr("10.2.0.5"),
		any:        netip.IPv4Unspecified(),
		outerBits:  16,
		innerBits:  24,
	}
	ipv6 = family{
		name:       "ipv6",
		sources:    addrs("fd00:1:0:100::10", "fd00:1:0:200::10", "fd00:1:0:300::10"),
		proxy:      netip.MustParseAddr("fd00:1::1"),
		alias:      netip.MustParseAddr("fd00:1::2"),
		inner:      netip.MustParseAddr("fd00:2::1"),
		downstream: netip.MustParseAddr("fd00:2::5"),
		any:        netip.IPv6Unspecified(),
		outerBits:  32,
		innerBits:  64,
	}
	families = []family{ipv4, ipv6}
)

func addrs(a, b, c string) [3]netip.Addr {
	return [3]netip.Addr{netip.MustParseAddr(a), netip.MustParseAddr(b), netip.MustParseAddr(c)}
}

const (
	tcpPort = 5432
	udpPort = 8003 // within the port range of the listener
)

// newNetwork creates the three hosts and connects them. They are removed when the test ends.
func newNetwork(t testing.TB) *network {
	t.Helper()
	var all []lab.RowAddresses
	for _, f := range families {
		all = append(all, lab.RowAddresses{
			Clients: f.sources[:], Outer: []netip.Addr{f.proxy, f.alias}, OuterBits: f.outerBits,
			Inner: f.inner, Downstream: f.downstream, InnerBits: f.innerBits,
		})
	}
	row, err := lab.NewRow(all...)
	must(t, err)
	t.Cleanup(row.Remove)
	n := &network{&host{row.Client}, &host{row.Middle}, &host{row.Downstream}}
	// Segments within a super-packet would have no gaps.
	must(t, errors.Join(n.shaper.SetMaxSegments(lab.MiddleLeft, 1), n.shaper.SetMaxSegments(lab.MiddleRight, 1)))
	return n
}

// forward enables routing on the shaper, so that the client reaches the downstream without a daemon.
func (n *network) forward(t testing.TB) {
	t.Helper()
	must(t, errors.Join(
		n.shaper.Sysctl("net/ipv4/ip_forward", "1"),
		n.shaper.Sysctl("net/ipv6/conf/all/forwarding", "1")))
}
