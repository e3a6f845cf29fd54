package peer

import (
	"testing"
	"time"
)

// simulation is a choice in virtual time: every 100 ms a call, every second pings.
type simulation struct {
	t       *testing.T
	now     time.Time
	choice  choice
	changes int
}

func newSimulation(t *testing.T, servers int) *simulation {
	now := time.Unix(1, 0)
	return &simulation{t: t, now: now, choice: newChoice(servers, now)}
}

// run lets time pass while servers answer calls or pings, by their number.
func (s *simulation) run(d time.Duration, calls, pings func(server int) bool) {
	for end := s.now.Add(d); s.now.Before(end); s.now = s.now.Add(100 * time.Millisecond) {
		was := s.choice.current
		s.choice.called(s.now, was, time.Second, calls(was))
		if s.now.Nanosecond() == 0 {
			for i := range s.choice.current {
				s.choice.pinged(s.now, i, pings(i))
			}
		}
		if s.choice.current != was {
			s.changes++
		}
	}
}

func (s *simulation) want(server int, why string) {
	s.t.Helper()
	if s.choice.current != server {
		s.t.Fatalf("after %v server %d is called, not %d: %s", s.now.Sub(time.Unix(1, 0)), s.choice.current, server, why)
	}
}

// up returns a function that reports whether a server is among some.
func up(servers ...int) func(int) bool {
	return func(server int) bool {
		for _, s := range servers {
			if s == server {
				return true
			}
		}
		return false
	}
}

func TestChoice_FirstThatWorks(t *testing.T) {
	s := newSimulation(t, 3)
	s.run(time.Minute, up(0, 1, 2), up(0, 1, 2))
	s.want(0, "it works")
	s.run(900*time.Millisecond, up(1, 2), up(1, 2))
	s.want(0, "it has not answered for less than a lease")
	s.run(time.Minute, up(0, 1, 2), up(0, 1, 2))
	s.want(0, "it works again")
	s.run(1100*time.Millisecond, up(2), up(2))
	s.want(1, "the first has not answered for a lease")
	s.run(1100*time.Millisecond, up(2), up(2))
	s.want(2, "neither has the second")
	s.run(25*time.Second, up(0, 1, 2), up(0, 1, 2))
	s.want(2, "the first has answered pings for less than 30 s")
	s.run(2*time.Second, up(2), up(2))
	s.run(25*time.Second, up(0, 1, 2), up(0, 1, 2))
	s.want(2, "and again, with a pause")
	s.run(7*time.Second, up(0, 1, 2), up(0, 1, 2))
	s.want(0, "the first has answered pings for 30 s")
}

func TestChoice_NoneWorks(t *testing.T) {
	s := newSimulation(t, 3)
	s.run(time.Minute, up(), up())
	if s.changes < 50 {
		t.Errorf("%d changes in a minute in which no server works", s.changes)
	}
	s.run(3*time.Second, up(1), up(1))
	s.want(1, "it is the only one that works")
}

func TestChoice_DoesNotFlap(t *testing.T) {
	s := newSimulation(t, 2)
	s.run(time.Hour, up(1), up(0, 1)) // the first answers pings and no calls
	if s.changes < 6 || s.changes > 24 {
		t.Errorf("%d changes in an hour with a server that answers nothing but pings", s.changes)
	}
	s.run(20*time.Minute, up(0, 1), up(0, 1))
	s.want(0, "it works")
	// It has been good for long: one failure is forgiven.
	s.run(time.Hour, up(0, 1), up(0, 1))
	s.run(2*time.Second, up(1), up(1))
	s.want(1, "the first fails")
	s.run(31*time.Second, up(0, 1), up(0, 1))
	s.want(0, "the first has answered pings for 30 s")
}

func TestChoice_One(t *testing.T) {
	s := newSimulation(t, 1)
	s.run(time.Minute, up(), up())
	s.want(0, "there is no other")
}
