package member

import (
	"testing"

	"shaperd.dev/shaperd/cluster"
)

// A host leaves a fraction of a slot to others after a while, at once if it has had the slot, and not for ever.
func TestTurn(t *testing.T) {
	const ms = cluster.Millisecond
	for _, tt := range []struct {
		name        string
		parts       func(now cluster.Time) (parts int64, fraction bool)
		from, until cluster.Time // when it leaves; 0 is never
	}{
		{"whole slots", func(cluster.Time) (int64, bool) { return 10, false }, 0, 0},
		{"a fraction", func(cluster.Time) (int64, bool) { return 10, true }, leaveAfter, 2 * leaveAfter},
		{"a fraction that is soon a slot", func(now cluster.Time) (int64, bool) { return int64(now / ms), now < 190*ms }, 0, 0},
		{"a slot, and then a fraction", func(now cluster.Time) (int64, bool) {
			if now < 500*ms {
				return 10, false
			}
			return 5, now >= 525*ms // what the planes say is later
		}, 525 * ms, 525 * ms},
	} {
		for range 50 {
			var u turn
			var left, back cluster.Time
			for now := 5 * ms; now < 10*cluster.Second && back == 0; now += 5 * ms {
				was := u.away(now - 5*ms)
				parts, fraction := tt.parts(now)
				changed := u.observe(now, parts, 0, 1000, fraction && left == 0)
				switch {
				case changed && u.away(now):
					left = now
				case changed:
					back = now
				case was && !u.away(now):
					t.Fatalf("%s: it is back at %v and does not say so", tt.name, now.Duration())
				}
			}
			if left < tt.from || left > tt.until+5*ms || (left == 0) != (tt.until == 0) {
				t.Errorf("%s: it leaves at %v, want from %v to %v", tt.name, left.Duration(), tt.from.Duration(), tt.until.Duration())
			}
			if away := back - left; left != 0 && (away < backAfter || away > 3*backAfter+5*ms) {
				t.Errorf("%s: it is away for %v", tt.name, away.Duration())
			}
		}
	}
}
