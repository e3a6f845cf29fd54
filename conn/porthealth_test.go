package conn

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// twoHosts serves a UDP port at two addresses of this host, and returns it and a port that is
// closed at both.
func twoHosts(t *testing.T, hosts ...string) (served, closed uint16) {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(hosts[0])})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	closed = c.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	for _, host := range hosts {
		c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(host), Port: int(served)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		served = c.LocalAddr().(*net.UDPAddr).AddrPort().Port()
		go func() {
			b := make([]byte, 2000)
			for {
				n, from, err := c.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				c.WriteToUDPAddrPort(b[:n], from)
			}
		}()
	}
	return served, closed
}

// If one port of a range is closed at the downstreams, traffic to it neither ejects a downstream
// at another port nor ends flows there.
func TestPortRange_ClosedPortEjectsNoOther(t *testing.T) {
	hosts := []string{"127.6.0.1", "127.6.0.2"}
	served, closed := twoHosts(t, hosts...)
	var out testutil.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	s := shaper.New(1000)
	p, err := New(Options{Shaper: s, Clock: pacer.NewClock(), Log: log, TrafficLog: quietLog})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	listen := shaper.Listener{
		Name: "l", Downstream: []shaper.Downstream{{Host: hosts[0]}, {Host: hosts[1]}}, EjectAfter: 3, EjectFor: time.Minute,
		MaxQueue: 1000, ConnectTimeout: time.Second, UDPIdleTimeout: time.Minute, MaxFlows: 1000,
	}
	at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr("127.7.0.1"), port) }
	for _, port := range []uint16{served, closed} {
		listen.Addresses = append(listen.Addresses, addressOf(shaper.UDP, at(port)))
	}
	if err := p.Apply(t.Context(), []shaper.Listener{listen}, policy(t, s), nil); err != nil {
		t.Fatal(err)
	}
	r := &proxyRig{t: t, proxy: p, shaper: s, listen: listen}
	good := []net.Conn{udpFrom(t, "127.0.0.5", at(served).String()), udpFrom(t, "127.0.0.5", at(served).String())}
	ask := func() {
		t.Helper()
		for _, c := range good { // one for each downstream
			c.Write([]byte("ping"))
			c.SetReadDeadline(time.Now().Add(testTimeout))
			if _, err := c.Read(make([]byte, 10)); err != nil {
				t.Fatal(err)
			}
		}
	}
	ask()
	before := r.flowsOf("127.0.0.5")
	ejected := func() (at []uint16) {
		p.home.loop.call(func(now leaky.Time) {
			for _, d := range p.listeners["l"].downstreams {
				for port := range d.ports {
					if !d.available(port, now) {
						at = append(at, port)
					}
				}
			}
		})
		return at
	}
	for round := range 3 {
		for len(ejected()) < 2 {
			bad := udpFrom(t, "127.0.0.66", at(closed).String())
			for range 2 {
				bad.Write([]byte("x"))
				time.Sleep(2 * time.Millisecond)
			}
		}
		for _, port := range ejected() {
			if port != closed {
				t.Errorf("round %d: ejected at port %d, want only %d", round, port, closed)
			}
		}
		ask()
		for _, d := range p.Downstreams() {
			if !d.Up {
				t.Errorf("round %d: %s is not up", round, d.Downstream)
			}
		}
		if round == 0 {
			testutil.WaitFor(t, "flows at the closed port to end", func() bool { return len(r.flowsOf("127.0.0.66")) <= 2 })
		}
		p.home.loop.call(func(leaky.Time) { // as if the ejection had ended
			for _, d := range p.listeners["l"].downstreams {
				for _, o := range d.ports {
					o.ejectedUntil = 0
				}
			}
		})
	}
	if after := r.flowsOf("127.0.0.5"); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("the flows at the good port %v became %v", before, after)
	}
	if n := strings.Count(out.String(), "downstream ejected"); n < 2 || n > 12 {
		t.Errorf("%d log records of an ejection:\n%s", n, out.String())
	}
}

// A flow that was opened while all downstreams were ejected, and is refused by its own, moves to
// one that has recovered.
func TestUDPFlow_LeavesEjectedDownstream(t *testing.T) {
	hosts := []string{"127.6.1.1", "127.6.1.2"}
	served, closed := twoHosts(t, hosts...)
	r := start(t, shaper.UDP, fmt.Sprintf("%s:%d", hosts[0], closed))
	r.listen.Downstream = append(r.listen.Downstream, shaper.Downstream{Host: hosts[1], Port: served})
	r.listen.EjectAfter, r.listen.EjectFor, r.listen.UDPIdleTimeout = 1, time.Minute, time.Minute
	r.apply()
	eject := func(now leaky.Time) {
		for _, d := range r.proxy.listeners["l"].downstreams {
			d.ports = map[uint16]*portHealth{d.Port: {failures: 1, ejectedUntil: now + 60*leaky.Second}}
		}
	}
	c := udpFrom(t, "127.0.0.1", r.addr())
	testutil.WaitFor(t, "a flow to the closed port", func() bool {
		r.proxy.home.loop.call(eject) // a reply of the other one has ended that
		c.Write([]byte("x"))
		there := false
		r.proxy.home.loop.call(func(now leaky.Time) {
			for _, f := range r.proxy.home.flows {
				there = f.downstreamPort == closed
				if !there {
					f.close(now)
				}
			}
		})
		return there
	})
	r.proxy.home.loop.call(func(now leaky.Time) { r.proxy.listeners["l"].downstreams[1].recordSuccess(served, now) })
	testutil.WaitFor(t, "a reply", func() bool {
		c.Write([]byte("x"))
		c.SetReadDeadline(time.Now().Add(5 * time.Millisecond))
		n, _ := c.Read(make([]byte, 10))
		return n > 0
	})
}

// A connection that waits at a port where one downstream is ejected and the other full does not
// block another port.
func TestPortRange_WaiterDoesNotBlockOtherPorts(t *testing.T) {
	t.Parallel()
	const room, full = "127.6.2.1", "127.6.2.2"
	served, closed := twoHosts(t, room, full)
	l, err := net.Listen("tcp4", fmt.Sprintf("%s:%d", room, served))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { io.Copy(c, c); c.Close() }()
		}
	}()
	r := start(t, shaper.TCP, l.Addr().String())
	r.listen.Downstream = []shaper.Downstream{{Host: room}, {Host: full, MaxConnections: 1}}
	r.listen.EjectAfter, r.listen.EjectFor, r.listen.ConnectTimeout = 1, time.Hour, time.Hour
	r.listen.Addresses = nil
	for _, port := range []uint16{served, closed} {
		at := netip.AddrPortFrom(netip.MustParseAddr("127.7.2.1"), port)
		r.listen.Addresses = append(r.listen.Addresses,
			addressOf(shaper.TCP, at), addressOf(shaper.UDP, at))
	}
	r.apply()
	fill := func(n int) {
		r.proxy.home.loop.call(func(now leaky.Time) {
			all := r.proxy.listeners["l"].downstreams
			all[0].ports = map[uint16]*portHealth{closed: {failures: 1, ejectedUntil: now + 3600*leaky.Second}}
			all[1].inFlight += n
		})
	}
	fill(1)
	waiter := dial(t, fmt.Sprintf("127.7.2.1:%d", closed))
	testutil.WaitFor(t, "a waiter", func() (waits bool) {
		r.proxy.home.loop.call(func(leaky.Time) { waits = r.proxy.listeners["l"].hasWaiters() })
		return waits
	})
	at := r.listen.Endpoints()[0].Addr.String()
	if !getsReply(t, "127.0.0.1", at) {
		t.Error("a UDP flow to the other port is not served")
	}
	c := dial(t, at)
	c.SetDeadline(time.Now().Add(testTimeout))
	c.Write([]byte("ping"))
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Errorf("a connection to the other port is not served: %v", err)
	}
	c.Close()
	waiter.Close()
	fill(-1)
	r.settle()
}
