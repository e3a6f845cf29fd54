package world

import "shaperd.dev/shaperd/cluster"

// server is where a ledger runs.
type server struct {
	*world
	ledger Ledger
	clock  clock
	up     bool
	epoch  int64
	saved  []any        // states of before, the latest last
	slidAt cluster.Time // when its clock stepped so that it may not notice

	pausedUntil cluster.Time
	pending     []func()
}

// arrive processes a call of a machine.
func (s *server) arrive(m *machine, q *cluster.Request) {
	if s.now < s.pausedUntil {
		s.pending = append(s.pending, func() { s.arrive(m, q) })
		return
	}
	if !s.up {
		return
	}
	if s.chance(0.02) {
		s.saved = append(s.saved, s.ledger.Save())
		if len(s.saved) > 8 {
			s.saved = s.saved[1:]
		}
	}
	now := s.clock.at(s.now)
	r := s.ledger.Call(now, q)
	if err := r.Validate(q); err != nil {
		s.fail(Books, "the reply %+v to %+v is not valid: %v", *r, *q, err)
	}
	s.Calls++
	if r.Epoch != s.epoch {
		s.epoch = r.Epoch
		s.Epochs++
	}
	if s.Log != nil {
		s.logf("  ledger answers %s: %+v", m.name, *r)
	}
	if r.Settled && !s.Split {
		s.checkOldLeases(r.Epoch)
	}
	for i := range r.Sales {
		s.sell(&r.Sales[i])
	}
	if s.After != nil {
		if wrong := s.After(s.ledger, now); wrong != "" {
			s.fail(Books, "%s", wrong)
		}
	}
	if m.cutFrom > s.now || s.lost() {
		return
	}
	s.after(s.latency(), func() { m.deliver(r) })
}

// pause makes the server stand still, and its clock too if frozen.
func (s *server) pause(d cluster.Time, frozen bool) {
	s.pausedUntil = max(s.pausedUntil, s.now+d)
	if frozen {
		s.clock.offset -= d
	}
	s.after(d, s.resume)
}

func (s *server) resume() {
	if s.now < s.pausedUntil {
		return
	}
	pending := s.pending
	s.pending = nil
	for _, f := range pending {
		f()
	}
}

// failOver starts another process, on another machine, which has an old state or none.
func (s *server) failOver(away cluster.Time) {
	var state any
	if len(s.saved) > 0 && !s.chance(0.2) {
		state = s.saved[s.random.IntN(len(s.saved))]
	}
	run := s.newRun()
	s.ledger.Load(state, run)
	s.saved = nil
	s.clock.offset += s.upTo(400*cluster.Millisecond) - 200*cluster.Millisecond
	s.logf("ledger fails over to %s, empty %v", run, state == nil)
	s.up = false
	s.after(away, func() { s.up = true })
}

// restart starts another process with the current state: a store that saves it.
func (s *server) restart(away cluster.Time) {
	run := s.newRun()
	s.ledger.Load(s.ledger.Save(), run)
	s.logf("ledger restarts as %s", run)
	s.up = false
	s.after(away, func() { s.up = true })
}

// step sets the clock, unless it would add to a step of before that may have passed unnoticed: together they may be
// longer than Params.Step.
func (s *server) step(d cluster.Time) {
	if d > -s.params.Lease && d <= s.params.Step {
		if s.now < s.slidAt+4*s.params.Lease {
			return
		}
		s.slidAt = s.now
	}
	s.logf("clock of the ledger steps by %v", d.Duration())
	s.clock.offset += d
	s.passUnnoticed(d)
}
