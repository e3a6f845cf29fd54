package conn

import (
	"fmt"
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

// Whatever crosses, and whenever slots come free: who needs several has them before long.
func TestEveryTurnComesWhereGatesCross(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const longest = 20 * time.Millisecond // for which one is there, and between those of a pace
		gates := rapid.IntRange(2, 3).Draw(rt, "gates")
		limits := make([]shaper.Limit, gates)
		for i := range limits {
			limits[i] = shaper.Limit{Name: fmt.Sprint(i), MaxWait: time.Hour, MaxWaiting: 1000}
			if l := &limits[i]; rapid.Bool().Draw(rt, "paced") {
				l.NewConnections = shaper.Frequency{N: 1, Per: longest}
			} else {
				l.Connections = rapid.IntRange(1, 2).Draw(rt, "cap")
			}
			for port := range uint16(1 << gates) { // a port is what it is under
				if port&(1<<i) != 0 {
					limits[i].Match.Port = append(limits[i].Match.Port, shaper.PortRange{First: port, Last: port})
				}
			}
		}
		r := newGateRig(t, limits...)
		rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0))
		sources := 0
		var worst time.Duration
		waiting := map[*visitor]bool{}
		add := func(port uint16) {
			sources++
			source := fmt.Sprint("10.0.0.", sources)
			some := func() time.Duration { return time.Duration(rnd.Int64N(int64(longest))) }
			var visit func()
			visit = func() {
				v := r.visitPort(source, port, func(v *visitor) {
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
		for i := range gates {
			for range rapid.IntRange(2, 3).Draw(rt, "alone") {
				add(1 << i)
			}
		}
		for range rapid.IntRange(1, 4).Draw(rt, "several") {
			add(rapid.SampledFrom([]uint16{3, 5, 6, 7}).Filter(func(p uint16) bool { return p < 1<<gates }).Draw(rt, "port"))
		}
		r.sleep(150 * longest)
		r.consistent()
		for v := range waiting {
			worst = max(worst, (r.now - v.since).Duration())
		}
		if most := 10 * time.Duration(sources) * longest; worst > most {
			rt.Fatalf("one of %d sources waits for %v, want %v at most", sources, worst, most)
		}
	})
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
