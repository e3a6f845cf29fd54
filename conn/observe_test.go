package conn

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// A shared limit that observes counts what one of the share's rate would, for datagrams and streams, cold
// and hot, and reports its demand.
func TestObserve_SharedLimit(t *testing.T) {
	rnd := testutil.Rand(t)
	plain := shaper.Limit{Name: "plain", Key: shaper.KeySource, Rate: 2e6, Burst: 3000, MaxDelay: 20 * time.Millisecond, Observe: true}
	shared := plain
	shared.Name, shared.Shared, shared.Rate, shared.Burst = "shared", true, 8e6, 12_000
	r := newRig(t, plain, shared)
	p, policy := &worker{Proxy: &Proxy{shaper: r.shaper}, loop: &loop{sharing: r.scheduler.sharing}}, r.policy
	f := flowFrom("10.0.0.1", 1)
	f.Protocol = shaper.UDP
	key := policy.Key(policy.Find("shared"), f, policy.Route(f))
	r.setShares(shaper.Shares{Lease: steady(shaper.Whole / 4)})
	r.now += leaky.Second // the credit of a burst
	reported := 0
	for round := range 60 {
		for range 50 {
			r.now += leaky.Time(rnd.Uint64N(uint64(leaky.Second / 100)))
			n := 1 + rnd.Uint64N(3000)
			for _, name := range []string{"plain", "shared"} {
				p.observe(f, policy.Route(f), 1<<policy.Find(name), n, uint64(round%2), r.now)
			}
		}
		d, ok := r.demands()[key]
		if ok {
			reported++
		}
		if hot := round > 20 && round <= 40; hot && d.Used == 0 {
			t.Error("the use of a hot bucket is not reported")
		}
		switch round {
		case 20: // hot, of as many parts, and then cold ones have less
			r.setShares(shaper.Shares{Lease: steady(shaper.Whole / 4), Given: []shaper.KeyParts{{Key: key, Parts: shaper.Whole / 4}}})
			r.setShares(shaper.Shares{Lease: steady(1)})
		case 40:
			r.setShares(shaper.Shares{Lease: steady(shaper.Whole / 4)})
			r.setShares(shaper.Shares{Lease: steady(shaper.Whole / 4), Cold: []shaper.Key{key}})
		}
		r.now += leaky.Time(rnd.Uint64N(uint64(leaky.Second / 10)))
	}
	one, other := policy.State(policy.Find("plain")), policy.State(policy.Find("shared"))
	var delayed, refused uint64
	for v := range one.Bytes {
		for why := range one.Bytes[v] {
			if a, b := one.Bytes[v][why].Load(), other.Bytes[v][why].Load(); a != b {
				t.Errorf("%v, %v: %d bytes, want %d", shaper.Verdict(v), shaper.Reason(why), b, a)
			}
			if a, b := one.Packets[v][why].Load(), other.Packets[v][why].Load(); a != b {
				t.Errorf("%v, %v: %d packets, want %d", shaper.Verdict(v), shaper.Reason(why), b, a)
			}
		}
		switch shaper.Verdict(v) {
		case shaper.Delay:
			delayed = one.Bytes[v][shaper.ByRate].Load()
		case shaper.Refuse:
			refused = one.Bytes[v][shaper.QueueFull].Load()
		}
	}
	if delayed == 0 || refused == 0 || reported < 30 {
		t.Errorf("the test exercised nothing: %d bytes delayed, %d refused, %d reports", delayed, refused, reported)
	}
	r.now += leaky.Second
	r.demands()
	if n := len(r.scheduler.byKey); n != 0 {
		t.Errorf("%d buckets are in use without a flow", n)
	}
}
