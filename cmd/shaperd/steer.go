package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"shaperd/control"
	"shaperd/shaper"
	"shaperd/shaper/config"
)

// steering is how operators change a running daemon. What changes it runs one after the
// other in the loop of serve; what shows it may be called by several goroutines.
type steering struct {
	orders       chan func(context.Context)
	reloadWanted chan chan error // each is told how it went
	draining     chan struct{}   // closed when the drain begins: no more reloads
	ended        chan struct{}   // closed when serve takes no more orders
	drain        func()

	mu     sync.Mutex
	loaded *loaded // in force
	wishes *wishes // changed with loaded
}

func newSteering() *steering {
	return &steering{
		orders: make(chan func(context.Context)), reloadWanted: make(chan chan error), draining: make(chan struct{}), ended: make(chan struct{}),
		wishes: (&wishes{}).clone(),
	}
}

func (s *steering) inForce() (*loaded, *wishes) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.loaded, s.wishes
}

// drains reports whether the drain has begun.
func (s *steering) drains() bool {
	select {
	case <-s.draining:
		return true
	default:
		return false
	}
}

func (s *steering) put(l *loaded, w *wishes) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loaded, s.wishes = l, w
}

// order has f run in the loop of serve, and waits for it.
func (s *server) order(ctx context.Context, f func(context.Context) error) error {
	done := make(chan error, 1)
	select {
	case s.orders <- func(ctx context.Context) { done <- f(ctx) }:
		return <-done
	case <-s.ended:
		return control.ErrEnding
	case <-ctx.Done():
		return ctx.Err()
	}
}

// logged is order, which says so in the log, and waits for a while until that is written down.
func (s *server) logged(ctx context.Context, f func(context.Context) error, msg string, attrs ...any) error {
	attrs = append(attrs, control.Asker(ctx)...)
	err := s.order(ctx, func(ctx context.Context) error {
		if err := f(ctx); err != nil {
			return err
		}
		s.log.Warn(msg, attrs...)
		return nil
	})
	if err == nil && s.keeper != nil {
		s.keeper.settle(keepWait)
	}
	return err
}

// change puts what is wanted in force, as change makes it of what was.
func (s *server) change(ctx context.Context, change func(*wishes) error, msg string, attrs ...any) error {
	return s.logged(ctx, func(ctx context.Context) error {
		_, was := s.inForce()
		want := was.clone()
		if err := change(want); err != nil {
			return err
		}
		return s.enact(ctx, want)
	}, msg, attrs...)
}

// enact puts what is wanted in force, all of it.
func (s *server) enact(ctx context.Context, want *wishes) error {
	was, _ := s.inForce()
	f, err := s.build(was, want)
	if err != nil {
		return refusal(err)
	}
	return s.effect(ctx, f)
}

// effect puts f in force, or leaves everything as it was.
func (s *server) effect(ctx context.Context, f fitted) error {
	was, _ := s.inForce()
	if err := s.apply(ctx, f.loaded, f.policy, was); err != nil {
		return err
	}
	s.put(f.loaded, f.wishes)
	s.saveOrders()
	return nil
}

// refusal is what a configuration has against something, without where it would stand:
// that is in no file.
func refusal(err error) error {
	var all config.Errors
	if !errors.As(err, &all) {
		return &refused{err}
	}
	var msgs []error
	for _, e := range all {
		msgs = append(msgs, errors.New(e.Msg))
	}
	return &refused{errors.Join(msgs...)}
}

// refused is an ErrRefused that says why alone.
type refused struct{ error }

func (r *refused) Is(target error) bool { return target == control.ErrRefused }

// missing is an ErrUnknown that says what alone.
type missing struct{ error }

func (m *missing) Is(target error) bool { return target == control.ErrUnknown }

// expireAgain is after how long it is tried again to end what could not be ended.
const expireAgain = 10 * time.Second

// expire ends what is over, and returns when there is more to end, or the zero time. What
// was set on top of it, and does not go without it, ends with it: it holds up no other end.
func (s *server) expire(ctx context.Context) (next time.Time) {
	was, want := s.inForce()
	left, over := want.expired(time.Now())
	if len(over) == 0 {
		return want.next()
	}
	f, err := s.fit(was, left)
	if err == nil {
		err = s.effect(ctx, f)
	}
	if err != nil {
		s.log.Error("what was set for a time stays", "err", err)
		return time.Now().Add(expireAgain)
	}
	for _, what := range over {
		s.log.Info("what was set for a time is over", "what", what)
	}
	for _, err := range f.lost {
		s.log.Warn("what an operator had set is over too: it does not go without what is over", "err", err)
	}
	return f.wishes.next()
}

// Describe fills in what the daemon knows of itself.
func (s *server) Describe(to *control.Status) {
	l, w := s.inForce()
	to.Version, to.Config, to.Started = version, s.path, s.begun
	to.State, to.Mode = "running", mode(l.config.Daemon.Observe)
	if s.drains() {
		to.State = "draining"
	}
	if s.keeper != nil {
		if err := s.keeper.lack(); err != nil {
			to.Unsaved = err.Error()
		}
	}
	w.show(to)
	for i := range to.Listeners {
		for j := range l.config.Listen {
			if listen := &l.config.Listen[j]; listen.Name == to.Listeners[i].Name {
				for _, a := range listen.Addresses {
					to.Listeners[i].Addresses = append(to.Listeners[i].Addresses, a.String())
				}
			}
		}
	}
}

// HeldTo writes what one bucket of a limit is held to.
func (s *server) HeldTo(l *shaper.Limit) string { return heldTo(l) }

// Override returns what was set in a limit, and where files override it.
func (s *server) Override(limit string) (set, inFiles map[string]string) {
	l, w := s.inForce()
	return w.values(limit), l.config.Overridden(limit)
}

// Config returns the configuration in force.
func (s *server) Config() any {
	l, _ := s.inForce()
	return l.config.Canonical()
}

// SetLimit sets values of a limit: for a while, until the next reload, or until they are taken
// back.
func (s *server) SetLimit(ctx context.Context, limit string, set map[string]string, d time.Duration, untilReload bool) error {
	until := end(d, "it is unset")
	if untilReload {
		until = "the next reload"
	}
	return s.change(ctx, func(w *wishes) error {
		w.set(limit, set, newTerm(d), untilReload)
		return nil
	}, "limit set by an operator", "limit", limit, "set", spell(set), "until", until)
}

// UnsetLimit takes back what was set in a limit, or keys of it.
func (s *server) UnsetLimit(ctx context.Context, limit string, keys []string) error {
	return s.change(ctx, func(w *wishes) error {
		if len(keys) == 0 {
			keys = slices.Sorted(maps.Keys(w.limits[limit]))
		}
		if len(keys) == 0 {
			return s.unset(limit, "nothing is")
		}
		for _, key := range keys {
			if _, ok := w.limits[limit][key]; !ok {
				if now := config.RenamedInLimit(key); now != "" {
					return &refused{fmt.Errorf("%s was renamed to %s", key, now)}
				}
				return s.unset(limit, key+" is not")
			}
			delete(w.limits[limit], key)
		}
		if len(w.limits[limit]) == 0 {
			delete(w.limits, limit)
		}
		return nil
	}, "limit is as in the configuration again", "limit", limit, "keys", strings.Join(keys, " "))
}

// unset is the error that there is nothing to take back. It tells where a file sets it.
func (s *server) unset(limit, what string) error {
	msg := fmt.Sprintf("%s set in limit %q since it was loaded", what, limit)
	l, _ := s.inForce()
	files := l.config.Overridden(limit)
	for _, key := range slices.Sorted(maps.Keys(files)) {
		msg += fmt.Sprintf("; %s is set by %s", key, files[key])
	}
	return &refused{errors.New(msg)}
}

// Block has nothing pass from a prefix. A block that is there already never ends sooner for
// that: a script that blocks for ten minutes does not undo what somebody blocked for good.
func (s *server) Block(ctx context.Context, p netip.Prefix, d time.Duration) error {
	return s.change(ctx, func(w *wishes) error {
		is, t := w.blocks[p], newTerm(d)
		if is.since.IsZero() || !is.until.IsZero() && (d == 0 || is.until.Before(t.until)) {
			w.blocks[p] = t
		}
		return nil
	}, "blocked by an operator", "prefix", p.String(), "until", end(d, "it is unblocked"))
}

// Unblock takes a block away.
func (s *server) Unblock(ctx context.Context, p netip.Prefix) error {
	return s.change(ctx, func(w *wishes) error {
		if _, ok := w.blocks[p]; !ok {
			return w.notBlocked(p)
		}
		delete(w.blocks, p)
		return nil
	}, "unblocked by an operator", "prefix", p.String())
}

// notBlocked is the error that there is no block of p. It tells of those that p is in.
func (w *wishes) notBlocked(p netip.Prefix) error {
	for _, wider := range slices.SortedFunc(maps.Keys(w.blocks), netip.Prefix.Compare) {
		if wider.Bits() < p.Bits() && wider.Contains(p.Addr()) {
			return &missing{fmt.Errorf("%v is blocked by %v: unblock that", p, wider)}
		}
	}
	return &missing{fmt.Errorf("%v is not blocked", p)}
}

// Bypass has every limit observe, or ends that.
func (s *server) Bypass(ctx context.Context, on bool, d time.Duration) error {
	if !on {
		msg := "BYPASS is off: limits are enforced again"
		if _, w := s.inForce(); w.bypass == nil {
			msg = "bypass was off already"
		}
		return s.change(ctx, func(w *wishes) error { w.bypass = nil; return nil }, msg)
	}
	return s.change(ctx, func(w *wishes) error {
		t := newTerm(d)
		w.bypass = &t
		return nil
	}, "BYPASS is on: everything passes, no limit is enforced", "until", end(d, "it is turned off"))
}

// DrainDownstream has a downstream get no connections any more, or get them again.
func (s *server) DrainDownstream(ctx context.Context, listener, downstream string, drained bool) error {
	return s.logged(ctx, func(context.Context) error {
		if s.proxy.DrainDownstream(listener, downstream, drained) == 0 {
			return &missing{fmt.Errorf("there is no downstream %q", downstream)}
		}
		s.saveOrders()
		return nil
	}, "downstream set by an operator", "listener", listener, "downstream", downstream, "drained", drained)
}

// Drain begins to end the daemon.
func (s *server) Drain(ctx context.Context) {
	s.log.Warn("drain asked for by an operator", control.Asker(ctx)...)
	s.drain()
}

// end is when something ends, in words.
func end(d time.Duration, otherwise string) string {
	if d == 0 {
		return otherwise
	}
	return time.Now().Add(d).Format(time.DateTime)
}

// spell writes what is set, by key.
func spell(set map[string]string) string {
	text := ""
	for _, key := range slices.Sorted(maps.Keys(set)) {
		text += " " + key + "=" + set[key]
	}
	return text[min(1, len(text)):]
}
