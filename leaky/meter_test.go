package leaky_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
)

// The reference is the largest excess over all intervals that end now, computed one by one.
func TestMeter_EqualsWorstInterval(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		s := &leaky.Shape{Bytes: leaky.NewRate(1e6, time.Second), BytesBurst: leaky.FromDuration(time.Duration(rng.IntN(5)) * time.Millisecond)}
		var m leaky.Meter
		type unit struct{ at, cost leaky.Time }
		var all []unit
		now := leaky.Second
		for range 100 {
			now += leaky.Time(rng.Uint64N(uint64(3 * leaky.Second / 1000)))
			n := 1 + rng.Uint64N(2000)
			excess, allowed := m.Record(s, n, 0, 0, now)
			cost, _ := s.Cost(n, 0)
			all = append(all, unit{now, cost})
			var worst, sum leaky.Time
			for i := len(all) - 1; i >= 0; i-- {
				sum += all[i].cost
				worst = max(worst, sum.Sub(now-all[i].at))
			}
			if excess != worst {
				t.Fatalf("seed %d: the excess is %d, want %d of the worst interval", seed, excess, worst)
			}
			if want := s.BytesBurst + cost; allowed != want {
				t.Fatalf("seed %d: allowed %d, want %d", seed, allowed, want)
			}
		}
	}
}

// A bucket that releases units, some of them late, conforms; one that is reset before
// each unit does not.
func TestMeter_DetectsViolations(t *testing.T) {
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 2))
		s := &leaky.Shape{Bytes: leaky.NewRate(1e6, time.Second), Packets: leaky.NewRate(1000, time.Second), BytesBurst: leaky.FromDuration(2 * time.Millisecond)}
		slack := leaky.FromDuration(time.Millisecond)
		var b leaky.Bucket
		var m leaky.Meter
		now := leaky.Second
		tightest := leaky.Time(0)
		for i := range 1000 {
			bytes := 1 + rng.Uint64N(1500)
			ready := b.Depart(s, now)
			now = ready
			if rng.IntN(3) == 0 {
				now += leaky.Time(rng.Uint64N(uint64(2 * slack)))
			}
			if rng.IntN(50) == 0 {
				now += leaky.Second / 100
				ready = now
			}
			b.Charge(s, bytes, 1, leaky.CatchUp(ready, now, slack))
			excess, allowed := m.Record(s, bytes, 1, slack, now)
			if excess > allowed {
				t.Fatalf("seed %d, unit %d: %d beyond the rate, %d allowed", seed, i, excess, allowed)
			}
			tightest = max(tightest, excess)
		}
		if tightest < s.BytesBurst {
			t.Errorf("seed %d: never more than %d beyond the rate: the burst of %d was not used", seed, tightest, s.BytesBurst)
		}
		violated := false
		for range 100 {
			b = leaky.Bucket{}
			excess, allowed := m.Record(s, 1500, 1, slack, now)
			violated = violated || excess > allowed
		}
		if !violated {
			t.Errorf("seed %d: 100 units at once were no violation", seed)
		}
	}
}
