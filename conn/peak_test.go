package conn

import (
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// A peak is forgotten after 1.5 to 2 seconds, and is not recent any more after 0.5 to 1.
func TestPeak(t *testing.T) {
	rnd := testutil.Rand(t)
	type sample struct {
		n  int
		at leaky.Time
	}
	const ms = leaky.Second / 1000
	for range 200 {
		var p peak
		var all []sample
		now := leaky.Time(rnd.Uint64N(uint64(10 * leaky.Second)))
		for range 200 {
			now += leaky.Time(rnd.Uint64N(uint64(1+rnd.IntN(400)) * uint64(ms)))
			s := sample{rnd.IntN(1000) / (1 + rnd.IntN(1000)), now}
			p.add(s.n, now)
			all = append(all, s)
			since := func(span leaky.Time) (most int) {
				for _, s := range all {
					if s.at >= now.Sub(span*ms) {
						most = max(most, s.n)
					}
				}
				return most
			}
			if n := p.all(); n < since(1500) || n > since(2000) {
				t.Fatalf("%d, want between the most of 1.5 s, %d, and that of 2 s, %d", n, since(1500), since(2000))
			}
			if n := p.recent(); n < since(500) || n > since(1000) {
				t.Fatalf("%d recently, want between the most of 0.5 s, %d, and that of 1 s, %d", n, since(500), since(1000))
			}
		}
	}
}
