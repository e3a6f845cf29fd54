package conn

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// On a host that stalls the thread for milliseconds at a time a strict limit loses less than 1 % of
// its rate, and the resulting bursts stay within the allowed excess.
func TestStallsCostNoRate(t *testing.T) {
	rnd := testutil.Rand(t)
	for name, c := range map[string]struct {
		limit  shaper.Limit
		size   uint64
		stall  leaky.Time
		units  float64 // allowed beyond the rate
		offers leaky.Time
	}{
		"10,000 packets/s": {shaper.Limit{Packets: shaper.Frequency{N: 10_000, Per: time.Second}}, 100, packetSlack, 51, leaky.Second / 12_500},
		"10 packets/s":     {shaper.Limit{Packets: shaper.Frequency{N: 10, Per: time.Second}}, 100, packetSlack, 2, leaky.Second / 13},
		"80 Mbit/s":        {shaper.Limit{Rate: 80e6}, 1000, byteSlack, 21, leaky.Second / 12_500},
	} {
		t.Run(name, func(t *testing.T) {
			c.limit.Name, c.limit.MaxDelay = "l", max(100*time.Millisecond, 10*c.offers.Duration())
			r := newRig(t, c.limit)
			shape := r.policy.Shape(0)
			f := flowFrom("10.0.0.1", 1)
			f.Protocol = shaper.UDP
			path := r.path(f)
			of := r.departures[path[0].queue]
			of.rate = 1 / float64(max(shape.Cost(c.size, 1)))
			if shape.Bytes.Unlimited() {
				c.size = 1 // it counts units
			} else {
				of.rate *= float64(c.size)
			}
			late := func() leaky.Time { return leaky.Time(rnd.Uint64N(uint64(c.stall))) }
			last, now, begun := -1, leaky.Second, leaky.Second
			for id := range 30_000 {
				now += c.offers
				r.advance(now, late)
				p := &packet{rig: r, id: id, after: &last}
				p.unit = unit{owner: p, path: path, bytes: c.size, packets: 1, credit: udpCredit, grain: c.size, droppable: true}
				r.scheduler.submit(&p.unit, now)
			}
			due := float64(now-begun) * of.rate / float64(c.size)
			if left := float64(r.count); left < 0.99*due {
				t.Errorf("%.0f left of %.0f that were due", left, due)
			}
			if most := of.max / float64(c.size); most > c.units+0.01 {
				t.Errorf("sigma %.1f units, want at most %.0f", most, c.units)
			}
			if conformance := &r.policy.State(0).Conformance; conformance.Violations.Load() > 0 || r.refused == 0 {
				t.Errorf("%d violations, %d were refused", conformance.Violations.Load(), r.refused)
			}
			if allowed := leaky.Time(r.policy.State(0).Conformance.MaxAllowed.Load()); float64(allowed) > (c.units+0.01)*float64(max(shape.Cost(c.size, 1))) {
				t.Errorf("%v are allowed, want %.0f units", allowed.Duration(), c.units)
			}
		})
	}
}
