package conn

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// Sources fill the memory for queued datagrams. At other ports datagrams that need not wait pass, and
// datagrams queued by others stay.
func TestMemory_LargestSourceLosesDatagrams(t *testing.T) {
	for name, answers := range map[string]bool{"answered": true, "unverified": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			flooded, _ := countUDP(t)
			if answers {
				flooded = echoUDP(t, 1)
			}
			r := start(t, shaper.UDP, flooded.String())
			r.listen.UDPIdleTimeout, r.listen.MaxFlows = time.Minute, 1000
			idle, idleLimit := portOf(t, "idle", echoUDP(t, 1), shaper.Limit{Rate: 80e6, MaxDelay: testTimeout})
			queue, got := countUDP(t)
			slow, slowLimit := portOf(t, "slow", queue, shaper.Limit{Packets: shaper.Frequency{N: 10, Per: time.Second}, MaxDelay: time.Minute})
			hogs := shaper.Limit{
				Name: "hogs", Key: shaper.KeySource, Packets: shaper.Frequency{N: 1, Per: time.Second}, MaxDelay: time.Minute,
				Match: shaper.Match{Port: onePort(r.listen)},
			}
			limits := policy(t, r.shaper, hogs, idleLimit, slowLimit)
			if err := r.proxy.Apply(t.Context(), []shaper.Listener{r.listen, idle, slow}, limits, nil); err != nil {
				t.Fatal(err)
			}
			r.proxy.home.loop.call(func(leaky.Time) { r.proxy.home.loop.memory.max = 1 << 20 })
			patient := udpFrom(t, "127.9.0.2", slow.Endpoints()[0].Addr.String())
			for range 10 {
				patient.Write([]byte{'p'})
			}
			full := func(name string) uint64 {
				return limits.State(limits.Find(name)).Packets[shaper.Refuse][shaper.MemoryFull].Load()
			}
			var flood []net.Conn
			for i := range 40 {
				flood = append(flood, udpFrom(t, fmt.Sprintf("127.8.0.%d", i+1), r.addr()))
			}
			more := func() {
				for _, c := range flood {
					c.Write(make([]byte, 1400))
				}
			}
			testutil.WaitFor(t, "a flood that fills the memory", func() bool { more(); return full("hogs") > 100 })
			polite := udpFrom(t, "127.9.0.1", idle.Endpoints()[0].Addr.String())
			answered := 0
			for i := range 200 {
				if i%10 == 0 {
					more()
				}
				polite.Write(make([]byte, 300))
				polite.SetReadDeadline(time.Now().Add(testTimeout))
				if n, _ := polite.Read(make([]byte, 10)); n > 0 {
					answered++
				}
			}
			testutil.WaitFor(t, "the queued datagrams", func() bool { return got['p'].Load() == 10 })
			if answered != 200 || full("idle") != 0 || full("slow") != 0 {
				t.Errorf("%d of 200 datagrams got a reply; refused for lack of memory: %d there, %d of the source with 10 queued, %d of the flood",
					answered, full("idle"), full("slow"), full("hogs"))
			}
			r.proxy.home.loop.call(func(leaky.Time) {
				if m := &r.proxy.home.loop.memory; m.used > m.max {
					t.Errorf("%d bytes are in use, of %d", m.used, m.max)
				}
			})
		})
	}
}

// portOf returns a listener in front of a downstream, and a limit for its port only.
func portOf(t *testing.T, name string, to net.Addr, limit shaper.Limit) (shaper.Listener, shaper.Limit) {
	t.Helper()
	at := netip.MustParseAddrPort(to.String())
	l := shaper.Listener{
		Name: name, Downstream: []shaper.Downstream{{Host: at.Addr().String(), Port: at.Port()}}, UDPIdleTimeout: time.Minute, MaxFlows: 100,
		Addresses: []shaper.Address{addressOf(shaper.UDP, netip.MustParseAddrPort(testutil.FreeAddr(t, "udp")))},
	}
	limit.Name, limit.Match.Port = name, onePort(l)
	return l, limit
}

func onePort(l shaper.Listener) []shaper.PortRange {
	port := l.Endpoints()[0].Addr.Port()
	return []shaper.PortRange{{First: port, Last: port}}
}

// The memory in use equals what is counted, and is zero when nothing is queued.
func TestMemory_Accounting(t *testing.T) {
	server, _ := countUDP(t)
	r := start(t, shaper.UDP, server.String(), shaper.Limit{Name: "bytes", Rate: 800, MaxDelay: time.Hour})
	sizes := map[int]int{1: 256, 256: 256, 257: 640, 641: 2048, 1472: 2048, 9000: 9216, 9217: 18432, 20000: 36864, 65507: 65536}
	want, queued := 0, 0
	clients := []net.Conn{udpFrom(t, "127.0.0.1", r.addr()), udpFrom(t, "127.0.0.2", r.addr())}
	clients[0].Write(make([]byte, 60000)) // leaves, and no other does for ten minutes
	testutil.WaitFor(t, "the first", func() bool { return r.shaper.Listener("l").ToDownstream.Load() == 60000 })
	check := func() (used int) {
		r.proxy.home.loop.call(func(leaky.Time) {
			m := &r.proxy.home.loop.memory
			used = m.used
			sum, n := 0, 0
			for _, h := range m.holders {
				sum += h.used
				for dg := range h.datagrams.All() {
					n += dg.size()
				}
			}
			if sum != used || n != used || len(m.largest) != len(m.holders) {
				t.Errorf("%d bytes in use, %d of %d sources, %d of datagrams", used, sum, len(m.holders), n)
			}
		})
		return used
	}
	overhead := (&datagram{}).size()
	for size, class := range sizes {
		for _, c := range clients {
			c.Write(make([]byte, size))
			want, queued = want+class+overhead, queued+1
		}
	}
	testutil.WaitFor(t, "all of them", func() bool { return check() == want })
	if queued != 2*len(sizes) {
		t.Errorf("%d are queued", queued)
	}
	for id := range r.flowsOf("127.0.0.1") {
		r.proxy.Kill(id)
	}
	if used := check(); used != want/2 {
		t.Errorf("%d bytes are in use after half of the datagrams have left, want %d", used, want/2)
	}
	r.apply() // without limits nothing waits
	if used := check(); used != 0 {
		t.Errorf("%d bytes are in use when nothing waits", used)
	}
}

// Datagrams between two queues have left the first one: none is refused there when memory is used up
// meanwhile.
func TestMemory_FullWhileChangingQueues(t *testing.T) {
	t.Parallel()
	limit := shaper.Limit{Name: "slow", Packets: shaper.Frequency{N: 1, Per: time.Minute}, MaxDelay: time.Hour}
	r := start(t, shaper.UDP, serveUDP(t).LocalAddr().String(), limit)
	r.listen.UDPIdleTimeout = time.Minute
	r.apply(limit)
	memory := &r.proxy.home.loop.memory
	for i := range 2 {
		c := udpFrom(t, fmt.Sprintf("127.0.8.%d", i+1), r.addr())
		for range 20 >> i {
			c.Write(make([]byte, 1000))
		}
	}
	held := func() (n int) {
		r.proxy.home.loop.call(func(leaky.Time) { n = memory.used })
		return n
	}
	one := 2048 + (&datagram{}).size()
	testutil.WaitFor(t, "queued datagrams", func() bool { return held() == 29*one }) // all but the first
	r.proxy.home.loop.call(func(now leaky.Time) {
		var flows []*udpFlow // the one with more first
		for _, f := range r.proxy.home.flows {
			f.unanswered = false
			memory.transfer(f)
			flows = append(flows, f)
		}
		slices.SortFunc(flows, func(a, b *udpFlow) int { return a.flow.Source.Compare(b.flow.Source) })
		queued := slices.Collect(flows[0].queued.All())
		flows[0].withdrawQueued(now)
		memory.max = memory.used
		for range 8 {
			flows[1].forward(sock.Message{Data: make([]byte, 10), Size: 10}, false, now)
		}
		for _, dg := range queued {
			dg.resubmit(now)
		}
		waiting := uint64(0)
		for _, f := range flows {
			for dg := range f.queued.All() {
				if waiting++; !dg.unit.queued {
					t.Fatal("a datagram is in no queue")
				}
			}
		}
		if n := flows[0].up.path[0].queuedPackets; n != waiting {
			t.Errorf("%d datagrams wait in the queue, %d in the flows", n, waiting)
		}
	})
}
