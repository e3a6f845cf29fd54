package conn

import (
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// With a burst, new connections are admitted as by a token bucket of that size.
func TestBurstConnections(t *testing.T) {
	type step struct {
		at             float64 // seconds
		come, admitted int
	}
	for _, tt := range []struct {
		rate, burst uint64
		steps       []step
	}{
		// 9 tokens are left; 8.4; 0.6; 4.6; 9, as 10 are the most.
		{2, 10, []step{{0, 1, 1}, {0.2, 1, 1}, {0.3, 9, 8}, {2.8, 1, 1}, {5.8, 1, 1}, {5.8, 20, 9}}},
		{50, 100, []step{{0, 130, 100}, {0.019, 1, 0}, {0.02, 1, 1}, {0.02, 1, 0}, {1.02, 60, 50}}},
		{3, 10, []step{{0, 20, 10}, {0.33, 1, 0}, {0.334, 2, 1}}},
		{70, 100, []step{{0, 130, 100}, {0.5, 50, 34}}},
		{5, 0, []step{{0, 3, 1}, {0.19, 1, 0}, {0.2, 1, 1}}},
		{5, 1, []step{{0, 3, 1}, {0.19, 1, 0}, {0.2, 1, 1}}},
	} {
		t.Run(fmt.Sprintf("%d at once, %d/s", tt.burst, tt.rate), func(t *testing.T) {
			r := newAdmissionRig(t, shaper.Limit{Name: "l", NewConnections: shaper.Frequency{N: tt.rate, Per: time.Second}, BurstConnections: tt.burst})
			for _, s := range tt.steps {
				r.until(leaky.Second + leaky.FromDuration(time.Duration(s.at*1e9)))
				admitted := 0
				for range s.come {
					switch v := r.visit("10.0.0.1", nil); {
					case v.granted:
						admitted++
					case v.refusal.retryAfter <= 0 || v.refusal.retryAfter > time.Second:
						t.Errorf("at %v: to come again in %v", s.at, v.refusal.retryAfter)
					}
				}
				if admitted != s.admitted {
					t.Errorf("at %v: %d of %d were admitted, want %d", s.at, admitted, s.come, s.admitted)
				}
			}
		})
	}
}

// At random instants, and across reloads that change the burst, each connection meets what a naive token bucket decides. A
// change of the burst adds no tokens but those that it has more room for.
func TestBurstConnections_Naive(t *testing.T) {
	rnd := testutil.Rand(t)
	for range 50 {
		cost := time.Duration(1+rnd.IntN(1000)) * time.Millisecond
		size := 1 + rnd.IntN(20)
		limit := func() shaper.Limit {
			return shaper.Limit{Name: "l", NewConnections: shaper.Frequency{N: 1, Per: cost}, BurstConnections: uint64(size)}
		}
		r := newAdmissionRig(t, limit())
		tokens := time.Duration(size) * cost // in time
		admitted := 0
		for range 500 {
			pause := time.Duration(rnd.ExpFloat64() * float64(cost))
			r.until(r.now + leaky.FromDuration(pause))
			tokens = min(tokens+pause, time.Duration(size)*cost)
			if rnd.IntN(50) == 0 {
				next := 1 + rnd.IntN(20)
				tokens += time.Duration(next-size) * cost
				size = next
				r.swap(limit())
			}
			want := tokens >= cost
			if want {
				tokens -= cost
				admitted++
			}
			if v := r.visit("10.0.0.1", nil); v.granted != want {
				t.Fatalf("admitted: %v; a bucket of %d with %.6f tokens: %v", v.granted, size, float64(tokens)/float64(cost), want)
			}
		}
		if admitted < 100 {
			t.Errorf("only %d of 500 were admitted", admitted)
		}
	}
}
