package netns

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
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
	alias      netip.Addr    // a second one there
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

// Names of the interfaces, as the drawing in the package's documentation has them.
const (
	clientLink     = "up"
	shaperLeft     = "left"
	shaperRight    = "right"
	downstreamLink = "in"
)

const (
	tcpPort = 5432
	udpPort = 8003 // inside a range of ports that the tests listen on
)

var networks atomic.Int32

// newNetwork makes the three hosts and joins them. They go when the test ends.
func newNetwork(t testing.TB) *network {
	t.Helper()
	n := networks.Add(1)
	named := func(role string) *host {
		return newHost(t, fmt.Sprintf("%s%d-%d-%s", prefix, os.Getpid(), n, role))
	}
	net := &network{client: named("client"), shaper: named("shaper"), downstream: named("downstream")}
	join(t, net.client, clientLink, net.shaper, shaperLeft)
	join(t, net.shaper, shaperRight, net.downstream, downstreamLink)
	for _, f := range families {
		net.client.addAddrs(t, clientLink, f.outerBits, f.sources[:]...)
		net.shaper.addAddrs(t, shaperLeft, f.outerBits, f.proxy, f.alias)
		net.shaper.addAddrs(t, shaperRight, f.innerBits, f.inner)
		net.downstream.addAddrs(t, downstreamLink, f.innerBits, f.downstream)
		net.client.addDefault(t, f.proxy)
		net.downstream.addDefault(t, f.inner)
	}
	// Each captured frame is to be one segment with a time of its own, as a wire
	// would carry it. Neighbours in one large frame would have no gaps.
	net.shaper.segmentAlone(t, shaperLeft)
	net.shaper.segmentAlone(t, shaperRight)
	return net
}

// forward lets the shaper route, so that the client reaches the downstream with
// no daemon between them.
func (n *network) forward(t testing.TB) {
	t.Helper()
	n.shaper.sysctl(t, "net/ipv4/ip_forward", "1")
	n.shaper.sysctl(t, "net/ipv6/conf/all/forwarding", "1")
}

// join lays a cable between two hosts.
func join(t testing.TB, a *host, aLink string, b *host, bLink string) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = aLink
	attrs.MTU = 1500
	attrs.Namespace = netlink.NsFd(a.ns)
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: bLink, PeerNamespace: netlink.NsFd(b.ns)}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatalf("join %s and %s: %v", a.name, b.name, err)
	}
	for _, end := range []struct {
		*host
		link string
	}{{a, aLink}, {b, bLink}} {
		if err := end.links.LinkSetUp(end.mustLink(t, end.link)); err != nil {
			t.Fatalf("set %s up in %s: %v", end.link, end.name, err)
		}
	}
}

func (h *host) mustLink(t testing.TB, name string) netlink.Link {
	t.Helper()
	link, err := h.links.LinkByName(name)
	if err != nil {
		t.Fatalf("find %s in %s: %v", name, h.name, err)
	}
	return link
}

func (h *host) addAddrs(t testing.TB, link string, bits int, list ...netip.Addr) {
	t.Helper()
	for _, a := range list {
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}}
		if a.Is6() {
			addr.Flags = unix.IFA_F_NODAD // usable at once
		}
		if err := h.links.AddrAdd(h.mustLink(t, link), addr); err != nil {
			t.Fatalf("add %s to %s in %s: %v", a, link, h.name, err)
		}
	}
}

func (h *host) addDefault(t testing.TB, via netip.Addr) {
	t.Helper()
	everything := &net.IPNet{IP: make(net.IP, via.BitLen()/8), Mask: net.CIDRMask(0, via.BitLen())}
	if err := h.links.RouteAdd(&netlink.Route{Dst: everything, Gw: via.AsSlice()}); err != nil {
		t.Fatalf("route by %s in %s: %v", via, h.name, err)
	}
}

// segmentAlone makes the kernel cut TCP and UDP super-packets into segments
// before they enter the link.
func (h *host) segmentAlone(t testing.TB, link string) {
	t.Helper()
	if err := h.links.LinkSetGSOMaxSegs(h.mustLink(t, link), 1); err != nil {
		t.Fatalf("segment at %s in %s: %v", link, h.name, err)
	}
}
