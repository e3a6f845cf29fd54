package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"shaperd/control"
	"shaperd/shaper"
	"shaperd/shaper/config"
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

// restoreOrders returns l changed as was ordered before the daemon ended. Orders that do not
// go with l, or that this version does not know, are no reason not to start: they are kept aside.
func (s *server) restoreOrders(ctx context.Context, l *loaded) *loaded {
	s.put(l, s.wishes)
	if s.flags.state == "" {
		return l
	}
	var saved savedOrders
	var lost []error
	var migrated []string
	if err := restore(ctx, s.flags.orders(), func(text []byte) (err error) {
		saved, lost, err = parseOrders(text)
		migrated = saved.migrate()
		return err
	}); err != nil {
		lost = []error{err}
	}
	f, err := s.fit(l, saved.wishes(time.Now()))
	if err != nil {
		return l // for its own mistakes, which the start will tell
	}
	for _, what := range migrated {
		s.log.Warn("override of an earlier version migrated", "what", what)
	}
	if lost = append(lost, f.lost...); len(lost) > 0 {
		kept := s.keepOrders(ctx)
		for _, err := range lost {
			s.log.Error("what operators ordered before the restart is not restored", "err", err, "kept", kept)
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

// migrate gives settings of an earlier version the keys of this one, and returns in words
// which.
func (o *savedOrders) migrate() (migrated []string) {
	for i := range o.Settings {
		s := &o.Settings[i]
		was := s.Key + "=" + s.Value
		var old bool
		if s.Key, s.Value, old = config.MigrateOverride(s.Key, s.Value); old {
			migrated = append(migrated, fmt.Sprintf("limit %q: %s is %s=%s now", s.Limit, was, s.Key, s.Value))
		}
	}
	return migrated
}

// keepOrders gives the file of orders another name, by which it stays when the next order
// replaces it, and returns that. It is one that no earlier file has.
func (s *server) keepOrders(ctx context.Context) (kept string) {
	ctx, cancel := context.WithTimeout(ctx, keepTimeout)
	defer cancel()
	kept, err := aside(ctx, func() (string, error) { return keepFile(s.flags.orders()) })
	if err != nil {
		s.log.Error("keep orders", "err", err)
		return ""
	}
	return kept
}

// keepFile links path to the first free name of path.bad, path.bad.1 and so on, or returns
// which of them it is linked to already. Where there are no links, or the file is another
// user's, it is renamed.
func keepFile(path string) (kept string, err error) {
	was, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	kept = path + ".bad"
	for i := 1; ; i++ {
		if err = os.Link(path, kept); !errors.Is(err, fs.ErrExist) {
			break
		}
		if is, err := os.Lstat(kept); err == nil && os.SameFile(was, is) {
			return kept, nil
		}
		kept = fmt.Sprintf("%s.bad.%d", path, i)
	}
	if errors.Is(err, fs.ErrPermission) {
		err = os.Rename(path, kept)
	}
	return kept, err
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

// parseOrders reads what a daemon has written, and returns what of it is not understood: a
// newer version may have ordered more, or something else by a field that is not known here.
func parseOrders(text []byte) (o savedOrders, lost []error, err error) {
	var parts map[string]json.RawMessage
	if err := json.Unmarshal(text, &parts); err != nil {
		return o, nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(parts)) {
		var errs []error
		switch name {
		case "Settings":
			o.Settings, errs = parseEach[savedSetting](name, parts[name])
		case "Blocks":
			o.Blocks, errs = parseEach[savedBlock](name, parts[name])
			o.Blocks = slices.DeleteFunc(o.Blocks, func(b savedBlock) bool {
				if b.Prefix.IsValid() && b.Prefix == b.Prefix.Masked() && !b.Prefix.Addr().Is4In6() {
					return false
				}
				errs = append(errs, fmt.Errorf("%s: %v is no prefix to block", name, b.Prefix))
				return true
			})
		case "Bypass":
			var b *control.Bypass
			if err := parseOrder(name, parts[name], &b); err != nil {
				errs = []error{err}
			} else {
				o.Bypass = b
			}
		case "Drained":
			o.Drained, errs = parseEach[drainedDownstream](name, parts[name])
		default:
			errs = []error{fmt.Errorf("%s: %w", name, errNewer)}
		}
		lost = append(lost, errs...)
	}
	return o, lost, nil
}

// errNewer says of an order that only another version understands it.
var errNewer = errors.New(`this version of shaperd does not know it: start the version that wrote it, or give the order again`)

// parseEach reads the orders of one kind that are understood.
func parseEach[T any](kind string, text []byte) (all []T, lost []error) {
	var parts []json.RawMessage
	if err := json.Unmarshal(text, &parts); err != nil {
		return nil, []error{fmt.Errorf("%s: %w", kind, err)}
	}
	for i, part := range parts {
		var v T
		if err := parseOrder(fmt.Sprintf("%s[%d]", kind, i), part, &v); err != nil {
			lost = append(lost, err)
			continue
		}
		all = append(all, v)
	}
	return all, lost
}

// parseOrder reads one order, all of it: a field that is not known may be what it is about.
func parseOrder(where string, text []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	err := d.Decode(v)
	if err == nil {
		return nil
	}
	if _, field, unknown := strings.Cut(err.Error(), "unknown field "); unknown {
		return fmt.Errorf("%s: field %s: %w", where, field, errNewer)
	}
	return fmt.Errorf("%s: %w", where, err)
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
