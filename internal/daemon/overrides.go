package daemon

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// overrides are the runtime changes of operators to the configuration: values of limits,
// blocks, and the bypass. A published value is not modified; it is cloned.
type overrides struct {
	limits map[string]map[string][]override // by target and key; the last one of a key is effective
	blocks map[netip.Prefix]validity
	bypass *validity
}

// override is a value of one key. When it ends, the one before it is effective again.
type override struct {
	value config.Value
	validity
	untilReload bool // ends with the next reload
}

// validity is the time for which something is effective. A zero until means no end.
type validity struct{ since, until time.Time }

func newValidity(d time.Duration) validity {
	t := validity{since: time.Now()}
	if d > 0 {
		t.until = t.since.Add(d)
	}
	return t
}

func (t validity) end() *time.Time {
	if t.until.IsZero() {
		return nil
	}
	return &t.until
}

// expired reports whether t has ended at now.
func (t validity) expired(now time.Time) bool { return !t.until.IsZero() && !t.until.After(now) }

// outlives reports whether s can be effective after o has ended.
func (s override) outlives(o override) bool {
	switch {
	case o.untilReload:
		return !s.untilReload
	case o.until.IsZero():
		return false
	}
	return s.until.IsZero() || s.until.After(o.until)
}

func (w *overrides) clone() *overrides {
	c := &overrides{limits: map[string]map[string][]override{}, blocks: maps.Clone(w.blocks), bypass: w.bypass}
	if c.blocks == nil {
		c.blocks = map[netip.Prefix]validity{}
	}
	for name, keys := range w.limits {
		c.limits[name] = map[string][]override{}
		for key, stack := range keys {
			c.limits[name][key] = slices.Clone(stack)
		}
	}
	return c
}

// overrideSource stands before the target of an override where errors name a file.
const overrideSource = "set limit "

// maxSourceOverrides is the maximum number of prefixes of sources for which limits are overridden.
const maxSourceOverrides = 1000

// targetOf returns what overrides of a limit apply to: the limit, or with a valid prefix its buckets of these sources.
func targetOf(limit string, sources netip.Prefix) string {
	if !sources.IsValid() {
		return limit
	}
	return limit + " " + sources.String()
}

// splitTarget returns the limit and the sources of a target.
func splitTarget(target string) (limit string, sources netip.Prefix) {
	limit, text, _ := strings.Cut(target, " ")
	sources, _ = netip.ParsePrefix(text)
	return limit, sources
}

// describeTarget describes a target in words.
func describeTarget(target string) string {
	limit, sources := splitTarget(target)
	if !sources.IsValid() {
		return fmt.Sprintf("limit %q", limit)
	}
	return fmt.Sprintf("limit %q, source %v", limit, sources)
}

// countSources returns the number of targets that are of some sources.
func (w *overrides) countSources() (n int) {
	for target := range w.limits {
		if _, sources := splitTarget(target); sources.IsValid() {
			n++
		}
	}
	return n
}

// set pushes overrides of keys of a target.
func (w *overrides) set(limit string, set map[string]string, t validity, untilReload bool) {
	keys := w.limitKeys(limit)
	for key, value := range set {
		top := override{config.ParseValue(key, value), t, untilReload}
		below := slices.DeleteFunc(keys[key], func(s override) bool { return !s.outlives(top) })
		keys[key] = append(below, top)
	}
}

// limitKeys returns the overrides of a target by key. The map can be modified.
func (w *overrides) limitKeys(limit string) map[string][]override {
	if w.limits[limit] == nil {
		w.limits[limit] = map[string][]override{}
	}
	return w.limits[limit]
}

// removeIf removes the overrides of limits for which ends returns true, and describes them.
func (w *overrides) removeIf(ends func(override) bool) (ended []string) {
	for _, name := range slices.Sorted(maps.Keys(w.limits)) {
		keys := w.limits[name]
		for _, key := range slices.Sorted(maps.Keys(keys)) {
			had := len(keys[key])
			keys[key] = slices.DeleteFunc(keys[key], ends)
			if len(keys[key]) < had {
				ended = append(ended, key+" of "+describeTarget(name))
			}
			if len(keys[key]) == 0 {
				delete(keys, key)
			}
		}
		if len(keys) == 0 {
			delete(w.limits, name)
		}
	}
	return ended
}

// afterReload returns the overrides that survive a reload, and describes those that do not.
func (w *overrides) afterReload() (left *overrides, ended []string) {
	left = w.clone()
	return left, left.removeIf(func(s override) bool { return s.untilReload })
}

// afterExpiry returns the overrides that are left at now, and describes the expired ones.
func (w *overrides) afterExpiry(now time.Time) (left *overrides, expired []string) {
	left = w.clone()
	expired = left.removeIf(func(s override) bool { return s.expired(now) })
	for _, p := range slices.SortedFunc(maps.Keys(left.blocks), netip.Prefix.Compare) {
		if left.blocks[p].expired(now) {
			delete(left.blocks, p)
			expired = append(expired, "block of "+p.String())
		}
	}
	if left.bypass != nil && left.bypass.expired(now) {
		left.bypass = nil
		expired = append(expired, "bypass")
	}
	return left, expired
}

// nextExpiry returns when the first override expires, or the zero time.
func (w *overrides) nextExpiry() (next time.Time) {
	soonest := func(t validity) {
		if !t.until.IsZero() && (next.IsZero() || t.until.Before(next)) {
			next = t.until
		}
	}
	for _, keys := range w.limits {
		for _, stack := range keys {
			for _, s := range stack {
				soonest(s.validity)
			}
		}
	}
	for _, t := range w.blocks {
		soonest(t)
	}
	if w.bypass != nil {
		soonest(*w.bypass)
	}
	return next
}

// values returns the effective overrides of a limit by key, in the syntax of the configuration.
// It returns nil when there are none.
func (w *overrides) values(limit string) map[string]string {
	if len(w.limits[limit]) == 0 {
		return nil
	}
	values := map[string]string{}
	for key, stack := range w.limits[limit] {
		values[key] = stack[len(stack)-1].value.Text
	}
	return values
}

// configOverrides returns the effective overrides of limits.
func (w *overrides) configOverrides() (all []config.Override) {
	for _, name := range slices.Sorted(maps.Keys(w.limits)) {
		limit, sources := splitTarget(name)
		o := config.Override{Source: overrideSource + name, Limit: limit, For: sources, Values: map[string]config.Value{}}
		for key, stack := range w.limits[name] {
			o.Values[key] = stack[len(stack)-1].value
		}
		all = append(all, o)
	}
	return all
}

// blockLimits returns the limits that implement the blocks at all listeners and attachments of
// c. They are enforced in every mode: a block is a decision of an operator, not a limit that is
// being tried out.
func (w *overrides) blockLimits(c *config.Config) (limits []shaper.Limit) {
	if len(w.blocks) == 0 { // a limit without sources would match all
		return nil
	}
	match := shaper.Match{Source: slices.SortedFunc(maps.Keys(w.blocks), netip.Prefix.Compare)}
	if len(c.Listen) > 0 {
		limits = append(limits, shaper.Limit{Name: config.BlockedName, Match: match, Block: true, Always: true})
	}
	for _, a := range c.Attach {
		match.Attach = append(match.Attach, a.Name)
	}
	if len(c.Attach) > 0 {
		limits = append(limits, shaper.Limit{Name: config.BlockedPacketsName, Match: match, Block: true, Always: true})
	}
	return limits
}

// describe fills in the overrides, blocks and bypass of s.
func (w *overrides) describe(s *api.Status) {
	if w.bypass != nil {
		s.Bypass = &api.Bypass{Since: w.bypass.since, Until: w.bypass.end()}
	}
	for _, name := range slices.Sorted(maps.Keys(w.limits)) {
		// Keys that were set at one time, until the same time, are one entry.
		type group struct {
			validity
			untilReload bool
		}
		groups := map[group]map[string]string{}
		for key, stack := range w.limits[name] {
			top := stack[len(stack)-1]
			o := group{top.validity, top.untilReload}
			if groups[o] == nil {
				groups[o] = map[string]string{}
			}
			groups[o][key] = top.value.Text
		}
		for _, o := range slices.SortedFunc(maps.Keys(groups), func(a, b group) int { return a.since.Compare(b.since) }) {
			limit, sources := splitTarget(name)
			source := ""
			if sources.IsValid() {
				source = sources.String()
			}
			s.Overrides = append(s.Overrides, api.Override{
				Limit: limit, Source: source, Set: groups[o], Since: o.since, Until: o.end(), UntilReload: o.untilReload,
			})
		}
	}
	for p, t := range w.blocks {
		s.Blocks = append(s.Blocks, api.Block{Prefix: p.String(), Since: t.since, Until: t.end()})
	}
	slices.SortFunc(s.Blocks, func(a, b api.Block) int { return cmp.Compare(a.Prefix, b.Prefix) })
}
