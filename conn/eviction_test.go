package conn

import (
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// echoUDP serves a socket that replies to each datagram with answer bytes, or with an echo if answer
// is 0.
func echoUDP(t testing.TB, answer int) net.Addr {
	t.Helper()
	return echoUDPAt(t, "127.0.0.1:0", answer)
}

func echoUDPAt(t testing.TB, addr string, answer int) net.Addr {
	t.Helper()
	server := testutil.ListenUDP(t, addr)
	testutil.ServeUDP(t, server, func(data []byte, _ netip.AddrPort) []byte {
		if answer > 0 {
			return data[:answer]
		}
		return data
	})
	return server.LocalAddr()
}

// countUDP serves a socket that counts datagrams by their first byte, and sends no replies.
func countUDP(t testing.TB) (net.Addr, *[256]atomic.Int64) {
	t.Helper()
	server := testutil.ListenUDP(t, "127.0.0.1:0")
	got := new([256]atomic.Int64)
	testutil.ServeUDP(t, server, func(data []byte, _ netip.AddrPort) []byte {
		if len(data) > 0 {
			got[data[0]].Add(1)
		}
		return nil
	})
	return server.LocalAddr(), got
}

// udpFrom opens a socket at a source address of this host.
func udpFrom(t testing.TB, source, to string) *net.UDPConn {
	t.Helper()
	a, err := net.ResolveUDPAddr("udp4", to)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.ParseIP(source)}, a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// getsReply sends a datagram from a new port, and reports whether it gets a reply.
func getsReply(t testing.TB, source, to string) bool {
	t.Helper()
	c := udpFrom(t, source, to)
	c.Write([]byte("question"))
	c.SetReadDeadline(time.Now().Add(testTimeout))
	n, _ := c.Read(make([]byte, 2000))
	return n > 0
}

// flowsOf returns the IDs of the flows of a source.
func (r *proxyRig) flowsOf(source string) map[uint64]bool {
	flows := map[uint64]bool{}
	r.proxy.home.loop.call(func(leaky.Time) {
		for _, f := range r.proxy.home.flows {
			if f.flow.Source == netip.MustParseAddr(source) {
				flows[f.flow.Connection] = true
			}
		}
	})
	return flows
}

// queuedDatagrams returns how many datagrams wait in all queues of the first loop of p.
func queuedDatagrams(p *Proxy) (n int) {
	p.home.loop.call(func(leaky.Time) {
		for _, q := range p.home.loop.scheduler.byKey {
			n += int(q.queuedPackets)
		}
	})
	return n
}

// A flow that is refused takes nothing from others: their flows stay, and so do their queued
// datagrams.
func TestRefusedFlowEvictsNothing(t *testing.T) {
	const attacker = "127.0.0.66"
	pace := shaper.Limit{Name: "pace", Key: shaper.KeySource, Packets: shaper.Frequency{N: 1, Per: time.Minute}, MaxDelay: time.Hour}
	its := shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix(attacker + "/32")}}
	for name, tt := range map[string]struct {
		limit    shaper.Limit
		maxFlows int
	}{
		"it has all flows that it may have": {shaper.Limit{Name: "cap", Key: shaper.KeySource, MaxConnections: 1}, 100},
		"it is blocked":                     {shaper.Limit{Name: "block", Block: true, Match: its}, 100},
		"it is paced":                       {shaper.Limit{Name: "new", Match: its, NewConnections: shaper.Frequency{N: 1, Per: time.Minute}}, 100},
		"the table is full of queues":       {shaper.Limit{Name: "none", MaxConnections: 1000}, 5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, got := countUDP(t)
			r := start(t, shaper.UDP, server.String())
			r.listen.UDPIdleTimeout, r.listen.MaxFlows = time.Minute, tt.maxFlows
			r.apply(tt.limit, pace)
			for i := range 5 {
				c := udpFrom(t, fmt.Sprintf("127.0.0.%d", 100+i), r.addr())
				for range 4 {
					c.Write([]byte{'q'})
				}
			}
			counts := r.shaper.Listener("l")
			testutil.WaitFor(t, "flows", func() bool { return counts.Flows.Load() == 5 && queuedDatagrams(r.proxy) == 15 })
			time.Sleep((unansweredGrace + leaky.Second/10).Duration())
			for range 10 {
				udpFrom(t, attacker, r.addr()).Write([]byte{'x'})
			}
			testutil.WaitFor(t, "9 of the attack to be refused", func() bool { return counts.FlowsRefused.Load()+r.refusedConnections() >= 9 })
			fast := pace
			fast.Packets.Per = time.Second / 10
			r.apply(tt.limit, fast)
			testutil.WaitFor(t, "all queued datagrams", func() bool { return got['q'].Load() == 20 })
			if n := got['x'].Load(); n > 1 {
				t.Errorf("%d datagrams of the attack passed", n)
			}
			if n := counts.FlowsEvicted.Load(); n != 0 {
				t.Errorf("%d flows were closed", n)
			}
		})
	}
}

func (r *proxyRig) refusedConnections() (n uint64) {
	p := r.shaper.Policy()
	for i := range p.Len() {
		for why := range shaper.NumReasons {
			n += p.State(i).Connections[shaper.Refuse][why].Load()
		}
	}
	return n
}

// A blocked source gets no entry in a full table, though other flows could be evicted.
func TestBlockedFlowEvictsNothing(t *testing.T) {
	t.Parallel()
	server, got := countUDP(t)
	r := start(t, shaper.UDP, server.String())
	r.listen.UDPIdleTimeout, r.listen.MaxFlows = time.Minute, 5
	r.apply(shaper.Limit{Name: "block", Block: true, Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix("127.0.0.66/32")}}})
	for range 5 {
		udpFrom(t, "127.0.0.1", r.addr()).Write([]byte{'a'})
	}
	testutil.WaitFor(t, "flows", func() bool { return got['a'].Load() == 5 })
	time.Sleep((unansweredGrace + leaky.Second/10).Duration())
	before := r.flowsOf("127.0.0.1")
	for range 5 {
		udpFrom(t, "127.0.0.66", r.addr()).Write([]byte{'x'})
	}
	testutil.WaitFor(t, "refusals", func() bool { return r.refusedConnections() == 5 })
	if after := r.flowsOf("127.0.0.1"); len(after) != 5 || fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("flows %v became %v", before, after)
	}
	udpFrom(t, "127.0.0.2", r.addr()).Write([]byte{'b'})
	testutil.WaitFor(t, "a flow that is not blocked", func() bool { return got['b'].Load() == 1 })
}

// A source at its own cap evicts a flow of its own, however long others have been idle.
func TestSourceAtCapEvictsOwnFlow(t *testing.T) {
	for name, limit := range map[string]shaper.Limit{
		"connections":          {Name: "cap", Key: shaper.KeySource, MaxConnections: 3},
		"max_flows_per_source": {Name: "none", MaxConnections: 1000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, shaper.UDP, echoUDP(t, 0).String())
			r.listen.UDPIdleTimeout, r.listen.MaxFlows = time.Minute, 100
			if limit.MaxConnections > 3 {
				r.listen.MaxFlowsPerSource = 3
			}
			r.apply(limit)
			for i := range 3 {
				if !getsReply(t, "127.0.0.1", r.addr()) || !getsReply(t, "127.0.0.2", r.addr()) {
					t.Fatalf("no reply to query %d", i)
				}
			}
			others := r.flowsOf("127.0.0.1")
			for i := range 10 {
				time.Sleep(2 * sameSourceGrace.Duration())
				if !getsReply(t, "127.0.0.2", r.addr()) {
					t.Errorf("no reply to query %d", 3+i)
				}
			}
			if own := r.flowsOf("127.0.0.2"); len(own) != 3 {
				t.Errorf("it has %d flows, want 3", len(own))
			}
			if after := r.flowsOf("127.0.0.1"); fmt.Sprint(after) != fmt.Sprint(others) {
				t.Errorf("the flows of the other source %v became %v", others, after)
			}
		})
	}
}

// A full downstream replaces one of its own flows, not one of another downstream.
func TestFullDownstreamEvictsOwnFlow(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.UDP, echoUDP(t, 0).String())
	wide := netip.MustParseAddrPort(echoUDP(t, 0).String())
	other := r.listen
	other.Name = "other"
	other.Addresses = []shaper.Address{addressOf(shaper.UDP, netip.MustParseAddrPort(testutil.FreeAddr(t, "udp")))}
	other.Downstream = []shaper.Downstream{{Host: wide.Addr().String(), Port: wide.Port()}}
	r.listen.Downstream[0].MaxConnections = 2
	r.listen.UDPIdleTimeout, other.UDPIdleTimeout = time.Minute, time.Minute
	if err := r.proxy.Apply(t.Context(), []shaper.Listener{r.listen, other}, policy(t, r.shaper), nil); err != nil {
		t.Fatal(err)
	}
	if !getsReply(t, "127.0.0.1", other.Endpoints()[0].Addr.String()) {
		t.Fatal("no reply")
	}
	for i := range 6 {
		if !getsReply(t, "127.0.0.2", r.addr()) {
			t.Errorf("no reply to query %d", i)
		}
		time.Sleep(2 * sameSourceGrace.Duration())
	}
	if n := r.shaper.Listener("l").Flows.Load(); n != 2 {
		t.Errorf("%d flows, want 2", n)
	}
	if len(r.flowsOf("127.0.0.1")) != 1 {
		t.Error("the flow of the other downstream was closed")
	}
}

// Forged sources fill the table, with or without replies: others still find room.
func TestForgedSourcesDoNotFillTable(t *testing.T) {
	for name, answers := range map[string]bool{"answered": true, "not answered": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, got := countUDP(t)
			if answers {
				server = echoUDP(t, 0)
			}
			r := start(t, shaper.UDP, server.String())
			r.listen.MaxFlows, r.listen.MaxFlowsPerSource, r.listen.UDPIdleTimeout, r.listen.Amplification = 64, 16, time.Minute, 3
			r.apply()
			for i := range 64 {
				udpFrom(t, fmt.Sprintf("127.3.0.%d", i+1), r.addr()).Write([]byte("x"))
			}
			counts := r.shaper.Listener("l")
			testutil.WaitFor(t, "a full table", func() bool { return counts.Flows.Load() == 64 })
			testutil.WaitFor(t, "all replies", func() bool { // each protects its flow for a while
				unanswered := 0
				r.proxy.home.loop.call(func(leaky.Time) {
					r.proxy.home.flowList.each(func(f *udpFlow) {
						if f.unanswered {
							unanswered++
						}
					})
				})
				return !answers || unanswered == 0
			})
			time.Sleep((unansweredGrace + leaky.Second/10).Duration())
			for i := range 20 {
				source := fmt.Sprintf("127.4.0.%d", i+1)
				if answers {
					if !getsReply(t, source, r.addr()) {
						t.Errorf("source %d got no reply", i)
					}
					continue
				}
				udpFrom(t, source, r.addr()).Write([]byte("h"))
			}
			if !answers {
				testutil.WaitFor(t, "20 datagrams", func() bool { return got['h'].Load() == 20 })
			}
			if n := counts.FlowsRefused.Load(); n != 0 {
				t.Errorf("%d datagrams were refused", n)
			}
		})
	}
}

// A flow whose source sends again after a reply stays while others can be evicted.
func TestVerifiedFlowOutlastsOneShotFlows(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.UDP, echoUDP(t, 0).String())
	r.listen.MaxFlows, r.listen.UDPIdleTimeout = 12, time.Minute
	r.apply()
	c := udpFrom(t, "127.0.0.1", r.addr())
	for range 2 {
		c.Write([]byte("tunnel"))
		if _, err := c.Read(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
	}
	before := r.flowsOf("127.0.0.1")
	for i := range 20 {
		time.Sleep(unansweredGrace.Duration() / 8)
		if !getsReply(t, fmt.Sprintf("127.0.1.%d", i+1), r.addr()) {
			t.Fatalf("no reply to query %d", i)
		}
	}
	if after := r.flowsOf("127.0.0.1"); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("flow %v became %v", before, after)
	}
}

// A resolver sends each query from a new port.
func TestResolverGetsAllReplies(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.UDP, echoUDP(t, 100).String())
	r.listen.MaxFlows, r.listen.MaxFlowsPerSource, r.listen.UDPIdleTimeout = 1024, 256, time.Hour
	r.apply()
	const questions = 1000
	answered := 0
	for range questions {
		c := udpFrom(t, "127.0.0.1", r.addr())
		c.Write([]byte("question"))
		c.SetReadDeadline(time.Now().Add(testTimeout))
		if n, _ := c.Read(make([]byte, 200)); n == 100 {
			answered++
		}
		c.Close()
		time.Sleep(sameSourceGrace.Duration() / 100)
	}
	counts := r.shaper.Listener("l")
	if answered != questions || counts.FlowsRefused.Load() != 0 {
		t.Errorf("%d of %d queries got a reply, %d datagrams refused", answered, questions, counts.FlowsRefused.Load())
	}
	if n := counts.Flows.Load(); n > 256 {
		t.Errorf("it has %d flows, want at most 256", n)
	}
	if evicted, opened := counts.FlowsEvicted.Load(), counts.FlowsOpened.Load(); evicted != opened-uint64(counts.Flows.Load()) || evicted < questions/2 {
		t.Errorf("of %d flows %d are counted as evicted, and %d are left", opened, evicted, counts.Flows.Load())
	}
}

// Datagrams that are dropped because their flow ends are counted, whatever ends it.
func TestDatagramsOfClosedFlowsAreCounted(t *testing.T) {
	const sent = 20
	for name, end := range map[string]func(*proxyRig, shaper.Limit){
		"killed": func(r *proxyRig, _ shaper.Limit) {
			for id := range r.flowsOf("127.0.0.1") {
				r.proxy.Kill(id)
			}
		},
		"blocked": func(r *proxyRig, limit shaper.Limit) {
			r.apply(limit, shaper.Limit{Name: "block", Block: true})
		},
		"port closed": func(r *proxyRig, limit shaper.Limit) {
			r.listen.Addresses = []shaper.Address{addressOf(shaper.TCP, r.listen.Endpoints()[0].Addr)}
			r.apply(limit)
		},
		"downstream gone, and no other takes them": func(r *proxyRig, limit shaper.Limit) {
			r.listen.Downstream = []shaper.Downstream{{Host: "127.0.0.1", Port: 1, Drained: true}}
			r.apply(limit)
		},
		"stopped": func(r *proxyRig, _ shaper.Limit) { r.proxy.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, _ := countUDP(t)
			limit := shaper.Limit{Name: "pace", Packets: shaper.Frequency{N: 1, Per: time.Minute}, MaxDelay: time.Hour}
			r := start(t, shaper.UDP, server.String())
			r.listen.UDPIdleTimeout = time.Minute
			r.apply(limit)
			state := r.shaper.Policy().State(0)
			c := udpFrom(t, "127.0.0.1", r.addr())
			for range sent {
				c.Write([]byte("x"))
			}
			testutil.WaitFor(t, "a queue", func() bool { return queuedDatagrams(r.proxy) == sent-1 })
			end(r, limit)
			lost, bytes := &state.Packets[shaper.Refuse][shaper.FlowClosed], &state.Bytes[shaper.Refuse][shaper.FlowClosed]
			testutil.WaitFor(t, "the count", func() bool { return lost.Load() >= sent-1 && bytes.Load() >= sent-1 })
			if n := bytes.Load(); n != sent-1 {
				t.Errorf("%d bytes are counted, want %d", n, sent-1)
			}
			if n := state.Packets[shaper.Pass][shaper.None].Load() + lost.Load(); n != sent {
				t.Errorf("%d of %d datagrams are counted", n, sent)
			}
		})
	}
}
