package conn

import (
	"shaperd/leaky"
	"shaperd/shaper"
)

// slots are what one connection holds. They are released once.
type slots struct {
	gates  *gates
	policy *shaper.Policy // under which they were taken
	held   []*gate
}

// release frees the slots.
func (s *slots) release(now leaky.Time) {
	s.free(now)
	s.gates.run(now)
}

// free is release, but who gets the slots is told only in the next run.
func (s *slots) free(now leaky.Time) {
	held := s.held
	s.held = nil
	for _, gt := range held {
		gt.inFlight--
		gt.state.InFlight.Add(-1)
	}
	s.gates.dispatch(held, now)
	s.gates.drop(held, now)
}

// move brings the slots in line with a new policy: those of limits that f is no
// longer under are freed, those of new ones taken, over the cap if need be, as
// the connection is in flight whether they allow it or not.
func (s *slots) move(f *shaper.Flow, r shaper.Route, now leaky.Time) {
	g := s.gates
	if s.policy == g.policy {
		return
	}
	old := slots{gates: g, held: s.held}
	s.policy, s.held = g.policy, g.list(f, r)
	for _, gt := range s.held {
		gt.inFlight++
		gt.state.InFlight.Add(1)
	}
	old.free(now)
}
