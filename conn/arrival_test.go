package conn

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// Where connections always wait for a slot, a client of UDP is let in as well: its first datagram waits.
func TestFlowsTakeTurnsWithConnections(t *testing.T) {
	const most = 2
	for name, limits := range map[string][]shaper.Limit{
		"of a limit":      {{Name: "slots", Connections: most, MaxWait: time.Minute, MaxWaiting: 100}},
		"of a downstream": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := serveTCP(t, echo)
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
						c.SetDeadline(time.Now().Add(patience))
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
			waitFor(t, "hogs", func() bool { return counts.Accepted.Load() > 2*hogs })
			for range 3 {
				if !asks(t, "127.0.6.10", datagrams) {
					t.Error("a datagram has no answer: connections keep its flow out")
				}
			}
			close(stop)
			for range hogs {
				<-done
			}
			if n := counts.FlowsOpened.Load(); n != 3 {
				t.Errorf("%d flows were opened, want 3", n)
			}
		})
	}
}

// What a flow that waits has sent arrives in order once it is let in; what is too much is
// counted. It is listed as waiting, and may be killed.
func TestFlowThatWaitsKeepsItsFirstDatagrams(t *testing.T) {
	t.Parallel()
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String(),
		shaper.Limit{Name: "cap", Connections: 1, MaxWait: time.Minute, MaxWaiting: 10})
	r.listen.IdleTimeout = time.Hour
	r.apply(shaper.Limit{Name: "cap", Connections: 1, MaxWait: time.Minute, MaxWaiting: 10})
	read := func() string {
		b := make([]byte, 100)
		server.SetReadDeadline(time.Now().Add(patience))
		n, from, err := server.ReadFrom(b)
		if err != nil {
			t.Fatal(err)
		}
		server.WriteTo([]byte("y"), from)
		return string(b[:n])
	}
	first := dialUDP(t, r)
	for range 2 { // it goes on after an answer, and so makes no room
		first.Write([]byte("first"))
		read()
		first.Read(make([]byte, 1))
	}
	second, third := dialUDP(t, r), dialUDP(t, r)
	for i := range earlyDatagrams + 2 {
		fmt.Fprint(second, i)
	}
	counts := r.shaper.Listener("l")
	waitFor(t, "what is not kept", func() bool { return counts.SendErrors.Load() == 2 })
	third.Write([]byte("third"))
	state := r.shaper.Policy().State(0)
	waitFor(t, "both to wait", func() bool { return state.Waiting.Load() == 2 })
	ids := map[string]uint64{}
	r.proxy.Connections(func(c *shaper.ConnectionStatus) {
		if c.Stage == "waiting" && c.HeldBy == "cap" && c.Protocol == shaper.UDP {
			ids[c.Source.String()] = c.ID
		}
	})
	if len(ids) != 2 {
		t.Fatalf("%d are listed as waiting, want 2", len(ids))
	}
	if !r.proxy.Kill(ids[third.LocalAddr().String()]) || state.Waiting.Load() != 1 {
		t.Error("one that waits cannot be killed")
	}
	r.proxy.loop.call(func(now leaky.Time) {
		for _, f := range r.proxy.flows {
			f.close(now)
		}
	})
	for i := range earlyDatagrams {
		if got := read(); got != fmt.Sprint(i) {
			t.Errorf("datagram %d is %q", i, got)
		}
	}
	r.proxy.loop.call(func(leaky.Time) {
		if r.proxy.early != 0 || len(r.proxy.arriving) != 0 || len(r.proxy.arrivals.all) != 0 {
			t.Errorf("%d bytes of %d arrivals are left", r.proxy.early, len(r.proxy.arriving))
		}
	})
}

// A drain waits for the first datagrams of a flow that waits for its slot.
func TestDrainLetsInWhatWaits(t *testing.T) {
	t.Parallel()
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String(),
		shaper.Limit{Name: "cap", Connections: 1, MaxWait: time.Minute, MaxWaiting: 10})
	dialUDP(t, r).Write([]byte("first"))
	state := r.shaper.Policy().State(0)
	waitFor(t, "the first", func() bool { return r.shaper.Listener("l").FlowsOpened.Load() == 1 })
	dialUDP(t, r).Write([]byte("second"))
	waitFor(t, "the second", func() bool { return state.Waiting.Load() == 1 })
	drained := make(chan int, 1)
	go func() { drained <- r.proxy.Drain(t.Context()) }()
	select {
	case <-drained:
		t.Fatal("the drain leaves a flow that waits")
	case <-time.After(100 * time.Millisecond):
	}
	r.proxy.loop.call(func(now leaky.Time) {
		for _, f := range r.proxy.flows {
			f.close(now)
		}
	})
	if left := <-drained; left != 0 {
		t.Errorf("%d connections left, want none", left)
	}
	for _, want := range []string{"first", "second"} {
		b := make([]byte, 100)
		server.SetReadDeadline(time.Now().Add(patience))
		if n, _, err := server.ReadFrom(b); err != nil || string(b[:n]) != want {
			t.Errorf("%q came, %v; want %q", b[:n], err, want)
		}
	}
}

// Flows that wait end with their port.
func TestPortThatGoesTakesAlongWhatWaits(t *testing.T) {
	t.Parallel()
	server := serveUDP(t)
	limit := shaper.Limit{Name: "cap", Connections: 1, MaxWait: time.Minute, MaxWaiting: 10}
	r := start(t, shaper.UDP, server.LocalAddr().String(), limit)
	for range 3 {
		dialUDP(t, r).Write([]byte("x"))
	}
	state := r.shaper.Policy().State(0)
	waitFor(t, "two to wait", func() bool { return state.Waiting.Load() == 2 })
	r.apply(limit) // they wait on
	r.listen.Endpoints = []Endpoint{{Protocol: shaper.UDP, Addr: netip.MustParseAddrPort(freePort(t, shaper.UDP))}}
	r.apply(limit)
	if n := state.Waiting.Load(); n != 0 {
		t.Errorf("%d wait at a port that has gone", n)
	}
	r.settle()
}

// However many sources are forged, they have the turns and the room of one.
func TestStrangersTakeTurnsAsOne(t *testing.T) {
	r := newGateRig(t, shaper.Limit{Name: "all", Connections: 2, MaxWait: time.Hour, MaxWaiting: 100})
	const stays = 10 * time.Millisecond
	r.stay("10.0.0.1", 1, stays)
	r.sleep(stays / 2)
	r.stay("10.0.0.2", 1, stays)
	forged, full := 0, 0
	for i := range 1000 {
		r.enter("10.1.0."+fmt.Sprint(i%250), 1, true, func(v *visitor) {
			if !v.in {
				full++
				return
			}
			forged++
			r.after(stays, func() { v.finish() })
		})
	}
	var known [3][2]*int
	for i := range known {
		for j := range known[i] { // so that one waits while the other is in
			known[i][j] = r.stay(fmt.Sprint("10.2.0.", i), 1, stays)
		}
	}
	r.sleep(time.Second / 2)
	r.consistent()
	for i, n := range known {
		if *n[0]+*n[1] < forged-1 {
			t.Errorf("source %d was let in %d times, forged ones %d times", i, *n[0]+*n[1], forged)
		}
	}
	if forged < 10 || full < 900 {
		t.Errorf("%d forged ones were let in, and %d turned away", forged, full)
	}
}

// Where a flow makes room for a new one, another one that has waited for its slot takes the
// place in the table: not both.
func TestWhoMakesRoomDoesSoForOne(t *testing.T) {
	t.Parallel()
	limit := shaper.Limit{Name: "cap", Key: shaper.KeySource, Connections: 1, MaxWait: time.Minute, MaxWaiting: 10}
	r := start(t, shaper.UDP, serveUDP(t).LocalAddr().String(), limit)
	r.listen.IdleTimeout, r.listen.MaxFlows = time.Minute, 2
	r.apply(limit)
	counts, state := r.shaper.Listener("l"), r.shaper.Policy().State(0)
	ask := func(source string) { udpFrom(t, source, r.addr()).Write([]byte("x")) }
	ask("127.0.7.1")
	waitFor(t, "a flow", func() bool { return counts.Flows.Load() == 1 })
	ask("127.0.7.1")
	waitFor(t, "one that waits", func() bool { return state.Waiting.Load() == 1 })
	ask("127.0.7.2")
	waitFor(t, "another flow", func() bool { return counts.Flows.Load() == 2 })
	aged := func() (old bool) { // the first, but nobody looks for those that are to end
		r.proxy.loop.call(func(now leaky.Time) {
			for _, gt := range r.proxy.gates.byKey {
				r.proxy.loop.pacer.Cancel(&gt.relief)
			}
			for _, f := range r.proxy.flows {
				f.seen = now
				if old = now > muteGrace; old && f.flow.Source == netip.MustParseAddr("127.0.7.1") {
					f.seen = now - muteGrace
				}
			}
		})
		return old
	}
	waitFor(t, "an old flow", aged)
	ask("127.0.7.3")
	waitFor(t, "who waited", func() bool { return state.Waiting.Load() == 0 })
	waitFor(t, "the third", func() bool { return counts.FlowsOpened.Load()+counts.FlowsRefused.Load() == 4 })
	r.proxy.loop.call(func(leaky.Time) {
		if n := len(r.proxy.flows); n != 2 {
			t.Errorf("%d flows, and 2 may be", n)
		}
		for _, f := range r.proxy.flows {
			if f.site.sources[turnAddr(f.flow.Source)] != f.source {
				t.Errorf("a flow of %v does not count", f.flow.Source)
			}
		}
	})
}
