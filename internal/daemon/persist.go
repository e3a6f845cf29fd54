package daemon

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

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// persistedOverrides are the runtime changes that survive a reload, a restart and a crash, as
// they are saved in a file. Times are of the wall clock.
type persistedOverrides struct {
	Overrides []persistedOverride // those of one key in stack order
	Blocks    []persistedBlock
	Bypass    *api.Bypass
	Drained   []drainedDownstream
	Held      []heldListener
}

type persistedOverride struct {
	Limit, Key, Value string
	Since             time.Time
	Until             *time.Time
}

type persistedBlock struct {
	Prefix netip.Prefix
	Since  time.Time
	Until  *time.Time
}

type drainedDownstream struct{ Listener, Downstream string }

type heldListener struct {
	Listener string
	Since    time.Time
	Until    *time.Time
}

// overridesPath returns the path of the file with persistedOverrides.
func (o *Options) overridesPath() string { return o.State + ".overrides" }

// legacyOverridesPath returns the path that an earlier version gave that file.
func (o *Options) legacyOverridesPath() string { return o.State + ".orders" }

// saveOverrides saves the current overrides.
func (s *server) saveOverrides() {
	if s.saver == nil {
		return
	}
	_, w := s.current()
	var saved persistedOverrides
	for name, keys := range w.limits {
		for key, stack := range keys {
			for _, set := range stack {
				if !set.untilReload {
					saved.Overrides = append(saved.Overrides, persistedOverride{name, key, set.value.Text, set.since, set.end()})
				}
			}
		}
	}
	for p, t := range w.blocks {
		saved.Blocks = append(saved.Blocks, persistedBlock{p, t.since, t.end()})
	}
	if w.bypass != nil {
		saved.Bypass = &api.Bypass{Since: w.bypass.since, Until: w.bypass.end()}
	}
	for _, d := range s.proxy.Downstreams() {
		if d.Drained {
			saved.Drained = append(saved.Drained, drainedDownstream{d.Listen, d.Downstream})
		}
	}
	for _, l := range s.proxy.Listeners() {
		if l.Held {
			now := time.Now()
			held := heldListener{Listener: l.Listen, Since: now.Add(-l.HeldFor)}
			if l.HeldUntil != shaper.Forever {
				until := now.Add(l.HeldUntil)
				held.Until = &until
			}
			saved.Held = append(saved.Held, held)
		}
	}
	s.saver.enqueue(saved)
}

// restoreOverrides returns l with the overrides that were saved before the daemon ended. Those
// that are invalid for l, or unknown to this version, do not prevent a start: they are set aside.
func (s *server) restoreOverrides(ctx context.Context, l *plan.Plan) *plan.Plan {
	s.setCurrent(l, s.overrides)
	if s.options.State == "" {
		return l
	}
	s.adoptLegacyOverrides(ctx)
	var saved persistedOverrides
	var dropped []error
	var migrated []migratedOverride
	if err := readStateFile(ctx, s.options.overridesPath(), func(text []byte) (err error) {
		saved, dropped, err = parsePersisted(text)
		migrated = saved.migrate()
		return err
	}); err != nil {
		dropped = []error{err}
	}
	f, err := s.mergeFitting(l, saved.overrides(time.Now()))
	if err != nil {
		return l // the configuration itself is invalid; the start will report it
	}
	for _, m := range migrated {
		s.log.Info("override migrated to its current key", "limit", m.limit, "old", m.old, "new", m.new)
	}
	s.migrated = len(migrated) > 0
	if dropped = append(dropped, f.dropped...); len(dropped) > 0 {
		kept := s.setAside(ctx, "overrides", s.options.overridesPath())
		for _, err := range dropped {
			s.log.Error("override not restored after restart", "err", err, "saved_as", kept)
		}
	}
	w := f.overrides
	drained, held := markDrained(f.loaded, saved.Drained), markHeld(f.loaded, saved.Held, time.Now())
	s.setCurrent(f.loaded, w)
	if len(w.limits)+len(w.blocks) > 0 || w.bypass != nil || drained+held > 0 {
		s.log.Warn("overrides restored after restart",
			"limits", len(w.limits), "blocks", len(w.blocks), "bypass", w.bypass != nil, "drained", drained, "held", held)
	}
	return f.loaded
}

// adoptLegacyOverrides renames the file that an earlier version wrote, unless this one wrote its
// own since.
func (s *server) adoptLegacyOverrides(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	_, err := runAsync(ctx, func() (struct{}, error) {
		return struct{}{}, unix.Renameat2(unix.AT_FDCWD, s.options.legacyOverridesPath(), unix.AT_FDCWD, s.options.overridesPath(), unix.RENAME_NOREPLACE)
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrExist) {
		s.log.Error("adopting the overrides of an earlier version failed", "path", s.options.legacyOverridesPath(), "err", err)
	}
}

// migratedOverride is an override before and after its migration, each as KEY=VALUE.
type migratedOverride struct{ limit, old, new string }

// migrate gives overrides of an earlier version their current keys, and returns them.
func (o *persistedOverrides) migrate() (migrated []migratedOverride) {
	for i := range o.Overrides {
		s := &o.Overrides[i]
		was := s.Key + "=" + s.Value
		var old bool
		if s.Key, s.Value, old = config.MigrateOverride(s.Key, s.Value); old {
			migrated = append(migrated, migratedOverride{s.Limit, was, s.Key + "=" + s.Value})
		}
	}
	return migrated
}

// setAside keeps the file of overrides under another name when the next change
// replaces it, and returns that name. It never replaces an earlier file.
func (s *server) setAside(ctx context.Context, what, path string) (kept string) {
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	kept, err := runAsync(ctx, func() (string, error) { return setAside(path) })
	if err != nil {
		s.log.Error("setting aside "+what+" failed", "err", err)
		return ""
	}
	return kept
}

// setAside links path to the first free name of path.bad, path.bad.1 and so on, or returns the
// one it is already linked to. It renames the file when the file system has no links, or the
// file belongs to another user.
func setAside(path string) (kept string, err error) {
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

// mergedConfig is a configuration with overrides.
type mergedConfig struct {
	loaded    *plan.Plan
	policy    *shaper.Policy
	overrides *overrides
	dropped   []error // overrides that are invalid for the configuration
}

// merge applies overrides to a configuration as it is now, with those of its overrides with a schedule that it has, and compiles it.
func (s *server) merge(l *plan.Plan, w *overrides) (f mergedConfig, err error) {
	f.overrides = w
	if f.loaded, err = l.With(l.Config.Active(), w.configOverrides(), w.blockLimits(l.Config), w.bypass != nil); err == nil {
		f.policy, err = f.loaded.Compile(s.shaper)
	}
	return f, err
}

// mergeFitting is merge without the overrides of limits that are invalid for the configuration,
// or invalid without another one that is left out. An error is one of the configuration itself.
func (s *server) mergeFitting(l *plan.Plan, w *overrides) (f mergedConfig, err error) {
	if f, err = s.merge(l, w); err == nil {
		return f, nil
	}
	bare := w.clone()
	clear(bare.limits)
	if f, err = s.merge(l, bare); err != nil {
		return f, err
	}
	var dropped []error
	sources := map[string]map[string][]override{} // those of some sources, which may be many
	for _, name := range slices.Sorted(maps.Keys(w.limits)) {
		if _, of := splitTarget(name); of.IsValid() {
			sources[name] = w.limits[name]
			continue
		}
		left := maps.Clone(w.limits[name])
		refused := map[string]error{}
		for found := true; found; { // a key may be valid only with a later one
			found = false
			for _, key := range slices.Sorted(maps.Keys(left)) {
				more := f.overrides.clone()
				more.limitKeys(name)[key] = left[key]
				g, err := s.merge(l, more)
				if refused[key] = err; err == nil {
					f, found = g, true
					delete(left, key)
				}
			}
		}
		for _, key := range slices.Sorted(maps.Keys(left)) {
			stack := left[key]
			dropped = append(dropped, fmt.Errorf("%s: %s=%s: %w", describeTarget(name), key, stack[len(stack)-1].value.Text, refuse(refused[key])))
		}
	}
	f, refused := s.mergeSources(l, f, sources)
	f.dropped = append(dropped, refused...)
	return f, nil
}

// mergeSources adds to f, which has the overrides of whole limits, those of some sources that are valid, and says which are not. It tries
// all, and then all without those of which the error says that they are wrong; a half at a time if it does not say that.
func (s *server) mergeSources(l *plan.Plan, f mergedConfig, sources map[string]map[string][]override) (_ mergedConfig, dropped []error) {
	if len(sources) == 0 {
		return f, nil
	}
	more := f.overrides.clone()
	maps.Copy(more.limits, sources)
	g, err := s.merge(l, more)
	if err == nil {
		return g, nil
	}
	names := slices.Sorted(maps.Keys(sources))
	left := map[string]map[string][]override{}
	wrong := map[string]error{}
	var all config.Errors
	if errors.As(err, &all) {
		for _, e := range all {
			if name, ok := strings.CutPrefix(e.File, overrideSource); ok && sources[name] != nil {
				wrong[name] = errors.New(e.Msg)
			}
		}
	}
	switch {
	case len(wrong) == 0 && len(names) == 1:
		return f, []error{fmt.Errorf("%s: %w", describeTarget(names[0]), refuse(err))}
	case len(wrong) == 0:
		first := map[string]map[string][]override{}
		for i, name := range names {
			if i < len(names)/2 {
				first[name] = sources[name]
			} else {
				left[name] = sources[name]
			}
		}
		f, dropped = s.mergeSources(l, f, first)
	default:
		for _, name := range names {
			if wrong[name] == nil {
				left[name] = sources[name]
			} else {
				dropped = append(dropped, fmt.Errorf("%s: %w", describeTarget(name), wrong[name]))
			}
		}
	}
	f, others := s.mergeSources(l, f, left)
	return f, append(dropped, others...)
}

// markDrained marks downstreams as drained from the start, and returns how many there are.
func markDrained(l *plan.Plan, drained []drainedDownstream) (found int) {
	for i := range l.Config.Listen {
		for j := range l.Config.Listen[i].Downstream {
			to := &l.Config.Listen[i].Downstream[j]
			if slices.Contains(drained, drainedDownstream{l.Config.Listen[i].Name, to.Name()}) {
				to.Drained = true
				found++
			}
		}
	}
	return found
}

// markHeld marks listeners as held from the start, and returns how many there are.
func markHeld(l *plan.Plan, held []heldListener, now time.Time) (found int) {
	for _, h := range held {
		i := slices.IndexFunc(l.Config.Listen, func(l shaper.Listener) bool { return l.Name == h.Listener })
		left := shaper.Forever
		if h.Until != nil {
			left = min(h.Until.Sub(now), h.Until.Sub(h.Since)) // a clock that was set must not prolong it
			left = max(left, time.Millisecond)                 // one that has ended meanwhile leaves its ramp
		}
		if i >= 0 {
			l.Config.Listen[i].HeldFor = left
			found++
		}
	}
	return found
}

// parsePersisted parses saved overrides. dropped reports those with unknown fields: a newer
// version may have written them, and they may mean something else without these fields.
func parsePersisted(text []byte) (o persistedOverrides, dropped []error, err error) {
	var parts map[string]json.RawMessage
	if err := json.Unmarshal(text, &parts); err != nil {
		return o, nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(parts)) {
		var errs []error
		switch name {
		case "Overrides", "Settings": // the latter by an earlier version
			o.Overrides, errs = parseEach[persistedOverride](name, parts[name])
		case "Blocks":
			o.Blocks, errs = parseEach[persistedBlock](name, parts[name])
			o.Blocks = slices.DeleteFunc(o.Blocks, func(b persistedBlock) bool {
				if b.Prefix.IsValid() && b.Prefix == b.Prefix.Masked() && !b.Prefix.Addr().Is4In6() {
					return false
				}
				errs = append(errs, fmt.Errorf("%s: invalid prefix %v", name, b.Prefix))
				return true
			})
		case "Bypass":
			var b *api.Bypass
			if err := decodeStrict(name, parts[name], &b); err != nil {
				errs = []error{err}
			} else {
				o.Bypass = b
			}
		case "Drained":
			o.Drained, errs = parseEach[drainedDownstream](name, parts[name])
		case "Held":
			o.Held, errs = parseEach[heldListener](name, parts[name])
		default:
			errs = []error{fmt.Errorf("%s: %w", name, errNewerVersion)}
		}
		dropped = append(dropped, errs...)
	}
	return o, dropped, nil
}

// errNewerVersion reports a saved override that only another version understands.
var errNewerVersion = errors.New(`unknown to this version of shaperd: start the version that wrote it, or make the change again`)

// parseEach parses a list of one kind. dropped reports the elements that are invalid.
func parseEach[T any](kind string, text []byte) (all []T, dropped []error) {
	var parts []json.RawMessage
	if err := json.Unmarshal(text, &parts); err != nil {
		return nil, []error{fmt.Errorf("%s: %w", kind, err)}
	}
	for i, part := range parts {
		var v T
		if err := decodeStrict(fmt.Sprintf("%s[%d]", kind, i), part, &v); err != nil {
			dropped = append(dropped, err)
			continue
		}
		all = append(all, v)
	}
	return all, dropped
}

// decodeStrict decodes one override. It rejects unknown fields: they may change its meaning.
func decodeStrict(where string, text []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	err := d.Decode(v)
	if err == nil {
		return nil
	}
	if _, field, unknown := strings.Cut(err.Error(), "unknown field "); unknown {
		return fmt.Errorf("%s: field %s: %w", where, field, errNewerVersion)
	}
	return fmt.Errorf("%s: %w", where, err)
}

// overrides returns the overrides that have not expired at now.
func (o *persistedOverrides) overrides(now time.Time) *overrides {
	// A clock that was set, or is wrong after a boot, must not prolong an override.
	remaining := func(since time.Time, until *time.Time) validity {
		t := validity{since: since}
		if until != nil {
			t.until = now.Add(min(until.Sub(now), until.Sub(since)))
		}
		return t
	}
	w := (&overrides{}).clone()
	for _, s := range o.Overrides {
		w.set(s.Limit, map[string]string{s.Key: s.Value}, remaining(s.Since, s.Until), false)
	}
	for _, b := range o.Blocks {
		w.blocks[b.Prefix] = remaining(b.Since, b.Until)
	}
	if o.Bypass != nil {
		t := remaining(o.Bypass.Since, o.Bypass.Until)
		w.bypass = &t
	}
	left, _ := w.afterExpiry(now)
	return left
}
