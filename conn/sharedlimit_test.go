package conn

import (
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// gateways are proxies of one downstream that share a limit.
type gateways struct {
	*testing.T
	proxies []*proxyRig
	arrived atomic.Uint64 // bytes at the downstream
}

// startGateways runs n proxies, and a client of each that sends what it can.
func startGateways(t *testing.T, protocol shaper.Protocol, n int, limit shaper.Limit) *gateways {
	g := &gateways{T: t}
	var downstream string
	read := func(c net.Conn) {
		b := make([]byte, 1<<16)
		for {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			g.arrived.Add(uint64(n))
		}
	}
	if protocol == shaper.TCP {
		downstream = testutil.ServeTCP(t, func(c *net.TCPConn) { read(c) })
	} else {
		server := serveUDP(t).(*net.UDPConn)
		server.SetReadBuffer(4 << 20)
		downstream = server.LocalAddr().String()
		go func() {
			b := make([]byte, 1<<16)
			for {
				n, _, err := server.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				g.arrived.Add(uint64(n))
			}
		}()
	}
	for range n {
		r := start(t, protocol, downstream, limit)
		g.proxies = append(g.proxies, r)
		c, err := net.Dial(protocol.String(), r.addr())
		if err != nil {
			t.Fatal(err)
		}
		stop, done := make(chan struct{}), make(chan struct{})
		t.Cleanup(func() { close(stop); c.Close(); <-done })
		go func() {
			defer close(done)
			b := make([]byte, 1000)
			for {
				select {
				case <-stop:
					return
				default:
				}
				if protocol == shaper.UDP {
					time.Sleep(time.Millisecond / 4) // more than the limit
				}
				if _, err := c.Write(b); err != nil && protocol == shaper.TCP {
					return
				}
			}
		}()
	}
	return g
}

// left returns how many bytes have left the proxies, of which no more than that have arrived.
func (g *gateways) left() (sum uint64) {
	g.Helper()
	arrived := g.arrived.Load()
	for _, r := range g.proxies {
		sum += forwarded(r.proxy)
	}
	if arrived > sum {
		g.Errorf("%d bytes have arrived, and %d have left", arrived, sum)
	}
	return sum
}

// Two proxies move a limit to and fro, and then both lose it: at the downstream it is one limit.
func TestSharedLimit_TwoProxies(t *testing.T) {
	for _, protocol := range []shaper.Protocol{shaper.TCP, shaper.UDP} {
		t.Run(protocol.String(), func(t *testing.T) {
			const rate = 2e6 // bytes/s
			g := startGateways(t, protocol, 2, shaper.Limit{Name: "l", Shared: true, Rate: 8 * rate, Burst: 20_000, MaxDelay: 50 * time.Millisecond})
			testutil.WaitFor(t, "nothing to pass before the first lease", func() bool {
				waits := 0
				for _, r := range g.proxies {
					key := shaper.Key{Limit: r.shaper.Policy().State(0).ID}
					if b := r.proxy.Buckets(0, key)[0]; b.Queued > 0 && b.Parts == 0 {
						waits++
					}
				}
				return waits == len(g.proxies)
			})
			if n := g.arrived.Load(); n > 0 {
				t.Errorf("%d bytes arrived before the first lease", n)
			}
			begin := time.Now()
			const moves, pause = 30, 50 * time.Millisecond
			least := rate * moves * pause.Seconds() / 4
			enough := func() bool { return float64(g.arrived.Load()) >= least || time.Since(begin) > testTimeout }
			for i := 0; i < moves || !enough(); i++ {
				parts := [2]uint32{shaper.Whole / 8, shaper.Whole * 7 / 8}
				for _, to := range []int{i % 2, (i + 1) % 2} { // less first
					lease := steady(parts[(to+i)%2])
					g.proxies[to].proxy.SetShares(shaper.Shares{Lease: lease})
				}
				time.Sleep(pause)
			}
			for _, r := range g.proxies {
				r.proxy.SetShares(shaper.Shares{})
			}
			bytes := g.arrived.Load()
			passed := time.Since(begin)
			for _, r := range g.proxies {
				state := r.shaper.Policy().State(0)
				if n := state.Conformance.Violations.Load(); n > 0 {
					t.Errorf("%d units beyond the envelope of a share", n)
				}
			}
			// A grant of 4 ms each is in the kernel's buffers, and the downstream reads late.
			if most := rate*passed.Seconds() + 20_000 + 2*rate*0.006 + 20_000; float64(bytes) > most {
				t.Errorf("%d bytes arrived in %v, want at most %.0f", bytes, passed, most)
			}
			if float64(bytes) < least {
				t.Errorf("%d bytes arrived in %v, want %.0f at least", bytes, passed, least)
			}
			bytes = g.left()
			time.Sleep(300 * time.Millisecond)
			if n := g.left(); n != bytes {
				t.Errorf("%d bytes left without a lease", n-bytes)
			}
		})
	}
}

// A lease that nobody renews ends by itself, in a loop that is asleep and in one that is busy.
func TestSharedLimit_LeaseEnds(t *testing.T) {
	g := startGateways(t, shaper.TCP, 1, shaper.Limit{Name: "l", Shared: true, Rate: 80e6})
	p := g.proxies[0].proxy
	end := p.clock.Boot() + leaky.Second/5
	p.SetShares(shaper.Shares{Lease: shaper.Lease{End: end, AloneAt: end + leaky.Second/5, Cold: shaper.Whole, Alone: shaper.Whole / 2}})
	testutil.WaitFor(t, "the first bytes", func() bool { return g.arrived.Load() > 0 })
	key := shaper.Key{Limit: p.shaper.Policy().State(0).ID}
	testutil.WaitFor(t, "the host to be alone", func() bool {
		before := p.clock.Boot()
		b := p.Buckets(0, key)[0]
		after := p.clock.Boot()
		if b.Parts == shaper.Whole && before > end {
			t.Errorf("the whole is used %v after the end of the lease", (before - end).Duration())
		}
		if b.Parts != shaper.Whole && after < end {
			t.Errorf("%d parts are used %v before the end of the lease", b.Parts, (end - after).Duration())
		}
		return b.Parts == shaper.Whole/2
	})
	before := g.arrived.Load()
	testutil.WaitFor(t, "bytes at the share of a host that is alone", func() bool { return g.arrived.Load() > before+100_000 })
}

// A key by source, hot at one proxy: the others' sources keep the share of a cold one.
func TestSharedLimit_HotSource(t *testing.T) {
	g := startGateways(t, shaper.TCP, 1, shaper.Limit{Name: "l", Key: shaper.KeySource, Shared: true, Rate: 80e6})
	r := g.proxies[0]
	p, policy := r.proxy, r.shaper.Policy()
	p.SetShares(shaper.Shares{Lease: steady(shaper.Whole / 100)})
	select {
	case <-r.short: // from the first unit on, if it came before the lease
	case <-time.After(testTimeout):
		t.Fatal("the host is not told that a source waits")
	}
	var demand shaper.Demand
	testutil.WaitFor(t, "the demand of the source", func() bool {
		for _, d := range p.Demands(nil) {
			demand = d
		}
		return demand.Waiting == 1
	})
	want := policy.Key(0, &shaper.Flow{Source: netip.MustParseAddr("127.0.0.1")}, shaper.Route{})
	if demand.Key != want {
		t.Fatalf("the demand is that of %+v, want %+v", demand.Key, want)
	}
	rate := func() float64 { // MB/s
		begin := time.Now()
		bytes := g.left()
		time.Sleep(300 * time.Millisecond)
		bytes = g.left() - bytes
		return float64(bytes) / time.Since(begin).Seconds() / 1e6
	}
	if got := rate(); got > 0.3 {
		t.Errorf("a cold source gets %.2f MB/s of 10, want a hundredth", got)
	}
	p.SetShares(shaper.Shares{Lease: steady(shaper.Whole / 100), Given: []shaper.KeyParts{{Key: demand.Key, Parts: shaper.Whole}}})
	testutil.WaitFor(t, "the rate of a hot source", func() bool { return rate() > 3 })
	if all := p.Demands(nil); len(all) != 1 || all[0].Used < leaky.Second/20 {
		t.Errorf("the demand is %+v, want that of a hot source", all)
	}
	p.SetShares(shaper.Shares{Lease: steady(shaper.Whole / 100), Cold: []shaper.Key{demand.Key}})
	time.Sleep(50 * time.Millisecond)
	if got := rate(); got > 0.3 {
		t.Errorf("a source that is cold again gets %.2f MB/s of 10, want a hundredth", got)
	}
}
