package adaptive

import (
	"flag"
	"math"
	"testing"
)

var long = flag.Bool("long", false, "simulate all servers, and a day")

// quick are servers whose whole runs take a second or two.
var quick = map[string]bool{"slow workers": true, "plc": true, "slow pool, half lost": true, "slow database, lock storm": true, "ghosts": true, "60 clients, lock storm": true}

// The controller gets nine tenths and more of what the best static cap gets, which knows each server.
func TestController(t *testing.T) {
	for _, w := range servers() {
		switch {
		case w.gates > 1: // gates that do not know of each other settle too high in sum
			continue
		case *long || quick[w.name]:
		case len(w.events) > 0 || len(w.changes) == 1 && w.changes[0].every == 1: // they change too slowly
			continue
		default:
			w.length = 150
		}
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			best := simulate(w, func() controller { return &bestCap{&w, w.rights[0]} }, 1)
			r := measure(&w, simulate(w, newOurs, 1), best)
			t.Logf("goodput %.1f %%, limit %.2f of the right one, p99 %.2f x, oscillation %.0f %%, converged after %.0f s", 100*r.good, r.ratio, r.latency, 100*r.oscillation, r.converged)
			if r.good < 0.9 {
				t.Errorf("goodput is %.1f %% of what the best cap gets", 100*r.good)
			}
			for i, s := range r.converged {
				if i > 0 && w.name != "cold cache" && !(s < 80) { // the first is the climb from the start
					t.Errorf("after change %d of the server it took %.0f s", i, s)
				}
			}
		})
	}
}

// A limit does not drift: over a day it is in each hour what it was in the first.
func TestController_Day(t *testing.T) {
	for _, w := range days() {
		if !*long {
			w.length = 3600
		}
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			best := simulate(w, func() controller { return &bestCap{&w, w.rights[0]} }, 1)
			ours := simulate(w, newOurs, 1)
			r := measure(&w, ours, best)
			if r.good < 0.95 {
				t.Errorf("goodput is %.1f %% of what the best cap gets", 100*r.good)
			}
			var hours []float64
			for h := range int(w.length) / 3600 {
				sum := 0.0
				for _, l := range ours.limits[h*3600 : (h+1)*3600] {
					sum += l / 3600
				}
				hours = append(hours, math.Round(sum))
				// At night few wait, and the limit is what they need.
				if right := float64(w.rights[0]); h > 2 && h < 21 && sum < right/2 || sum > 2*right {
					t.Errorf("hour %d: limit %.0f, %.0f is right", h, sum, right)
				}
			}
			t.Logf("goodput %.1f %%, limit of each hour %.0f", 100*r.good, hours)
		})
	}
}

// Without demand nothing moves.
func TestController_Idle(t *testing.T) {
	c := New(5, 100, 0, 0)
	limit := c.Limit()
	for now := 0.0; now < 3600; now += 0.1 {
		c.Set(3, 0, at(now))
		c.Answer(at(0.01), at(now))
		if c.Step(at(now)); c.Limit() != limit {
			t.Fatalf("limit %d after %.1f s", c.Limit(), now)
		}
	}
}

// The limit stays between the bounds, also when these change.
func TestController_Bounds(t *testing.T) {
	w := servers()[0]
	w.length = 60
	type bounds struct{ least, most int }
	for _, b := range []bounds{{1, 1}, {3, 3}, {50, 100}, {2, 10}, {1000, 1000}} {
		c := New(1, 200, 0, 0)
		simulate(w, func() controller { return &bounded{ours{c}, t, b.least, b.most} }, 1)
	}
}

type bounded struct {
	ours
	t           *testing.T
	least, most int
}

func (b *bounded) step(now float64) {
	if now > 20 {
		b.Bound(b.least, b.most, at(now))
		if l := b.Limit(); l < b.least || l > b.most {
			b.t.Fatalf("limit %d is not in %d to %d", l, b.least, b.most)
		}
	}
	b.ours.step(now)
}

// A pause of the server is cut out of what is measured, also a long one.
func TestLoad_Stall(t *testing.T) {
	var l Load
	now := 0.0
	l.Set(10, 5, 0)
	answers := func(n int) {
		for range n {
			now += 0.01
			l.Answer(at(0.1), at(now))
		}
	}
	answers(200)
	before := l.sums
	now += 5 // it stands still
	answers(100)
	if d := l.since(before); math.Abs(d.full-0.99) > 0.02 || math.Abs(d.fullInFlight-9.9) > 0.2 {
		t.Errorf("%.3f s in which the gate was full, %.2f s in flight: want 0.99 and 9.9", d.full, d.fullInFlight)
	}
}
