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

	"shaperd/shaper"
)

// TestOwn has a limit at an attachment count all connections but the proxy's, those
// it takes at ingress and those it makes at egress.
func TestOwn(t *testing.T) {
	for _, hook := range hooks(t) {
		for _, ingress := range []bool{true, false} {
			if hook == XDP && !ingress {
				continue
			}
			for version, net := range ownNets {
				t.Run(fmt.Sprint(hook, " ", way(ingress), " ", version), func(t *testing.T) {
					testOwn(t, net, Attachment{Ingress: ingress, Hook: hook, Mode: Police})
				})
			}
		}
	}
}

// TestListeners has the programs of XDP know listeners for as long as they are there.
func TestListeners(t *testing.T) {
	newWire(t, "listen")
	a := Attachment{Name: "here", Interfaces: []string{"listen0"}, Ingress: true, Mode: Police, Keep: true}
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
	c, err := p.Prepare([]Attachment{a}, p.listeners, p.policy)
	if err != nil {
		t.Fatal(err)
	}
	want("prepared", two, one)
	c.Cancel()
	want("cancelled", one)
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

// ownNet is the addresses of a client, a router, and a server.
type ownNet struct {
	inside, client, outside, server string
	any                             netip.Addr
}

var ownNets = map[string]ownNet{
	"IPv4": {"10.1.0.1/24", "10.1.0.2/24", "10.2.0.1/24", "10.2.0.2/24", netip.IPv4Unspecified()},
	"IPv6": {"fd01::1/64", "fd01::2/64", "fd02::1/64", "fd02::2/64", netip.IPv6Unspecified()},
}

func at(prefix string, port uint16) string {
	return netip.AddrPortFrom(netip.MustParsePrefix(prefix).Addr(), port).String()
}

// ownBench is a router with a proxy, whose sockets are those of the test.
type ownBench struct {
	*testPlane
	ownNet
	Attachment
	from, to *host
}

func testOwn(t *testing.T, n ownNet, a Attachment) {
	b := &ownBench{ownNet: n, Attachment: a, from: newHost(t), to: newHost(t)}
	for _, name := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+name, []byte("1"), 0); err != nil {
			t.Fatal(err)
		}
	}
	b.from.connect("inside", n.inside, n.client)
	b.to.connect("outside", n.outside, n.server)
	b.Name, b.IdleTimeout, b.Interfaces = "here", time.Hour, []string{"inside"}
	if !a.Ingress {
		b.Interfaces[0] = "outside"
	}
	if a.Hook == XDP {
		// At a veth it loses checksums that are still to be finished.
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

	// It takes IPv6 a while to be ready at a link that has come up.
	within(t, 10*time.Second, func() bool {
		open := append(b.dial(true, 1), b.dial(false, 2)...)
		for _, c := range open {
			_ = c.Close()
		}
		return len(open) == 3
	})

	// Of those that were there before, three are not the proxy's. One is forwarded from
	// a port at which the proxy listens here.
	const before, most = 3, 5
	mine, others := b.dial(true, before), b.dial(false, before-1)
	b.listen(true, netip.AddrPortFrom(n.any, 62000))
	b.from.do(func() error {
		c, err := b.connect(b.dialer(62000), at(n.server, 80))
		others = append(others, c)
		return err
	})
	l := shaper.Limit{Name: "cap", Match: shaper.Match{Attach: []string{"here"}}, Connections: most}
	if a.Hook == XDP {
		l.Excess = shaper.ExcessDrop // it has no way back to a veth's peer without NAPI
	}
	b.apply([]shaper.Limit{l}, b.Attachment)
	b.chat(mine...)
	b.chat(others...)
	b.wantInFlight(before)

	mine = append(mine, b.want(true, 2*most, 2*most)...)
	b.ended()
	others = append(others, b.want(false, most, most-before)...)
	b.wantInFlight(most)
	b.want(true, 1, 1)

	// A connection that nobody knows goes on, if it is the proxy's, and takes after one whose
	// handshake was forgotten.
	b.forgottenAll(math.MaxUint32)
	b.chat(mine...)
	b.chat(others...)
	mine = append(mine, b.want(true, 2, 2)...)
	b.chat(mine...)
	b.forgottenAll(0)

	if b.Ingress {
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

	for _, c := range mine {
		_ = c.Close()
	}
	b.wantInFlight(most)
	for _, c := range others {
		_ = c.Close()
	}
	b.wantInFlight(0)
}

// TestOwnBridge has a host that does not route pass on frames, past a listener of the
// proxy with the same port.
func TestOwnBridge(t *testing.T) {
	n := ownNet{inside: "10.1.0.1/24", client: "10.1.0.2/24", outside: "10.1.0.3/24", server: "10.1.0.4/24", any: netip.IPv4Unspecified()}
	b := &ownBench{ownNet: n, from: newHost(t), to: newHost(t)}
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
	l := shaper.Limit{Name: "cap", Match: shaper.Match{Attach: []string{"here"}}, Connections: 2}
	b.apply([]shaper.Limit{l}, Attachment{
		Name: "here", Interfaces: []string{"inside"}, Ingress: true, Mode: Police, IdleTimeout: time.Hour,
	})
	b.wantAt(at(n.server, 80), 5, 2)
	b.wantInFlight(2)
}

// forgottenAll has handshakes of all tuples be forgotten until some time.
func (b *ownBench) forgottenAll(until uint32) {
	b.t.Helper()
	var line kernelForgottenLine
	for i := range line.Until {
		line.Until[i] = until
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

// over ends a connection from the other side.
const over = 255

// listen listens here, or on the host of who calls, and answers each byte with the
// same. A listener that is mine is the proxy's.
func (b *ownBench) listen(mine bool, at netip.AddrPort) net.Listener {
	b.t.Helper()
	network := "tcp4"
	if at.Addr().Is6() {
		network = "tcp6" // alone, unless control makes it both
	}
	config := net.ListenConfig{Control: b.control(mine)}
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
				for b := make([]byte, 1); b[0] != over; {
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

func (b *ownBench) control(mine bool) func(_, _ string, c syscall.RawConn) error {
	return func(network, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) {
			if mine {
				err = b.Own(int(fd))
			} else if network == "tcp6" {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
			}
		}), err)
	}
}

// dial makes connections through the attachment that the proxy takes or makes, or
// others, and returns those that come about. Every other one of these is forwarded.
func (b *ownBench) dial(mine bool, n int) (open []net.Conn) {
	b.t.Helper()
	for i := range n {
		dialer := net.Dialer{Timeout: b.patience()}
		connect := func(to string) (err error) {
			c, err := b.connect(&dialer, to)
			if c != nil {
				open = append(open, c)
			}
			return err
		}
		forwarded := func() error { return connect(at(b.server, 80)) }
		switch {
		case !mine && i%2 == 0:
			b.from.do(forwarded)
		case b.Ingress && mine:
			b.from.do(func() error { return connect(at(b.inside, 80)) })
		case b.Ingress:
			b.from.do(func() error { return connect(at(b.inside, 81)) })
		default:
			dialer.Control = b.control(mine)
			if err := forwarded(); err != nil {
				b.t.Error(err)
			}
		}
	}
	return open
}

// patience is how long a connection may take to come about, or is waited for that is refused
// without a word.
func (b *ownBench) patience() time.Duration {
	if b.Hook == XDP {
		return time.Second
	}
	return 5 * time.Second
}

// connect returns a connection, or nil when it was refused.
func (b *ownBench) connect(d *net.Dialer, to string) (net.Conn, error) {
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

func (b *ownBench) want(mine bool, n, want int) []net.Conn {
	b.t.Helper()
	open := b.dial(mine, n)
	if len(open) != want {
		b.t.Errorf("%d of %d connections, want %d; the proxy's: %v", len(open), n, want, mine)
	}
	return open
}

func (b *ownBench) wantAt(to string, n, want int) {
	b.t.Helper()
	open := 0
	for range n {
		b.from.do(func() error {
			c, err := b.connect(&net.Dialer{Timeout: b.patience()}, to)
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

// chat has connections exchange data.
func (b *ownBench) chat(open ...net.Conn) {
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

// dialer connects from a port of the client.
func (b *ownBench) dialer(from int) *net.Dialer {
	ip := netip.MustParsePrefix(b.client).Addr().AsSlice()
	return &net.Dialer{Timeout: time.Second, LocalAddr: &net.TCPAddr{IP: ip, Port: from}}
}

// ended has the responder say more to connections of the proxy that have ended.
func (b *ownBench) ended() {
	b.t.Helper()
	adopted := b.adopted()
	defer func() {
		b.t.Helper()
		if n := b.adopted() - adopted; n != 0 {
			b.t.Errorf("%d connections that have ended are counted", n)
		}
	}()
	if !b.Ingress {
		b.to.do(func() error { return acknowledge(b.outside, 80, 51200) })
		return
	}
	// The second time it connects from a port of which the proxy remembers the first.
	for range 2 {
		b.from.do(func() error {
			const from = 61500
			c, err := b.connect(b.dialer(from), at(b.inside, 80))
			// The end of the first one may still be under way.
			for end := time.Now().Add(10 * time.Second); errors.Is(err, unix.EADDRINUSE) && time.Now().Before(end); {
				time.Sleep(10 * time.Millisecond)
				c, err = b.connect(b.dialer(from), at(b.inside, 80))
			}
			if err != nil || c == nil {
				return fmt.Errorf("a connection of the proxy: %v", err)
			}
			// The proxy's end closes first, and so is the one that remembers it.
			_, err = c.Write([]byte{over})
			if err == nil {
				_, err = io.ReadAll(c)
			}
			return errors.Join(err, c.Close(), acknowledge(b.inside, from, 80))
		})
	}
}

// adopted returns how many connections were counted that nobody saw begin.
func (b *ownBench) adopted() uint64 {
	b.t.Helper()
	s, err := b.kernel.state(b.numbers.limits["cap"])
	if err != nil {
		b.t.Fatal(err)
	}
	return s.Adopted
}

// acknowledge sends a segment of no connection. Who has TIME_WAIT for it answers.
func acknowledge(to string, from, port uint16) error {
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
		sum += uint32(binary.BigEndian.Uint16(words)) // the 0xffff that IPv4 has here is none
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
	_, err = c.Write(tcp)
	return err
}

func (b *ownBench) wantInFlight(want int64) {
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
