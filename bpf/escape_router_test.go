package bpf

import (
	"errors"
	"math"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// onOneCPU runs a test, not its subtests, on one CPU, so that packets keep their order.
func onOneCPU(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	var one, all unix.CPUSet
	one.Set(0)
	if err := errors.Join(unix.SchedGetaffinity(0, &all), unix.SchedSetaffinity(0, &one)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.SchedSetaffinity(0, &all) })
}

func newEscape(t *testing.T, programs *bench, limits []escapeLimit, at gate) *escape {
	t.Helper()
	e := &escape{t: t, limits: limits, gate: at, numbers: map[string]uint32{}, isn: map[uint16]uint32{}, buf: make([]byte, 1<<17)}

	// The receiver.
	to := newHost(t)
	to.connect("outer", "10.2.0.1/24", "10.2.0.2/24")
	sysctl := func(name, value string) error {
		return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0)
	}
	outer, err := netlink.LinkByName("outer")
	if err != nil {
		t.Fatal(err)
	}
	e.open(outer)
	near := outer.Attrs().HardwareAddr
	var far []byte
	to.do(func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		far = l.Attrs().HardwareAddr
		return errors.Join(
			address(l, "fd02::2/64"), neighbor(l, "10.2.0.1", near), neighbor(l, "fd02::1", near),
			netlink.RouteAdd(&netlink.Route{Gw: netip.MustParseAddr("fd02::1").AsSlice()}),
			sysctl("ipv4/ipfrag_time", "1"), sysctl("ipv6/ip6frag_time", "1"),
			sysctl("ipv4/tcp_synack_retries", "0"), sysctl("ipv4/tcp_max_syn_backlog", "100000"), sysctl("core/somaxconn", "100000"),
			sysctl("ipv4/tcp_fastopen", map[bool]string{false: "0", true: "0x602"}[at.late]), // without cookies, for all sockets
			sysctl("ipv4/tcp_syncookies", "0"),                                               // with SYN cookies an old ACK would make a connection
			e.sockets(),
		)
	})
	err = errors.Join(
		address(outer, "fd02::1/64"), neighbor(outer, "10.2.0.2", far), neighbor(outer, "fd02::2", far),
		sysctl("ipv4/ip_forward", "1"), sysctl("ipv6/conf/all/forwarding", "1"),
	)
	if err != nil {
		t.Fatal(err)
	}

	// The router's limits.
	e.b = &tcpBench{t: t, bench: programs, forgets: true}
	e.b.clearMaps()
	var compiled []shaper.Limit
	for _, l := range limits {
		l.Rate, l.MaxDelay = shaper.MaxRate, time.Second
		if l.MaxConnections > 0 {
			l.Rate, l.MaxDelay, e.counts = 0, 0, true
		}
		l.Match.Attach, l.IPv4Prefix, l.IPv6Prefix = []string{"here"}, 32, 64
		compiled = append(compiled, l.Limit)
	}
	p, err := shaper.New(1024).Compile(compiled, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	e.b.loadPolicy(t, p)
	for i := range p.Len() {
		e.numbers[p.Limit(i).Name] = uint32(i)
	}
	gate, err := netlink.LinkByName("gate")
	if err != nil {
		t.Fatal(err)
	}
	e.b.setAllReplySeen(t, at.late)
	if at.late {
		e.b.setAllDeferUntil(t, math.MaxUint64)
	}
	e.b.attach(gate, true, at.xdp)
	e.before = e.states()
	return e
}

// open creates the gate: a tap, through which packets come in as from a guest, or a tun.
func (e *escape) open(outer netlink.Link) {
	t := e.t
	t.Helper()
	var err error
	if e.tap, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(e.tap) })
	request, err := unix.NewIfreq("gate")
	if err != nil {
		t.Fatal(err)
	}
	kind := uint16(unix.IFF_TAP)
	if e.gate.bare {
		kind = unix.IFF_TUN
	}
	request.SetUint16(kind | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(e.tap, unix.TUNSETIFF, request); err != nil {
		t.Fatal(err)
	}
	gate, err := netlink.LinkByName("gate")
	if err != nil {
		t.Fatal(err)
	}
	if !e.gate.bare {
		err = errors.Join(netlink.LinkSetHardwareAddr(gate, escapeMAC[:]), netlink.LinkSetARPOff(gate))
	}
	err = errors.Join(err, netlink.LinkSetUp(gate),
		address(gate, "10.1.255.254/16"), address(gate, "fd01::ffff/48"))
	if err != nil {
		t.Fatal(err)
	}
}

func address(l netlink.Link, text string) error {
	a, err := netlink.ParseAddr(text)
	if err != nil {
		return err
	}
	a.Flags = unix.IFA_F_NODAD
	return netlink.AddrAdd(l, a)
}

func neighbor(l netlink.Link, ip string, mac []byte) error {
	return netlink.NeighSet(&netlink.Neigh{
		LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: netip.MustParseAddr(ip).AsSlice(), HardwareAddr: mac,
	})
}

// sockets opens the receiver's sockets.
func (e *escape) sockets() error {
	open := func(family, kind, protocol int, port int, then func(int) error) (int, error) {
		s, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
		if err != nil {
			return 0, err
		}
		e.t.Cleanup(func() { unix.Close(s) })
		_ = unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20)
		if port != 0 {
			if err := errors.Join(unix.SetsockoptInt(s, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0), unix.Bind(s, &unix.SockaddrInet6{Port: port})); err != nil {
				return 0, err
			}
		}
		return s, then(s)
	}
	none := func(int) error { return nil }
	unchecked := func(s int) error { return unix.SetsockoptInt(s, unix.IPPROTO_UDP, 102 /* UDP_NO_CHECK6_RX */, 1) }
	listen := func(s int) error { return unix.Listen(s, 1000) }
	var err error
	add := func(to *[]int, family, kind, protocol, port int, then func(int) error) {
		s, err1 := open(family, kind, protocol, port, then)
		*to = append(*to, s)
		err = errors.Join(err, err1)
	}
	var marker []int
	add(&marker, unix.AF_INET6, unix.SOCK_DGRAM, 0, markPort, none)
	for _, port := range []int{escapePort, otherPort} {
		add(&e.datagram, unix.AF_INET6, unix.SOCK_DGRAM, 0, port, unchecked)
		add(&e.listen, unix.AF_INET6, unix.SOCK_STREAM, 0, port, listen)
	}
	for _, protocol := range []int{ipUDP, ipICMP, ipSCTP, ipUnknown} {
		add(&e.datagram, unix.AF_INET, unix.SOCK_RAW, protocol, 0, none)
	}
	for _, protocol := range []int{ipUDP, ipICMPv6, ipSCTP, ipUnknown} {
		add(&e.datagram, unix.AF_INET6, unix.SOCK_RAW, protocol, 0, none)
	}
	e.marker = marker[0]
	return err
}
