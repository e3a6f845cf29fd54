package bpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// TestProxied_NotCounted counts all connections at an attachment except the proxy's: those that it
// accepts at ingress and those that it makes at egress.
func TestProxied_NotCounted(t *testing.T) {
	for _, hook := range hooks(t) {
		for _, ingress := range []bool{true, false} {
			if hook == shaper.HookXDP && !ingress {
				continue
			}
			for version, net := range routerNets {
				t.Run(fmt.Sprint(hook, " ", direction(ingress), " ", version), func(t *testing.T) {
					testProxied(t, net, shaper.Attachment{Direction: direction(ingress), Hook: hook, Mode: shaper.AttachPolice})
				})
			}
		}
	}
}

// TestListeners checks that the XDP programs know the current listeners.
func TestListeners(t *testing.T) {
	newWire(t, "listen")
	a := shaper.Attachment{Name: "here", Interfaces: []string{"listen0"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, OnStop: shaper.StopKeep}
	p := openPlane(t)
	want := func(when string, want ...string) {
		t.Helper()
		got := []string{}
		var l kernelListener
		var unused uint32
		for all := p.kernel.Listeners.Iterate(); all.Next(&l, &unused); {
			got = append(got, fmt.Sprintf("%08x:%d", l.Address, l.Port))
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
	}
	const one, two = "[00000000 00000000 0000ffff 0a000001]:80", "[00000000 00000000 00000000 00000000]:443"
	at1, at2 := netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("[::]:443")
	p.listeners = []netip.AddrPort{at1}
	p.apply(nil, a)
	want("applied", one)
	p.listeners = []netip.AddrPort{at1, at2}
	c, err := p.Prepare([]shaper.Attachment{a}, p.listeners, p.policy)
	if err != nil {
		t.Fatal(err)
	}
	want("prepared", two, one)
	c.Cancel()
	want("canceled", one)
	p.apply(nil, a)
	want("added", two, one)
	p.crash()
	p.open()
	want("left behind", two, one)
	p.listeners = []netip.AddrPort{at2}
	p.apply(nil, a)
	want("by another daemon", two)
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	p.open()
	want("after its end")
	p.apply(nil, a)
	want("and again", two)
	_ = p.Close()
	if err := Detach(p.pins); err != nil {
		t.Error(err)
	}
	p.Plane = nil
}

// routerNet has the addresses of a client, a router and a server.
type routerNet struct {
	inside, client, outside, server string
	any                             netip.Addr
}

var routerNets = map[string]routerNet{
	"IPv4": {"10.1.0.1/24", "10.1.0.2/24", "10.2.0.1/24", "10.2.0.2/24", netip.IPv4Unspecified()},
	"IPv6": {"fd01::1/64", "fd01::2/64", "fd02::1/64", "fd02::2/64", netip.IPv6Unspecified()},
}

func hostPort(prefix string, port uint16) string {
	return netip.AddrPortFrom(netip.MustParsePrefix(prefix).Addr(), port).String()
}

// routerBench is a router with a proxy, which is the test itself.
type routerBench struct {
	*testPlane
	routerNet
	shaper.Attachment
	from, to *host
}

func testProxied(t *testing.T, n routerNet, a shaper.Attachment) {
	b := &routerBench{routerNet: n, Attachment: a, from: newHost(t), to: newHost(t)}
	for _, name := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+name, []byte("1"), 0); err != nil {
			t.Fatal(err)
		}
	}
	b.from.connect("inside", n.inside, n.client)
	b.to.connect("outside", n.outside, n.server)
	b.Name, b.IdleTimeout, b.Interfaces = "here", time.Hour, []string{"inside"}
	if a.Direction == shaper.Egress {
		b.Interfaces[0] = "outside"
	}
	if a.Hook == shaper.HookXDP {
		// At a veth, XDP breaks offloaded checksums.
		b.from.do(func() error {
			eth0, err := netlink.LinkByName("eth0")
			if err == nil {
				withoutOffload(t, eth0)
			}
			return err
		})
	}
	b.testPlane = openPlane(t)

	b.listen(true, netip.AddrPortFrom(n.any, 80))
	b.listen(false, netip.AddrPortFrom(netip.IPv6Unspecified(), 81)) // both versions
	b.to.do(func() error { b.listen(false, netip.AddrPortFrom(n.any, 80)); return nil })
	b.listeners = []netip.AddrPort{netip.AddrPortFrom(n.any, 80)}

	// IPv6 needs some time on a link that has come up.
	within(t, 10*time.Second, func() bool {
		open := append(b.dial(true, 1), b.dial(false, 2)...)
		for _, c := range open {
			_ = c.Close()
		}
		return len(open) == 3
	})

	// Of the connections from before, three are not the proxy's. One is forwarded from a
	// port that the proxy listens on.
	const before, most = 3, 5
	proxied, others := b.dial(true, before), b.dial(false, before-1)
	b.listen(true, netip.AddrPortFrom(n.any, 62000))
	b.from.do(func() error {
		c, err := b.connect(b.dialer(62000), hostPort(n.server, 80))
		others = append(others, c)
		return err
	})
	l := shaper.Limit{Name: "cap", Match: shaper.Match{Attach: []string{"here"}}, MaxConnections: most}
	if a.Hook == shaper.HookXDP {
		l.RefuseWith = shaper.RefuseDrop // XDP cannot reply to a veth peer without NAPI
	}
	b.apply([]shaper.Limit{l}, b.Attachment)
	b.exchangeData(proxied...)
	b.exchangeData(others...)
	b.wantInFlight(before)

	proxied = append(proxied, b.want(true, 2*most, 2*most)...)
	b.sendStraySegments()
	others = append(others, b.want(false, most, most-before)...)
	b.wantInFlight(most)
	b.want(true, 1, 1)

	// A proxied connection continues even if its tuple is that of a forgotten handshake.
	b.setAllForgotten(math.MaxUint32)
	b.exchangeData(proxied...)
	b.exchangeData(others...)
	proxied = append(proxied, b.want(true, 2, 2)...)
	b.exchangeData(proxied...)
	b.setAllForgotten(0)

	if b.Direction == shaper.Ingress {
		again := netip.AddrPortFrom(netip.MustParsePrefix(n.inside).Addr(), 82)
		first := b.listen(true, again)
		b.listeners = append(b.listeners, again)
		b.apply([]shaper.Limit{l}, b.Attachment)
		b.wantAt(again.String(), 2, 2)
		_ = first.Close()
		b.listeners = b.listeners[:1]
		b.apply([]shaper.Limit{l}, b.Attachment)
		b.listen(false, again)
		b.wantAt(again.String(), 1, 0)
	}

	for _, c := range proxied {
		_ = c.Close()
	}
	b.wantInFlight(most)
	for _, c := range others {
		_ = c.Close()
	}
	b.wantInFlight(0)
}

// TestProxied_Bridge bridges connections past a listener of the proxy with the same port, on a host that does
// not route.
func TestProxied_Bridge(t *testing.T) {
	n := routerNet{inside: "10.1.0.1/24", client: "10.1.0.2/24", outside: "10.1.0.3/24", server: "10.1.0.4/24", any: netip.IPv4Unspecified()}
	b := &routerBench{routerNet: n, from: newHost(t), to: newHost(t)}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0); err != nil {
		t.Fatal(err)
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bridge"}}
	if err := errors.Join(netlink.LinkAdd(bridge), netlink.LinkSetUp(bridge)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(bridge) })
	for _, l := range []netlink.Link{b.from.connect("inside", n.inside, n.client), b.to.connect("outside", n.outside, n.server)} {
		if err := netlink.LinkSetMaster(l, bridge); err != nil {
			t.Fatal(err)
		}
	}
	b.testPlane = openPlane(t)
	b.listen(true, netip.AddrPortFrom(n.any, 80))
	b.to.do(func() error { b.listen(false, netip.AddrPortFrom(n.any, 80)); return nil })
	l := shaper.Limit{Name: "cap", Match: shaper.Match{Attach: []string{"here"}}, MaxConnections: 2}
	b.apply([]shaper.Limit{l}, shaper.Attachment{
		Name: "here", Interfaces: []string{"inside"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, IdleTimeout: time.Hour,
	})
	b.wantAt(hostPort(n.server, 80), 5, 2)
	b.wantInFlight(2)
}

// setAllForgotten marks the handshakes of all tuples as forgotten until a time.
func (b *routerBench) setAllForgotten(until uint32) {
	b.t.Helper()
	var line kernelForgottenLine
	for i := range line.Expires {
		line.Expires[i] = until
	}
	n := int(b.kernel.Forgotten.MaxEntries())
	keys := make([]uint32, n)
	for i := range keys {
		keys[i] = uint32(i)
	}
	if _, err := b.kernel.Forgotten.BatchUpdate(keys, slices.Repeat([]kernelForgottenLine{line}, n), nil); err != nil {
		b.t.Fatal(err)
	}
}

// closeByte makes the other end close a connection.
const closeByte = 255

// listen listens in the current namespace and echoes each byte. A proxied listener is the
// proxy's.
func (b *routerBench) listen(proxied bool, at netip.AddrPort) net.Listener {
	b.t.Helper()
	network := "tcp4"
	if at.Addr().Is6() {
		network = "tcp6" // IPv6 only, unless control changes it
	}
	config := net.ListenConfig{Control: b.control(proxied)}
	config.SetMultipathTCP(false)
	l, err := config.Listen(context.Background(), network, at.String())
	if err != nil {
		b.t.Fatal(err)
	}
	var served sync.WaitGroup
	served.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			served.Go(func() {
				defer c.Close()
				for b := make([]byte, 1); b[0] != closeByte; {
					if _, err := c.Read(b); err != nil {
						return
					}
					_, _ = c.Write(b)
				}
			})
		}
	})
	b.t.Cleanup(func() { _ = l.Close() })
	return l
}

func (b *routerBench) control(proxied bool) func(_, _ string, c syscall.RawConn) error {
	return func(network, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) {
			if proxied {
				err = b.MarkProxied(int(fd))
			} else if network == "tcp6" {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
			}
		}), err)
	}
}

// dial makes connections through the attachment, which the proxy accepts or makes if proxied
// is set, and returns those that are established. Every other connection that is not proxied
// is forwarded.
func (b *routerBench) dial(proxied bool, n int) (open []net.Conn) {
	b.t.Helper()
	for i := range n {
		dialer := net.Dialer{Timeout: b.dialTimeout()}
		connect := func(to string) (err error) {
			c, err := b.connect(&dialer, to)
			if c != nil {
				open = append(open, c)
			}
			return err
		}
		forwarded := func() error { return connect(hostPort(b.server, 80)) }
		switch {
		case !proxied && i%2 == 0:
			b.from.do(forwarded)
		case b.Direction == shaper.Ingress && proxied:
			b.from.do(func() error { return connect(hostPort(b.inside, 80)) })
		case b.Direction == shaper.Ingress:
			b.from.do(func() error { return connect(hostPort(b.inside, 81)) })
		default:
			dialer.Control = b.control(proxied)
			if err := forwarded(); err != nil {
				b.t.Error(err)
			}
		}
	}
	return open
}

// dialTimeout is the timeout of a dial, which XDP's silent refusals run into.
func (b *routerBench) dialTimeout() time.Duration {
	if b.Hook == shaper.HookXDP {
		return time.Second
	}
	return 5 * time.Second
}

// connect returns a connection, or nil if it was refused or timed out.
func (b *routerBench) connect(d *net.Dialer, to string) (net.Conn, error) {
	c, err := d.Dial("tcp", to)
	var timeout net.Error
	if errors.Is(err, syscall.ECONNREFUSED) || errors.As(err, &timeout) && timeout.Timeout() {
		return nil, nil
	}
	if err == nil {
		b.t.Cleanup(func() { _ = c.Close() })
	}
	return c, err
}

func (b *routerBench) want(proxied bool, n, want int) []net.Conn {
	b.t.Helper()
	open := b.dial(proxied, n)
	if len(open) != want {
		b.t.Errorf("%d of %d connections, want %d; proxied: %v", len(open), n, want, proxied)
	}
	return open
}

func (b *routerBench) wantAt(to string, n, want int) {
	b.t.Helper()
	open := 0
	for range n {
		b.from.do(func() error {
			c, err := b.connect(&net.Dialer{Timeout: b.dialTimeout()}, to)
			if c != nil {
				open++
			}
			return err
		})
	}
	if open != want {
		b.t.Errorf("%d of %d connections to %s, want %d", open, n, to, want)
	}
}

// exchangeData exchanges data on connections.
func (b *routerBench) exchangeData(open ...net.Conn) {
	b.t.Helper()
	for _, c := range open {
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		for range 3 {
			_, err := c.Write([]byte{1})
			if err == nil {
				_, err = c.Read(make([]byte, 1))
			}
			if err != nil {
				b.t.Fatal(err)
			}
		}
	}
}

// dialer returns a dialer that connects from a port of the client.
func (b *routerBench) dialer(from int) *net.Dialer {
	ip := netip.MustParsePrefix(b.client).Addr().AsSlice()
	return &net.Dialer{Timeout: time.Second, LocalAddr: &net.TCPAddr{IP: ip, Port: from}}
}

// sendStraySegments sends segments of the responder on proxied connections that have ended.
func (b *routerBench) sendStraySegments() {
	b.t.Helper()
	adopted := b.adopted()
	defer func() {
		b.t.Helper()
		if n := b.adopted() - adopted; n != 0 {
			b.t.Errorf("%d ended connections are counted", n)
		}
	}()
	if b.Direction == shaper.Egress {
		b.to.do(func() error { return sendStrayACK(b.outside, 80, 51200) })
		return
	}
	// The second connection reuses a port that the proxy has in TIME_WAIT.
	for range 2 {
		b.from.do(func() error {
			const from = 61500
			c, err := b.connect(b.dialer(from), hostPort(b.inside, 80))
			// The first connection may not have ended yet.
			for end := time.Now().Add(10 * time.Second); errors.Is(err, unix.EADDRINUSE) && time.Now().Before(end); {
				time.Sleep(10 * time.Millisecond)
				c, err = b.connect(b.dialer(from), hostPort(b.inside, 80))
			}
			if err != nil || c == nil {
				return errors.Join(errors.New("no proxied connection"), err)
			}
			// The proxy closes first, and so has the TIME_WAIT.
			_, err = c.Write([]byte{closeByte})
			if err == nil {
				_, err = io.ReadAll(c)
			}
			return errors.Join(err, c.Close(), sendStrayACK(b.inside, from, 80))
		})
	}
}

// adopted returns the number of adopted connections.
func (b *routerBench) adopted() uint64 {
	b.t.Helper()
	s, err := b.kernel.readState(b.numbers.limits["cap"])
	if err != nil {
		b.t.Fatal(err)
	}
	return s.ConnsAdopted
}

// sendStrayACK sends a segment without a connection. A socket in TIME_WAIT replies to it.
func sendStrayACK(to string, from, port uint16) error {
	c, err := net.Dial("ip:tcp", netip.MustParsePrefix(to).Addr().String())
	if err != nil {
		return err
	}
	defer c.Close()
	const flagACK = 1 << 4
	tcp := binary.BigEndian.AppendUint16(nil, from)
	tcp = binary.BigEndian.AppendUint16(tcp, port)
	tcp = append(tcp, 1, 2, 3, 4, 5, 6, 7, 8, 5<<4, flagACK, 1, 0, 0, 0, 0, 0)
	near, far := c.LocalAddr().(*net.IPAddr).IP.To16(), c.RemoteAddr().(*net.IPAddr).IP.To16()
	sum := uint32(unix.IPPROTO_TCP + len(tcp))
	for words := slices.Concat(near, far, tcp); len(words) > 0; words = words[2:] {
		sum += uint32(binary.BigEndian.Uint16(words)) // the 0xffff of a mapped IPv4 address adds nothing
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
	_, err = c.Write(tcp)
	return err
}

func (b *routerBench) wantInFlight(want int64) {
	b.t.Helper()
	var n int64
	for end := time.Now().Add(3 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if _, err := b.Status(); err != nil {
			b.t.Fatal(err)
		}
		n = b.policy.State(0).InFlight.Load()
		if n == want || time.Now().After(end) {
			break
		}
	}
	if n != want {
		b.t.Errorf("%d in flight, want %d", n, want)
	}
}
