package main

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"shaperd/control"
	"shaperd/shaper"
)

// savedOrders is what operators ordered that a reload does not end: nor does a restart, or
// a crash. Its times are of the wall clock.
type savedOrders struct {
	Settings []savedSetting // those of a key in their order
	Blocks   []savedBlock
	Bypass   *control.Bypass
	Drained  []drainedDownstream
}

type savedSetting struct {
	Limit, Key, Value string
	Since             time.Time
	Until             *time.Time
}

type savedBlock struct {
	Prefix netip.Prefix
	Since  time.Time
	Until  *time.Time
}

type drainedDownstream struct{ Listener, Downstream string }

// orders is the file of them.
func (f *runFlags) orders() string { return f.state + ".orders" }

// saveOrders has what is in force written down.
func (s *server) saveOrders() {
	if s.keeper == nil {
		return
	}
	_, w := s.inForce()
	var saved savedOrders
	for name, keys := range w.limits {
		for key, stack := range keys {
			for _, set := range stack {
				if !set.untilReload {
					saved.Settings = append(saved.Settings, savedSetting{name, key, set.value, set.since, set.end()})
				}
			}
		}
	}
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
	s.keeper.put(saved)
}

// restoreOrders returns l changed as was ordered before the daemon ended. Orders that do
// not go with l are no reason not to start: they are kept aside.
func (s *server) restoreOrders(ctx context.Context, l *loaded) *loaded {
	s.put(l, s.wishes)
	if s.flags.state == "" {
		return l
	}
	var saved savedOrders
	text, err := restore(ctx, s.flags.orders(), &saved)
	if err == nil {
		err = saved.check()
	}
	if err != nil {
		s.log.Error("what operators ordered before the restart is not restored", "err", err, "kept", s.keepOrders(ctx, text))
		return l
	}
	f, err := s.fit(l, saved.wishes(time.Now()))
	if err != nil {
		return l // for its own mistakes, which the start will tell
	}
	if len(f.lost) > 0 {
		kept := s.keepOrders(ctx, text)
		for _, err := range f.lost {
			s.log.Error("what operators set before the restart is not restored", "err", err, "kept", kept)
		}
	}
	w := f.wishes
	drained := f.loaded.drain(saved.Drained)
	s.put(f.loaded, w)
	if len(w.limits)+len(w.blocks) > 0 || w.bypass != nil || drained > 0 {
		s.log.Warn("what operators ordered before the restart is in force",
			"limits", len(w.limits), "blocks", len(w.blocks), "bypass", w.bypass != nil, "drained", drained)
	}
	return f.loaded
}

// keepOrders copies the text of the file of orders to where the next order does not write over
// it, and returns where that is. The file stays until then: what of it was restored is in no other.
func (s *server) keepOrders(ctx context.Context, text []byte) (kept string) {
	kept = s.flags.orders() + ".bad"
	if text == nil {
		return "" // it could not be read
	}
	ctx, cancel := context.WithTimeout(ctx, keepTimeout)
	defer cancel()
	if _, err := aside(ctx, func() (struct{}, error) { return struct{}{}, saveText(kept, text) }); err != nil {
		s.log.Error("keep orders", "err", err)
		return ""
	}
	return kept
}

// fitted is a configuration with what operators want of it.
type fitted struct {
	loaded *loaded
	policy *shaper.Policy
	wishes *wishes
	lost   []error // what does not go with the configuration
}

// build puts together a configuration and what operators want of it.
func (s *server) build(l *loaded, w *wishes) (f fitted, err error) {
	f.wishes = w
	if f.loaded, err = l.with(w); err == nil {
		f.policy, err = f.loaded.compile(s.shaper)
	}
	return f, err
}

// fit is build, but what is set in limits may not go with the configuration, or not without
// what was set beside it: those keys are left out. The error is the configuration's own.
func (s *server) fit(l *loaded, w *wishes) (f fitted, err error) {
	if f, err = s.build(l, w); err == nil {
		return f, nil
	}
	bare := w.clone()
	clear(bare.limits)
	if f, err = s.build(l, bare); err != nil {
		return f, err
	}
	var lost []error
	for _, name := range slices.Sorted(maps.Keys(w.limits)) {
		left := maps.Clone(w.limits[name])
		refused := map[string]error{}
		for found := true; found; { // a key may need one behind it
			found = false
			for _, key := range slices.Sorted(maps.Keys(left)) {
				more := f.wishes.clone()
				more.keys(name)[key] = left[key]
				g, err := s.build(l, more)
				if refused[key] = err; err == nil {
					f, found = g, true
					delete(left, key)
				}
			}
		}
		for _, key := range slices.Sorted(maps.Keys(left)) {
			stack := left[key]
			lost = append(lost, fmt.Errorf("limit %q: %s=%s: %w", name, key, stack[len(stack)-1].value, refusal(refused[key])))
		}
	}
	f.lost = lost
	return f, nil
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
	// No clock that was set, or is wrong after a boot, has anything last for longer than it was to.
	lasts := func(since time.Time, until *time.Time) term {
		t := term{since: since}
		if until != nil {
			t.until = now.Add(min(until.Sub(now), until.Sub(since)))
		}
		return t
	}
	w := (&wishes{}).clone()
	for _, s := range o.Settings {
		w.set(s.Limit, map[string]string{s.Key: s.Value}, lasts(s.Since, s.Until), false)
	}
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
