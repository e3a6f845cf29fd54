package conn

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// Where connections always wait for a slot, a UDP client is served as well: its first datagram waits.
func TestUDPFlowsShareAdmissionWithTCP(t *testing.T) {
	const most = 2
	for name, limits := range map[string][]shaper.Limit{
		"of a limit":      {{Name: "slots", MaxConnections: most, QueueTimeout: time.Minute, MaxQueue: 100}},
		"of a downstream": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := testutil.ServeTCP(t, testutil.Echo)
			echoUDPAt(t, addr, 0)
			r, datagrams := startDual(t, addr, most, limits)
			stop := make(chan struct{})
			done := make(chan struct{})
			const hogs = 8
			for range hogs {
				go func() {
					defer func() { done <- struct{}{} }()
					for {
						c, err := net.Dial("tcp4", r.addr())
						if err != nil {
							return
						}
						c.SetDeadline(time.Now().Add(testTimeout))
						c.Write([]byte("x"))
						c.Read(make([]byte, 1))
						time.Sleep(5 * time.Millisecond)
						c.Close()
						select {
						case <-stop:
							return
						default:
						}
					}
				}()
			}
			counts := r.shaper.Listener("l")
			testutil.WaitFor(t, "hogs", func() bool { return counts.Accepted.Load() > 2*hogs })
			asked := uint64(0)
			for range 3 {
				// A flow whose reply is late gives way to connections that wait: its client asks again.
				c := udpFrom(t, "127.0.6.10", datagrams)
				answered := false
				for begun := time.Now(); !answered && time.Since(begun) < testTimeout; asked++ {
					c.Write([]byte("question"))
					c.SetReadDeadline(time.Now().Add(testTimeout / 4))
					n, _ := c.Read(make([]byte, 2000))
					answered = n > 0
				}
				if !answered {
					t.Error("no reply to a datagram: connections keep its flow out")
				}
			}
			close(stop)
			for range hogs {
				<-done
			}
			if n := counts.FlowsOpened.Load(); n < 3 || n > asked {
				t.Errorf("%d flows were opened for %d datagrams, want 3 at least", n, asked)
			}
		})
	}
}

// Datagrams of a waiting flow are sent in order after its admission; those that exceed the buffer are
// counted. The flow is listed as waiting, and can be killed.
func TestPendingFlow_BuffersFirstDatagrams(t *testing.T) {
	t.Parallel()
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String(),
		shaper.Limit{Name: "cap", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10})
	r.listen.UDPIdleTimeout = time.Hour
	r.apply(shaper.Limit{Name: "cap", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10})
	read := func() string { return answer(t, server) }
	stays(t, r, server)
	second, third := dialUDP(t, r), dialUDP(t, r)
	for i := range maxPendingDatagrams + 2 {
		fmt.Fprint(second, i)
	}
	counts := r.shaper.Listener("l")
	testutil.WaitFor(t, "the datagrams beyond the buffer", func() bool { return counts.SendErrors.Load() == 2 })
	third.Write([]byte("third"))
	state := r.shaper.Policy().State(0)
	testutil.WaitFor(t, "both to wait", func() bool { return state.Waiting.Load() == 2 })
	ids := map[string]uint64{}
	r.proxy.Connections(func(c *shaper.ConnectionStatus) {
		if c.Stage == "waiting" && c.ThrottledBy == "cap" && c.Protocol == shaper.UDP {
			ids[c.Source.String()] = c.ID
		}
	})
	if len(ids) != 2 {
		t.Fatalf("%d are listed as waiting, want 2", len(ids))
	}
	if !r.proxy.Kill(ids[third.LocalAddr().String()]) || state.Waiting.Load() != 1 {
		t.Error("a waiting flow cannot be killed")
	}
	r.proxy.home.loop.call(func(now leaky.Time) {
		for _, f := range r.proxy.home.flows {
			f.close(now)
		}
	})
	for i := range maxPendingDatagrams {
		if got := read(); got != fmt.Sprint(i) {
			t.Errorf("datagram %d is %q", i, got)
		}
	}
	r.proxy.home.loop.call(func(leaky.Time) {
		if r.proxy.home.pendingBytes != 0 || len(r.proxy.home.pendingByKey) != 0 || len(r.proxy.home.pendingFlows.all) != 0 {
			t.Errorf("%d bytes of %d pending flows are left", r.proxy.home.pendingBytes, len(r.proxy.home.pendingByKey))
		}
	})
}

// answer replies to the next datagram that a server gets, and returns that.
func answer(t *testing.T, server net.PacketConn) string {
	t.Helper()
	b := make([]byte, 100)
	server.SetReadDeadline(time.Now().Add(testTimeout))
	n, from, err := server.ReadFrom(b)
	if err != nil {
		t.Fatal(err)
	}
	server.WriteTo([]byte("y"), from)
	return string(b[:n])
}

// stays opens a flow that is not evicted: it sends again after a reply.
func stays(t *testing.T, r *proxyRig, server net.PacketConn) {
	t.Helper()
	c := dialUDP(t, r)
	c.SetDeadline(time.Now().Add(testTimeout))
	for range 2 {
		c.Write([]byte("first"))
		answer(t, server)
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
}

// Shutdown waits for the first datagrams of a flow that waits for its slot.
func TestShutdown_AdmitsPendingFlows(t *testing.T) {
	t.Parallel()
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String(),
		shaper.Limit{Name: "cap", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10})
	r.listen.UDPIdleTimeout = time.Hour
	r.apply(shaper.Limit{Name: "cap", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10})
	stays(t, r, server)
	state := r.shaper.Policy().State(0)
	dialUDP(t, r).Write([]byte("second"))
	testutil.WaitFor(t, "the second", func() bool { return state.Waiting.Load() == 1 })
	drained := make(chan int, 1)
	go func() { drained <- r.proxy.Shutdown(t.Context()) }()
	select {
	case <-drained:
		t.Fatal("Shutdown does not wait for a pending flow")
	case <-time.After(100 * time.Millisecond):
	}
	r.proxy.home.loop.call(func(now leaky.Time) {
		for _, f := range r.proxy.home.flows {
			f.close(now)
		}
	})
	if left := <-drained; left != 0 {
		t.Errorf("%d connections left, want none", left)
	}
	if got := answer(t, server); got != "second" {
		t.Errorf("got %q", got)
	}
}

// Waiting flows end with their port.
func TestPendingFlow_EndsWithItsPort(t *testing.T) {
	t.Parallel()
	server := serveUDP(t)
	limit := shaper.Limit{Name: "cap", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10}
	r := start(t, shaper.UDP, server.LocalAddr().String(), limit)
	r.listen.UDPIdleTimeout = time.Hour
	r.apply(limit)
	stays(t, r, server)
	for range 2 {
		dialUDP(t, r).Write([]byte("x"))
	}
	state := r.shaper.Policy().State(0)
	testutil.WaitFor(t, "two to wait", func() bool { return state.Waiting.Load() == 2 })
	r.apply(limit) // they keep waiting
	r.listen.Addresses = []shaper.Address{addressOf(shaper.UDP, netip.MustParseAddrPort(testutil.FreeAddr(t, "udp")))}
	r.apply(limit)
	if n := state.Waiting.Load(); n != 0 {
		t.Errorf("%d wait at a removed port", n)
	}
	r.settle()
}

// Any number of forged sources together get the turns and the quota of one source.
func TestUnverifiedSourcesWaitAsOne(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "all", MaxConnections: 2, QueueTimeout: time.Hour, MaxQueue: 100})
	const stays = 10 * time.Millisecond
	r.cycle("10.0.0.1", 1, stays)
	r.sleep(stays / 2)
	r.cycle("10.0.0.2", 1, stays)
	forged, full := 0, 0
	for i := range 1000 {
		r.enter("10.1.0."+fmt.Sprint(i%250), 1, true, func(v *visitor) {
			if !v.granted {
				full++
				return
			}
			forged++
			r.after(stays, func() { v.finish() })
		})
	}
	var known [3][2]*int
	for i := range known {
		for j := range known[i] { // so that one waits while the other is in flight
			known[i][j] = r.cycle(fmt.Sprint("10.2.0.", i), 1, stays)
		}
	}
	r.sleep(time.Second / 2)
	r.consistent()
	for i, n := range known {
		if *n[0]+*n[1] < forged-1 {
			t.Errorf("source %d was admitted %d times, forged ones %d times", i, *n[0]+*n[1], forged)
		}
	}
	if forged < 10 || full < 900 {
		t.Errorf("%d forged ones were admitted, %d refused", forged, full)
	}
}

// If a flow is evicted for a new one, a waiting flow takes its entry in the table: not both.
func TestEvictedFlowMakesRoomForOne(t *testing.T) {
	t.Parallel()
	limit := shaper.Limit{Name: "cap", Key: shaper.KeySource, MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10}
	r := start(t, shaper.UDP, serveUDP(t).LocalAddr().String(), limit)
	r.listen.UDPIdleTimeout, r.listen.MaxFlows = time.Minute, 2
	r.apply(limit)
	counts, state := r.shaper.Listener("l"), r.shaper.Policy().State(0)
	ask := func(source string) { udpFrom(t, source, r.addr()).Write([]byte("x")) }
	ask("127.0.7.1")
	testutil.WaitFor(t, "a flow", func() bool { return counts.Flows.Load() == 1 })
	r.proxy.home.loop.call(func(now leaky.Time) { // it does not make room yet
		for _, f := range r.proxy.home.flows {
			f.lastActive = now + 3600*leaky.Second
		}
	})
	ask("127.0.7.1")
	testutil.WaitFor(t, "a waiter", func() bool { return state.Waiting.Load() == 1 })
	ask("127.0.7.2")
	testutil.WaitFor(t, "another flow", func() bool { return counts.Flows.Load() == 2 })
	aged := func() (old bool) { // without a lookup of flows that can be evicted
		r.proxy.home.loop.call(func(now leaky.Time) {
			for _, gt := range r.proxy.home.admission.byKey {
				r.proxy.home.loop.pacer.Cancel(&gt.relief)
			}
			for _, f := range r.proxy.home.flows {
				f.lastActive = now
				if old = now > unansweredGrace; old && f.flow.Source == netip.MustParseAddr("127.0.7.1") {
					f.lastActive = now - unansweredGrace
				}
			}
		})
		return old
	}
	testutil.WaitFor(t, "an old flow", aged)
	ask("127.0.7.3")
	testutil.WaitFor(t, "no waiter", func() bool { return state.Waiting.Load() == 0 })
	testutil.WaitFor(t, "the third", func() bool { return counts.FlowsOpened.Load()+counts.FlowsRefused.Load() == 4 })
	r.proxy.home.loop.call(func(leaky.Time) {
		if n := len(r.proxy.home.flows); n != 2 {
			t.Errorf("%d flows, want at most 2", n)
		}
		for _, f := range r.proxy.home.flows {
			if f.listener.sources[sourceKey(f.flow.Source)] != f.source {
				t.Errorf("a flow of %v is not counted", f.flow.Source)
			}
		}
	})
}
