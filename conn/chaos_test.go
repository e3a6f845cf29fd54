package conn

import (
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

var chaos = flag.Duration("chaos", 1500*time.Millisecond, "how long TestApplyAtRandom takes; ten times that under the race detector")

// Random configurations follow each other during traffic, resets, kills, drains and blocks over TCP
// and UDP: nothing crashes, and no state is left at the end.
func TestApplyAtRandom(t *testing.T) {
	for _, loops := range []int{1, 4} {
		t.Run(fmt.Sprint(loops), func(t *testing.T) { testApplyAtRandom(t, loops) })
	}
}

func testApplyAtRandom(t *testing.T, loops int) {
	rnd := testutil.Rand(t)
	tcp1, tcp2 := testutil.ServeTCP(t, func(c *net.TCPConn) {
		switch rand.IntN(4) {
		case 0:
			c.SetLinger(0)
			io.CopyN(c, c, 1000)
		case 1:
			c.Write(make([]byte, 5000))
			io.CopyN(io.Discard, c, 100)
		default:
			io.Copy(c, c)
		}
	}), testutil.ServeTCP(t, testutil.Echo)
	u1, u2 := echoUDP(t, 0), echoUDP(t, 300)
	s, clock := shaper.New(1024), pacer.NewClock()
	p, err := New(Options{Shaper: s, Clock: clock, Log: quietLog, TrafficLog: quietLog, Loops: loops})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ap := func(a string) (h string, port uint16) {
		x := netip.MustParseAddrPort(a)
		return x.Addr().String(), x.Port()
	}
	var tcpPorts, udpPorts []netip.AddrPort
	for range 3 {
		tcpPorts = append(tcpPorts, netip.MustParseAddrPort(testutil.FreeAddr(t, "tcp")))
		udpPorts = append(udpPorts, netip.MustParseAddrPort(testutil.FreeAddr(t, "udp")))
	}
	apply := func(r *rand.Rand) {
		var listens []shaper.Listener
		perm := r.Perm(3)
		for i := range 1 + r.IntN(3) {
			name := fmt.Sprint("l", perm[i])
			h1, p1 := ap(tcp1)
			h2, p2 := ap(tcp2)
			lt := shaper.Listener{
				Name: "t" + name, Addresses: []shaper.Address{addressOf(shaper.TCP, tcpPorts[i])},
				Downstream: []shaper.Downstream{{Host: h1, Port: p1, MaxConnections: r.IntN(3) * 4}, {Host: h2, Port: p2, Weight: 2}, {Host: "127.0.0.1", Port: 1}}[r.IntN(2) : 2+r.IntN(2)],
				EjectAfter: 2, EjectFor: 50 * time.Millisecond, Balance: shaper.Balance(r.IntN(3)),
				MaxQueue: 1000, ConnectTimeout: 300 * time.Millisecond, TCPIdleTimeout: time.Duration(r.IntN(2)) * 100 * time.Millisecond, MaxLifetime: time.Duration(r.IntN(2)) * 500 * time.Millisecond,
				AccessLog: true, SlowStart: time.Duration(r.IntN(2)) * 50 * time.Millisecond,
				OnDown: shaper.OnDown(r.IntN(2)), Ramp: shaper.Frequency{N: 200, Per: time.Second}, HoldTimeout: 500 * time.Millisecond, RetryUnanswered: r.IntN(2) == 0,
			}
			if r.IntN(3) == 0 {
				lt.Check = shaper.HealthCheck{Interval: 20 * time.Millisecond, Timeout: 20 * time.Millisecond, Rise: 1, Fall: 1}
			}
			h3, p3 := ap(u1.String())
			h4, p4 := ap(u2.String())
			lu := shaper.Listener{
				Name: "u" + name, Addresses: []shaper.Address{addressOf(shaper.UDP, udpPorts[i])},
				Downstream: []shaper.Downstream{{Host: h3, Port: p3, MaxConnections: r.IntN(2) * 5}, {Host: h4, Port: p4}, {Host: "127.0.0.1", Port: 1}}[r.IntN(2) : 2+r.IntN(2)],
				EjectAfter: 2, EjectFor: 50 * time.Millisecond, UDPIdleTimeout: time.Duration(50+r.IntN(2)*500) * time.Millisecond, MaxFlows: 10 + r.IntN(20), MaxFlowsPerSource: r.IntN(2) * 5, Amplification: r.IntN(2) * 3, Transparent: r.IntN(3) == 0, MaxQueue: 1000, ConnectTimeout: time.Second, AccessLog: true,
				Ramp: shaper.Frequency{N: 200, Per: time.Second}, HoldTimeout: 500 * time.Millisecond,
			}
			listens = append(listens, lt, lu)
		}
		if loops > 1 && r.IntN(10) == 0 {
			listens = listens[:r.IntN(2)]
		}
		var limits []shaper.Limit
		keys := []shaper.Fields{0, shaper.KeySource, shaper.KeyPort, shaper.KeyListen, shaper.KeyConnection, shaper.KeySource | shaper.KeyPort}
		for i := range r.IntN(6) {
			l := shaper.Limit{
				Name: fmt.Sprint("limit", i), Key: keys[r.IntN(len(keys))], Direction: shaper.Direction(r.IntN(3)), IPv4Prefix: 32, IPv6Prefix: 64,
				MaxDelay: time.Duration(r.IntN(200)) * time.Millisecond, QueueTimeout: time.Duration(r.IntN(200)) * time.Millisecond, MaxQueue: r.IntN(10), Observe: r.IntN(5) == 0,
			}
			switch r.IntN(7) {
			case 0:
				l.Rate = 1e6 + r.Uint64N(1e8)
			case 1:
				l.MaxConnections = 1 + r.IntN(10)
			case 2:
				l.NewConnections = shaper.Frequency{N: 10 + r.Uint64N(100), Per: time.Second}
				l.RefuseWith = shaper.RefuseReply
				l.Reply = "no"
			case 3:
				l.Rate, l.MaxConnections = 1e6+r.Uint64N(1e8), 1+r.IntN(10)
				l.NewConnections = shaper.Frequency{N: 10 + r.Uint64N(100), Per: time.Second}
			case 4:
				l.Packets = shaper.Frequency{N: 10 + r.Uint64N(1000), Per: time.Second}
				l.Match.Protocol = shaper.UDP
			case 6:
				l.Key, l.Shed = 0, shaper.Shed{CPU: 90, Order: 1}
			case 5:
				l.MaxConnections, l.SlotFor, l.Match.Protocol = 1+r.IntN(10), []shaper.SlotFor{shaper.PerTurn, shaper.PerTransaction}[r.IntN(2)], shaper.TCP
				l.TurnGap = time.Duration(r.IntN(2)) * 5 * time.Millisecond
			}
			if r.IntN(3) == 0 {
				l.Scheduling = shaper.ScheduleFIFO
			}
			if loops > 1 && len(listens) > 0 && r.IntN(16) > 0 {
				l.Match.Listen = []string{listens[r.IntN(len(listens))].Name}
			}
			limits = append(limits, l)
		}
		if r.IntN(8) == 0 {
			limits = append(limits, shaper.Limit{Name: "b", Block: true, Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix("127.0.7.3/32")}}})
		}
		pol, err := s.Compile(limits, listens, nil, nil, r.IntN(10) == 0)
		if err != nil {
			t.Fatal(err)
		}
		for i := range pol.Sheds().All {
			pol.State(i).Shed.Store(&shaper.ShedStatus{Share: r.Float64()})
		}
		if err := p.Apply(t.Context(), listens, pol, nil); err != nil {
			t.Log(err)
		}
	}
	apply(rnd)
	var stop atomic.Bool
	var wg sync.WaitGroup
	for w := range 24 {
		src := fmt.Sprintf("127.0.7.%d", 1+w%6)
		wg.Go(func() {
			for !stop.Load() {
				d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(src)}, Timeout: time.Second}
				c, err := d.Dial("tcp4", tcpPorts[rand.IntN(3)].String())
				if err != nil {
					time.Sleep(time.Millisecond)
					continue
				}
				tc := c.(*net.TCPConn)
				c.SetDeadline(time.Now().Add(time.Second))
				go func() { c.Write(make([]byte, rand.IntN(100000))) }()
				if rand.IntN(3) == 0 {
					io.CopyN(io.Discard, c, int64(rand.IntN(20000)))
				}
				switch rand.IntN(3) {
				case 0:
					tc.SetLinger(0)
				case 1:
					tc.CloseWrite()
					io.Copy(io.Discard, c)
				}
				c.Close()
			}
		})
		wg.Go(func() {
			for !stop.Load() {
				a, _ := net.ResolveUDPAddr("udp4", udpPorts[rand.IntN(3)].String())
				c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.ParseIP(src)}, a)
				if err != nil {
					continue
				}
				for range rand.IntN(40) {
					c.Write(make([]byte, rand.IntN(2000)))
					if rand.IntN(4) == 0 {
						c.SetReadDeadline(time.Now().Add(time.Millisecond))
						c.Read(make([]byte, 2000))
					}
				}
				c.Close()
			}
		})
	}
	wg.Go(func() {
		for !stop.Load() {
			var ids []uint64
			p.Connections(func(c *shaper.ConnectionStatus) { ids = append(ids, c.ID) })
			for i, id := range ids {
				if i%7 == 0 {
					p.Kill(id)
				}
			}
			for _, d := range p.Downstreams() {
				if rand.IntN(10) == 0 {
					p.DrainDownstream(d.Listen, d.Downstream, rand.IntN(2) == 0)
				}
			}
			for _, l := range p.Listeners() {
				switch rand.IntN(20) {
				case 0:
					p.Hold(l.Listen, rand.N(100*time.Millisecond), rand.IntN(2) == 0)
				case 1:
					p.Hold(l.Listen, shaper.Forever, false)
				case 2, 3, 4:
					p.Hold(l.Listen, 0, false)
				}
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
	dur := *chaos
	if raceEnabled {
		dur *= 10
	}
	most, ended := 0, 0
	seen := func() bool { return loops == 1 || most > 1 && ended > 0 }
	for end, n := time.Now().Add(dur), 0; time.Now().Before(end) || !seen() && n < 2000; n++ {
		before := len(p.workers)
		apply(rnd)
		most, ended = max(most, len(p.workers)), ended+max(before-len(p.workers), 0)
		checkApart(t, p)
		time.Sleep(time.Duration(rnd.IntN(30)) * time.Millisecond)
		checkApart(t, p)
	}
	if most > loops || !seen() {
		t.Errorf("%d workers at most, and %d may be; %d ended", most, loops, ended)
	}
	t.Logf("%d workers at most, %d ended", most, ended)
	stop.Store(true)
	wg.Wait()
	pol, err := s.Compile(nil, nil, nil, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Apply(t.Context(), nil, pol, nil); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(testTimeout)
	for {
		left := ""
		p.stopAll(func(leaky.Time) { left = whatIsLeft(p) })
		if left == "" {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("left behind: %s", left)
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	for i := range 6 {
		st := s.Listener(fmt.Sprint("tl", i%3))
		if st.Open.Load() != 0 {
			t.Errorf("%s: %d open", st.Name, st.Open.Load())
		}
		st = s.Listener(fmt.Sprint("ul", i%3))
		if st.Flows.Load() != 0 {
			t.Errorf("%s: %d flows", st.Name, st.Flows.Load())
		}
	}
}

// whatIsLeft describes what is left of connections in any worker of p.
func whatIsLeft(p *Proxy) (left string) {
	report := func(n int, what string) {
		if n != 0 {
			left += fmt.Sprint(n, " ", what, "; ")
		}
	}
	for _, w := range p.workers {
		for _, s := range w.sessions.all {
			left += fmt.Sprintf("a session in stage %d, waits %v; ", s.stage, s.queue != nil)
		}
		report(len(w.flows)+len(w.flowList.all)+len(w.flowList.byID)+len(w.sessions.byID), "flows")
		report(len(w.pendingFlows.all)+len(w.pendingByKey)+w.pendingBytes, "pending flows")
		report(len(w.loop.scheduler.byKey), "queues")
		report(w.loop.memory.used+len(w.loop.memory.holders), "queued bytes")
		report(len(w.admission.byKey), "gates")
		report(len(w.admission.queues)+len(w.admission.sources), "lines")
		report(w.loop.pipes.InUse(), "pipes")
	}
	report(int(p.headroom.sockets.Load())-(1+loopDescriptors)*len(p.workers)-len(p.ports), "sockets")
	return left
}

// checkApart checks that no two workers have anything in common: a bucket, a gate, or places of those that wait.
func checkApart(t *testing.T, p *Proxy) {
	t.Helper()
	p.stopAll(func(leaky.Time) {
		queues, gates, waits, sockets := map[shaper.Key]*worker{}, map[shaper.Key]*worker{}, map[*shaper.LimitState]*worker{}, 0
		memory, sessions := 0, 0
		for _, w := range p.workers {
			memory += w.loop.memory.max
			sessions += len(w.sessions.all)
			for k, q := range w.loop.scheduler.byKey {
				if queues[k] != nil {
					t.Errorf("two workers have the queue of %s: %+v", q.state.Name, k)
				}
				queues[k] = w
			}
			for k, gt := range w.admission.byKey {
				if gates[k] != nil {
					t.Errorf("two workers have the gate of %s: %+v", gt.state.Name, k)
				}
				gates[k] = w
				if gt.waiting > 0 && waits[gt.state] != nil && waits[gt.state] != w {
					t.Errorf("connections wait for %s at two workers", gt.state.Name)
				}
				if gt.waiting > 0 {
					waits[gt.state] = w
				}
			}
			for _, s := range w.sessions.all {
				if s.proxy != w || s.listener.proxy != w || s.admission != nil && s.admission != w.admission || s.turn != nil && s.turn.admission != w.admission {
					t.Errorf("a session of listener %s is of another worker than it", s.name)
				}
			}
			for _, f := range w.flowList.all {
				if f.proxy != w || f.listener.proxy != w || f.key.port.proxy != w || f.slots.admission != w.admission {
					t.Errorf("a flow of listener %s is of another worker than it", f.listener.name)
				}
			}
			for fd := range w.loop.registrations {
				if w.loop.registrations[fd].watcher != nil {
					sockets++
				}
			}
		}
		if open := int(p.openConns.Load()); open != sessions {
			t.Errorf("workers have %d connections of %d", sessions, open)
		}
		if memory > maxQueuedBytes {
			t.Errorf("workers may have %d bytes of memory, all together %d", memory, maxQueuedBytes)
		}
		if n := int(p.headroom.sockets.Load()); n != sockets+loopDescriptors*len(p.workers) {
			t.Errorf("%d sockets are counted, and there are %d", n, sockets+loopDescriptors*len(p.workers))
		}
		for _, ln := range p.listeners {
			if ln.proxy.loop == nil || ln.proxy.admission == nil {
				t.Errorf("listener %s has no worker", ln.name)
			}
		}
	})
}
