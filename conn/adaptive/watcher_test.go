package adaptive

import (
	"math"
	"testing"
)

// watching is a static cap with a Watcher.
type watching struct {
	static
	Watcher
}

func (c *watching) set(inFlight, waiting int, now float64) { c.Set(inFlight, waiting, at(now)) }
func (c *watching) step(now float64)                       { c.Step(at(now)) }
func (c *watching) end(took float64, _ int, how outcome, now float64) {
	if how == answered {
		c.Answer(at(took), at(now))
	}
}

// A watcher says at how many a server is near its best, once a load that varies has gone beyond that, and does not know
// before.
func TestWatcher(t *testing.T) {
	for _, sv := range []struct {
		name        string
		server      server
		best        float64 // throughput
		least, most int
	}{{"database", database, 157, 20, 45}, {"workers", pool, 320, 28, 45}} {
		for _, peak := range []float64{0.3, 1.2} {
			w := world{
				name: sv.name, server: sv.server, work: exponential(0.1), length: 3600, wait: 1, deadline: 3,
				arrivals: func(s *sim) float64 { return peak * sv.best * (0.55 - 0.45*math.Cos(2*math.Pi*s.now/1200)) },
			}
			w.complete()
			c := &watching{static: 150}
			simulate(w, func() controller { return c }, 1)
			limit, throughput, known := c.Knee()
			t.Logf("%s, peak load %.1f: %d in flight, %.0f answers a second, known %v", sv.name, peak, limit, throughput, known)
			switch {
			case known != (peak > 1):
				t.Errorf("%s: known %v", sv.name, known)
			case known && (limit < sv.least || limit > sv.most || throughput < 0.8*sv.best || throughput > 1.1*sv.best):
				t.Errorf("%s: %d in flight with %.0f answers a second, want %d to %d with about %.0f", sv.name, limit, throughput, sv.least, sv.most, sv.best)
			}
		}
	}
}
