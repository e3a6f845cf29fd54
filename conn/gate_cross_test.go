package conn

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"shaperd/shaper"
)

// stay has a source come to port for d each time, and come again at once. It returns how often
// it was there.
func (r *gateRig) stay(source string, port uint16, d time.Duration) *int {
	served := new(int)
	var visit func()
	visit = func() {
		r.visitPort(source, port, func(v *visitor) {
			if !v.in {
				r.after(d, visit)
				return
			}
			*served++
			r.after(d, func() { v.finish(); visit() })
		})
	}
	visit()
	return served
}

// crossing are two limits of which none covers the other: on one port, and of one network.
func crossing(limit shaper.Limit) (port, network shaper.Limit) {
	limit.MaxWait, limit.MaxWaiting = time.Hour, 100
	port, network = limit, limit
	port.Name, port.Match.Port = "port", []shaper.PortRange{{First: 80, Last: 80}}
	network.Name, network.Match.Source = "network", []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
	return port, network
}

// Who needs two slots, each of which is always taken by those who need it alone, has turns too.
// (It had none, as both are never free at one instant.)
func TestWhoNeedsSlotsThatCrossHasTurns(t *testing.T) {
	for name, limit := range map[string]shaper.Limit{
		"caps":  {Connections: 1},
		"paces": {NewConnections: shaper.Frequency{N: 100, Per: time.Second}},
	} {
		t.Run(name, func(t *testing.T) {
			port, network := crossing(limit)
			r := newGateRig(t, port, network)
			const stays = 10 * time.Millisecond
			alone := []*int{r.stay("10.2.0.1", 80, stays), r.stay("10.2.0.2", 80, stays)}
			r.sleep(stays / 3)
			alone = append(alone, r.stay("10.1.0.2", 81, stays), r.stay("10.1.0.3", 82, stays))
			both := r.stay("10.1.0.1", 80, stays)
			r.sleep(time.Minute)
			if *both < 1000 {
				t.Errorf("who needs both was let in %d times, of 6000 at each", *both)
			}
			for i, n := range alone {
				if *n < 6000*3/4/2-*both/2-100 {
					t.Errorf("%d of those who need one was let in %d times", i, *n)
				}
			}
			r.consistent()
		})
	}
}

// crossroads are gates of which none covers another, and sources which come again at once. A port
// is the set of gates that it is under.
type crossroads struct {
	limits []shaper.Limit
	ports  []uint16 // one source each
	seed   uint64
}

const longest = 20 * time.Millisecond // for which one is there, and between those of a pace

// worst is how long a source waits at most, within d.
func (c *crossroads) worst(t testing.TB, d time.Duration) (worst time.Duration) {
	for i := range c.limits {
		l := &c.limits[i]
		l.Name, l.MaxWait, l.MaxWaiting = fmt.Sprint(i), time.Hour, 1000
		for port := range uint16(1 << len(c.limits)) {
			if port&(1<<i) != 0 {
				l.Match.Port = append(l.Match.Port, shaper.PortRange{First: port, Last: port})
			}
		}
	}
	r := newGateRig(t, c.limits...)
	rnd := rand.New(rand.NewPCG(c.seed, 0))
	some := func() time.Duration { return time.Duration(rnd.Int64N(int64(longest))) }
	waiting := map[*visitor]bool{}
	for i, port := range c.ports {
		var visit func()
		visit = func() {
			v := r.visitPort(fmt.Sprint("10.0.0.", i+1), port, func(v *visitor) {
				delete(waiting, v)
				worst = max(worst, (r.now - v.since).Duration())
				r.after(some(), func() { v.finish(); visit() })
			})
			if v.waitsIn != nil {
				waiting[v] = true
			}
		}
		r.after(some(), visit)
	}
	r.sleep(d)
	r.consistent()
	for v := range waiting {
		worst = max(worst, (r.now - v.since).Duration())
	}
	return worst
}

// most is the bound of the package comment. About a quarter of it is the most that was seen.
func (c *crossroads) most() time.Duration {
	var same, several, each int
	for i := range c.limits {
		here := 0
		for _, port := range c.ports {
			here += int(port >> i & 1)
		}
		same = max(same, here)
	}
	for _, port := range c.ports {
		if n := bits.OnesCount16(port); n > 1 {
			several, each = several+1, max(each, n)
		}
	}
	return time.Duration(4*(same+each*several)+3*(16*several+6)) * longest / 3
}

var (
	paced  = shaper.Limit{NewConnections: shaper.Frequency{N: 1, Per: longest}}
	single = shaper.Limit{Connections: 1}
	double = shaper.Limit{Connections: 2}
)

// Whatever crosses, and whenever slots come free: who needs several has them before long.
func TestEveryTurnComesWhereGatesCross(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		c := crossroads{seed: rapid.Uint64().Draw(rt, "seed")}
		gates := rapid.IntRange(2, 3).Draw(rt, "gates")
		for i := range gates {
			c.limits = append(c.limits, rapid.SampledFrom([]shaper.Limit{paced, single, double}).Draw(rt, "limit"))
			for range rapid.IntRange(2, 3).Draw(rt, "alone") {
				c.ports = append(c.ports, 1<<i)
			}
		}
		several := rapid.SampledFrom(map[int][]uint16{2: {3}, 3: {3, 5, 6, 7}}[gates])
		for range rapid.IntRange(1, 4).Draw(rt, "several") {
			c.ports = append(c.ports, several.Draw(rt, "port"))
		}
		if worst, most := c.worst(t, 150*longest), c.most(); worst > most {
			rt.Fatalf("a source waits for %v, want %v at most", worst, most)
		}
	})
}

// One had a gate reserved while the others that it needs were to be reserved for another, who could
// begin nowhere as it needs that gate too. All who need several waited until that had lapsed, and the gate
// had rested: 2.8 s, of 30 turns each.
func TestNoneHasAGateReservedInVain(t *testing.T) {
	c := crossroads{
		limits: []shaper.Limit{paced, double, single},
		ports:  []uint16{1, 1, 2, 2, 2, 4, 4, 4, 7, 6, 7, 7},
		seed:   0x2f,
	}
	if worst, most := c.worst(t, 10*time.Second), time.Second; worst > most {
		t.Errorf("a source waits for %v, want %v at most", worst, most)
	}
}

// What is reserved goes to others when its queue ends.
func TestReservationEndsWithItsQueue(t *testing.T) {
	port, network := crossing(shaper.Limit{Connections: 1})
	for name, end := range map[string]func(r *gateRig, v *visitor){
		"it leaves":   func(_ *gateRig, v *visitor) { v.leave() },
		"a reload":    func(r *gateRig, _ *visitor) { r.swap(port, network) },
		"another cap": func(r *gateRig, _ *visitor) { r.swap(network) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newGateRig(t, port, network)
			var in []*visitor
			then := func(v *visitor) { in = append(in, v) }
			alone, other := r.must("10.2.0.1"), r.visitPort("10.1.0.2", 81, nil)
			alone.finish()
			r.visitPort("10.2.0.1", 80, then)
			both := r.visitPort("10.1.0.1", 80, nil)
			for both.waitsIn.gates[0].reserved.queue == nil && both.waitsIn.gates[1].reserved.queue == nil {
				r.visitPort("10.2.0.1", 80, then)
				r.visitPort("10.1.0.2", 81, func(v *visitor) { other = v })
				r.sleep(time.Millisecond)
				in[0].finish()
				in = in[1:]
				r.sleep(time.Millisecond)
				other.finish()
			}
			r.visitPort("10.2.0.3", 80, then)
			end(r, both)
			r.consistent()
			if both.waitsIn != nil && len(in) == 0 {
				t.Error("nobody has what was reserved")
			}
			for len(r.in) > 0 {
				for v := range r.in {
					v.finish()
				}
			}
			r.idle()
		})
	}
}

// A slot is reserved for a quarter of the time at most, however seldom the others that go with
// it come free, and not at all when they do not.
func TestReservationsCostAQuarterOfASlot(t *testing.T) {
	for name, free := range map[string]time.Duration{"never": 0, "seldom": time.Second / 10} {
		t.Run(name, func(t *testing.T) {
			port, network := crossing(shaper.Limit{Connections: 1})
			r := newGateRig(t, port, network)
			served := r.stay("10.2.0.1", 80, time.Millisecond)
			r.stay("10.2.0.2", 80, time.Millisecond)
			if free == 0 {
				r.visitPort("10.1.0.9", 81, nil)
			} else {
				r.stay("10.1.0.9", 81, free)
				r.stay("10.1.0.8", 81, free)
			}
			for i := range 10 {
				r.stay(fmt.Sprint("10.1.1.", i), 80, time.Millisecond)
			}
			r.sleep(6 * time.Second)
			least := 3000 * 98 / 100
			if free > 0 {
				least = 3000 * 74 / 100
			}
			if *served < least {
				t.Errorf("a source was let in %d times, want %d of 3000 at least", *served, least)
			}
		})
	}
}
