package conn

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// steady is a lease of a host that may use parts of each cold bucket, and of hot ones what it was given.
func steady(parts uint32) shaper.Lease {
	return shaper.Lease{End: leaky.Never, AloneAt: leaky.Never, Cold: parts, Between: parts, Alone: parts, Hosts: 1, SlotsCold: shaper.Whole}
}

// setShares changes what the host of r may use, and lets the units leave that may then.
func (r *rig) setShares(s shaper.Shares) {
	r.scheduler.sharing.set(&s)
	r.wheel.Advance(r.now)
}

// keyOf returns the key of f under the first limit of r.
func (r *rig) keyOf(f *shaper.Flow) shaper.Key { return r.policy.Key(0, f, r.policy.Route(f)) }

// sharingHost is one of several hosts with the same limits, and what its peers must count on: that
// until end it has what it was given of the bucket, and then alone.
type sharingHost struct {
	*rig
	given, alone uint32
	end          leaky.Time
	senders      []*greedy
	idle         bool
	departures   []sharedDeparture
}

type sharedDeparture struct {
	at leaky.Time
	n  uint64
}

func (h *sharingHost) parts() uint32 {
	if h.now < h.end {
		return h.given
	}
	return h.alone
}

// reserved is what the peers of h must leave to it until they hear from it.
func (h *sharingHost) reserved() uint32 { return max(h.parts(), h.alone) }

func (h *sharingHost) set(given, alone uint32, end leaky.Time) {
	h.given, h.alone, h.end = given, alone, end
	key := shaper.Key{Limit: h.policy.State(h.policy.Find("shared")).ID}
	h.setShares(shaper.Shares{
		Lease: shaper.Lease{End: end, AloneAt: end, Cold: alone, Between: alone, Alone: alone},
		Given: []shaper.KeyParts{{Key: key, Parts: given}},
	})
}

// toggle makes h send nothing for a while, or again.
func (h *sharingHost) toggle() {
	h.idle = !h.idle
	for _, g := range h.senders {
		if h.idle {
			h.scheduler.withdraw(h.now, &g.unit)
		} else {
			h.scheduler.submit(&g.unit, h.now)
		}
	}
}

// greedy sends units of random sizes without an end.
type greedy struct {
	unit
	host *sharingHost
	rnd  *rand.Rand
}

func (g *greedy) send(now leaky.Time) (bytes, packets uint64, requeue bool) {
	n := g.bytes
	g.bytes = 1 + g.rnd.Uint64N(sharedUnit)
	g.host.departures = append(g.host.departures, sharedDeparture{now, n})
	return n, 1, true
}

func (g *greedy) resubmit(now leaky.Time)       { g.host.scheduler.submit(&g.unit, now) }
func (g *greedy) refused(*queue, shaper.Reason) {}

const sharedUnit = 1500 // bytes at most

// Whatever shares hosts are given, and whenever their leases end, of which nobody tells them: all
// together keep the envelope of the limit, one unit each, and what late wake-ups are credited. The units
// have other limits beside, so that they are booked, and shares change meanwhile.
func TestShares_SumOverHosts(t *testing.T) {
	rnd := testutil.Rand(t)
	var ends, changes int
	for round := range 40 {
		const rate = 8e6 // bytes/s
		limits := []shaper.Limit{
			{Name: "shared", Shared: true, Rate: 8 * rate, Burst: uint64(rnd.IntN(2)) * rnd.Uint64N(60_000), MaxDelay: time.Second},
			{Name: "per-source", Key: shaper.KeySource, Rate: 2 * rate, MaxDelay: time.Second},
			{Name: "per-port", Key: shaper.KeyPort, Rate: 8*rate - rnd.Uint64N(4*rate), MaxDelay: time.Second},
		}
		hosts := make([]*sharingHost, 2+rnd.IntN(3))
		floor := uint32(shaper.Whole / len(hosts))
		for i := range hosts {
			h := &sharingHost{rig: newRig(t, limits...)}
			hosts[i] = h
			h.set(floor, rnd.Uint32N(2)*rnd.Uint32N(floor), h.now+leaky.Second/50)
			for s := range 6 {
				f := &shaper.Flow{Source: flowFrom(fmt.Sprint("10.0.0.", s%3), 1).Source, Port: uint16(1 + s%2), Protocol: shaper.TCP, Connection: uint64(s)}
				g := &greedy{host: h, rnd: rnd}
				g.unit = unit{owner: g, path: h.path(f), bytes: 1 + rnd.Uint64N(sharedUnit), packets: 1, credit: 1}
				h.senders = append(h.senders, g)
				h.scheduler.submit(&g.unit, h.now)
			}
		}
		now := leaky.Second
		start := now
		for range 600 {
			now += leaky.Time(rnd.Uint64N(uint64(leaky.Second / 500)))
			reserved := uint32(0)
			for _, h := range hosts {
				leased := h.now < h.end
				h.advance(now, func() leaky.Time { return leaky.Time(rnd.Uint64N(uint64(leaky.Second / 4000))) })
				if leased && h.now >= h.end {
					ends++
				}
				reserved += h.reserved()
			}
			h := hosts[rnd.IntN(len(hosts))]
			free := shaper.Whole - reserved + h.reserved()
			given := free
			switch rnd.IntN(4) {
			case 0:
				given = rnd.Uint32N(free + 1)
			case 1:
				given = 0
			}
			h.set(given, min(free, rnd.Uint32N(2)*rnd.Uint32N(floor)), now+leaky.Time(rnd.Uint64N(uint64(leaky.Second/100))))
			changes++
			if h.idle || rnd.IntN(30) == 0 {
				h.toggle()
			}
		}
		var all []sharedDeparture
		for _, h := range hosts {
			all = append(all, h.departures...)
		}
		slices.SortStableFunc(all, func(a, b sharedDeparture) int { return cmp.Compare(a.at, b.at) })
		s, total := sigma{rate: rate / float64(leaky.Second)}, uint64(0)
		for _, d := range all {
			s.add(d.at, d.n)
			total += d.n
		}
		bound := float64(limits[0].Burst) + float64(len(hosts))*(sharedUnit+fullDatagram) + 1
		if s.max > bound {
			t.Errorf("round %d, %d hosts: sigma of the sum %.0f bytes, want at most %.0f", round, len(hosts), s.max, bound)
		}
		t.Logf("%d hosts, burst %d: sigma %.0f of %.0f, %.0f %% used", len(hosts), limits[0].Burst, s.max, bound, 100*float64(total)/(rate*(now-start).Duration().Seconds()))
		if used := float64(total) / (rate * (now - start).Duration().Seconds()); used < 0.2 {
			t.Errorf("round %d: %.0f %% of the rate left: the test exercises nothing", round, 100*used)
		}
		for _, h := range hosts {
			for q := range h.rig.departures {
				if n := q.state.Conformance.Violations.Load(); n > 0 {
					t.Errorf("round %d: %d units beyond the envelope of %s", round, n, q.state.Name)
				}
			}
		}
	}
	if ends == 0 || changes == 0 {
		t.Errorf("the test exercised nothing: %d leases ended, %d changes", ends, changes)
	}
}
