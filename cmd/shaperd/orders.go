package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"time"

	"shaperd/control"
)

// savedOrders is what operators ordered that a reload does not end: nor does a restart, or
// a crash. Its times are of the wall clock.
type savedOrders struct {
	Blocks  []savedBlock
	Bypass  *control.Bypass
	Drained []drainedDownstream
}

type savedBlock struct {
	Prefix netip.Prefix
	Since  time.Time
	Until  *time.Time
}

type drainedDownstream struct{ Listener, Downstream string }

// orders is the file of them.
func (f *runFlags) orders() string { return f.state + ".orders" }

// saveOrders writes down what is in force.
func (s *server) saveOrders() {
	if s.flags.state == "" {
		return
	}
	_, w := s.inForce()
	var saved savedOrders
	for p, t := range w.blocks {
		saved.Blocks = append(saved.Blocks, savedBlock{p, t.since, t.end()})
	}
	if w.bypass != nil {
		saved.Bypass = &control.Bypass{Since: w.bypass.since, Until: w.bypass.end()}
	}
	for _, d := range s.proxy.Downstreams() {
		if d.Drained {
			saved.Drained = append(saved.Drained, drainedDownstream{d.Listen, d.Downstream})
		}
	}
	var err error
	if len(saved.Blocks) == 0 && saved.Bypass == nil && len(saved.Drained) == 0 {
		if err = os.Remove(s.flags.orders()); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	} else {
		err = save(s.flags.orders(), saved)
	}
	if err != nil {
		s.log.Warn("a restart will forget, or bring back, what operators ordered", "err", err)
	}
}

// restoreOrders returns l changed as was ordered before the daemon ended. Orders that do
// not go with l are no reason not to start.
func (s *server) restoreOrders(l *loaded) *loaded {
	s.put(l, s.wishes)
	if s.flags.state == "" {
		return l
	}
	var saved savedOrders
	_, err := restore(s.flags.orders(), &saved)
	if err == nil {
		err = saved.check()
	}
	var next *loaded
	w := saved.wishes(time.Now())
	if err == nil {
		next, err = s.tryWishes(l, w)
	}
	if err != nil { // the next order would write over it
		kept := s.flags.orders() + ".bad"
		s.log.Error("what operators ordered before the restart is not restored", "err", err, "kept", kept)
		if err := os.Rename(s.flags.orders(), kept); err != nil {
			s.log.Error("keep orders", "err", err)
		}
		return l
	}
	drained := next.drain(saved.Drained)
	s.put(next, w)
	if len(w.blocks) > 0 || w.bypass != nil || drained > 0 {
		s.log.Warn("what operators ordered before the restart is in force",
			"blocks", len(w.blocks), "bypass", w.bypass != nil, "drained", drained)
	}
	return next
}

// tryWishes returns l with w, if that can be put in force.
func (s *server) tryWishes(l *loaded, w *wishes) (*loaded, error) {
	next, err := l.with(w)
	if err == nil {
		_, err = next.compile(s.shaper)
	}
	return next, err
}

// drain has downstreams begin drained, and returns how many there are.
func (l *loaded) drain(drained []drainedDownstream) (found int) {
	for i := range l.listens {
		for j := range l.listens[i].Downstream {
			to := &l.listens[i].Downstream[j]
			if slices.Contains(drained, drainedDownstream{l.listens[i].Name, to.String()}) {
				to.Drained = true
				found++
			}
		}
	}
	return found
}

// check finds what no daemon has written.
func (o *savedOrders) check() error {
	for _, b := range o.Blocks {
		if !b.Prefix.IsValid() || b.Prefix != b.Prefix.Masked() || b.Prefix.Addr().Is4In6() {
			return fmt.Errorf("%v is no prefix to block", b.Prefix)
		}
	}
	return nil
}

// wishes is what of o is not over at now.
func (o *savedOrders) wishes(now time.Time) *wishes {
	lasts := func(since time.Time, until *time.Time) term {
		t := term{since: since}
		if until != nil {
			t.until = *until
		}
		return t
	}
	w := (&wishes{}).clone()
	for _, b := range o.Blocks {
		w.blocks[b.Prefix] = lasts(b.Since, b.Until)
	}
	if o.Bypass != nil {
		t := lasts(o.Bypass.Since, o.Bypass.Until)
		w.bypass = &t
	}
	left, _ := w.expired(now)
	return left
}
