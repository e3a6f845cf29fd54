// Owner: the loop's thread.

package conn

import (
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// slots are the slots that one connection holds. They are released once.
type slots struct {
	admission *admission
	policy    *shaper.Policy // under which they were taken
	inTurns   bool           // at limits whose slots are for turns
	held      []*gate

	precedence precedence
	unverified bool // the source may be forged; all unverified waiters of a class count as one source
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
		gt.count(s.precedence.class, -1, now)
	}
	s.admission.dispatch(held, now)
	s.admission.dropUnused(held, now)
}

// update is retake, except that a connection whose listener was removed keeps the slots of
// limits that matched by listener.
func (s *slots) update(f *shaper.Flow, r shaper.Route, removed bool, now leaky.Time) {
	if s.policy == s.admission.policy {
		return
	}
	var kept []*gate
	was := s.precedence.class
	if removed {
		oldPolicy, held := s.policy, s.held
		s.held = nil
		for _, gt := range held {
			if isListenerLimit(oldPolicy, gt.state) {
				s.admission.refresh(gt)
				kept = append(kept, gt)
			} else {
				s.held = append(s.held, gt)
			}
		}
	}
	s.retake(f, r, now)
	for _, gt := range kept {
		if !slices.Contains(s.held, gt) { // else the limit applies to all listeners now, and has counted it again
			gt.count(s.precedence.class, 1, now)
			s.held = append(s.held, gt)
		}
		gt.count(was, -1, now)
	}
}

// retake updates the slots to a new policy: those of limits that no longer apply to f are freed, and
// those of new limits are taken, beyond the cap if need be, since the connection is already in flight.
func (s *slots) retake(f *shaper.Flow, r shaper.Route, now leaky.Time) {
	a := s.admission
	if s.policy == a.policy {
		return
	}
	old := slots{admission: a, held: s.held, precedence: s.precedence}
	s.policy, s.held, s.precedence = a.policy, a.gatesFor(f, r, s.inTurns), a.precedenceOf(f, r, s.unverified)
	for _, gt := range s.held {
		gt.count(s.precedence.class, 1, now)
		a.sharing.lending.use(gt, now)
	}
	old.free(now)
}

// verified counts s, whose source is no longer held to be forged, for the class that it is of now.
func (s *slots) verified(f *shaper.Flow, r shaper.Route, now leaky.Time) {
	if !s.unverified {
		return
	}
	s.unverified = false
	if s.policy != s.admission.policy {
		return // update does the rest
	}
	was := s.precedence.class
	s.precedence = s.admission.precedenceOf(f, r, false)
	for _, gt := range s.held {
		gt.count(s.precedence.class, 1, now)
		gt.count(was, -1, now)
	}
}

// isListenerLimit reports whether a limit matched certain listeners in oldPolicy, or had been
// removed even before it. Connections of removed listeners keep such limits.
func isListenerLimit(oldPolicy *shaper.Policy, state *shaper.LimitState) bool {
	i := oldPolicy.IndexOf(state)
	return i < 0 || len(oldPolicy.Limit(i).Match.Listen) > 0
}
