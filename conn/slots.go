package conn

import (
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// slots are the slots that one connection holds. They are released once.
type slots struct {
	admission *admission
	policy    *shaper.Policy // under which they were taken
	held      []*gate
}

// release frees the slots.
func (s *slots) release(now leaky.Time) {
	s.free(now)
	s.admission.run(now)
}

// free is release, except that the new holders are notified in the next run.
func (s *slots) free(now leaky.Time) {
	held := s.held
	s.held = nil
	for _, gt := range held {
		gt.inFlight--
		gt.state.InFlight.Add(-1)
	}
	s.admission.dispatch(held, now)
	s.admission.dropUnused(held, now)
}

// retake updates the slots to a new policy: those of limits that no longer apply to f are freed, and
// those of new limits are taken, beyond the cap if need be, since the connection is already in flight.
func (s *slots) retake(f *shaper.Flow, r shaper.Route, now leaky.Time) {
	a := s.admission
	if s.policy == a.policy {
		return
	}
	old := slots{admission: a, held: s.held}
	s.policy, s.held = a.policy, a.gatesFor(f, r)
	for _, gt := range s.held {
		gt.inFlight++
		gt.state.InFlight.Add(1)
	}
	old.free(now)
}
