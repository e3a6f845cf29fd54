package main

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"shaperd/control"
	"shaperd/shaper"
	"shaperd/shaper/config"
)

// wishes is what operators want changed since the configuration was loaded. It is changed
// by copying.
type wishes struct {
	limits map[string]map[string][]setting // by limit and key; the last of a key is effective
	blocks map[netip.Prefix]term
	bypass *term
}

// setting is a value of one key. Those before it are effective again when it ends.
type setting struct {
	value string
	term
	untilReload bool // and not until a time
}

// term is since when something is effective, and until when; zero is for ever.
type term struct{ since, until time.Time }

func newTerm(d time.Duration) term {
	t := term{since: time.Now()}
	if d > 0 {
		t.until = t.since.Add(d)
	}
	return t
}

func (t term) end() *time.Time {
	if t.until.IsZero() {
		return nil
	}
	return &t.until
}

// past reports whether t has ended.
func (t term) past(now time.Time) bool { return !t.until.IsZero() && !t.until.After(now) }

// outlives reports whether s may be effective when o has ended.
func (s setting) outlives(o setting) bool {
	switch {
	case o.untilReload:
		return !s.untilReload
	case o.until.IsZero():
		return false
	}
	return s.until.IsZero() || s.until.After(o.until)
}

func (w *wishes) clone() *wishes {
	c := &wishes{limits: map[string]map[string][]setting{}, blocks: maps.Clone(w.blocks), bypass: w.bypass}
	if c.blocks == nil {
		c.blocks = map[netip.Prefix]term{}
	}
	for name, keys := range w.limits {
		c.limits[name] = map[string][]setting{}
		for key, stack := range keys {
			c.limits[name][key] = slices.Clone(stack)
		}
	}
	return c
}

// set sets keys of a limit, before what was set in them.
func (w *wishes) set(limit string, set map[string]string, t term, untilReload bool) {
	keys := w.keys(limit)
	for key, value := range set {
		top := setting{value, t, untilReload}
		below := slices.DeleteFunc(keys[key], func(s setting) bool { return !s.outlives(top) })
		keys[key] = append(below, top)
	}
}

// keys is what is set in a limit, to be added to.
func (w *wishes) keys(limit string) map[string][]setting {
	if w.limits[limit] == nil {
		w.limits[limit] = map[string][]setting{}
	}
	return w.limits[limit]
}

// drop takes away what of the settings ends, and returns in words which it was.
func (w *wishes) drop(ends func(setting) bool) (ended []string) {
	for _, name := range slices.Sorted(maps.Keys(w.limits)) {
		keys := w.limits[name]
		for _, key := range slices.Sorted(maps.Keys(keys)) {
			had := len(keys[key])
			keys[key] = slices.DeleteFunc(keys[key], ends)
			if len(keys[key]) < had {
				ended = append(ended, fmt.Sprintf("%s of limit %q", key, name))
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

// reloaded returns what outlives a reload, and in words what does not.
func (w *wishes) reloaded() (left *wishes, ended []string) {
	left = w.clone()
	return left, left.drop(func(s setting) bool { return s.untilReload })
}

// expired returns what is left of w at now, and in words what is over.
func (w *wishes) expired(now time.Time) (left *wishes, over []string) {
	left = w.clone()
	over = left.drop(func(s setting) bool { return s.past(now) })
	for _, p := range slices.SortedFunc(maps.Keys(left.blocks), netip.Prefix.Compare) {
		if left.blocks[p].past(now) {
			delete(left.blocks, p)
			over = append(over, "block of "+p.String())
		}
	}
	if left.bypass != nil && left.bypass.past(now) {
		left.bypass = nil
		over = append(over, "bypass")
	}
	return left, over
}

// next returns when the first of w is over, or the zero time.
func (w *wishes) next() (next time.Time) {
	soonest := func(t term) {
		if !t.until.IsZero() && (next.IsZero() || t.until.Before(next)) {
			next = t.until
		}
	}
	for _, keys := range w.limits {
		for _, stack := range keys {
			for _, s := range stack {
				soonest(s.term)
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

// values is what is to be set in a limit, as configuration has it; nil for nothing.
func (w *wishes) values(limit string) map[string]string {
	if len(w.limits[limit]) == 0 {
		return nil
	}
	values := map[string]string{}
	for key, stack := range w.limits[limit] {
		values[key] = stack[len(stack)-1].value
	}
	return values
}

// overrides is what is to be set in limits, as configuration has it.
func (w *wishes) overrides() (texts []config.Text, err error) {
	for _, name := range slices.Sorted(maps.Keys(w.limits)) {
		text, err := config.FormatOverride(name, w.values(name))
		if err != nil {
			return nil, err
		}
		texts = append(texts, config.Text{Name: "set limit " + name, TOML: text})
	}
	return texts, nil
}

// blocked is the limits that blocks are, at all listeners and attachments of c. They are
// enforced in every mode: a block is an order, and no limit under trial.
func (w *wishes) blocked(c *config.Config) (limits []shaper.Limit) {
	if len(w.blocks) == 0 { // a limit without sources is for all
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

// show fills in s.
func (w *wishes) show(s *control.Status) {
	if w.bypass != nil {
		s.Bypass = &control.Bypass{Since: w.bypass.since, Until: w.bypass.end()}
	}
	for _, name := range slices.Sorted(maps.Keys(w.limits)) {
		// What was set at one time for as long is one line.
		type order struct {
			term
			untilReload bool
		}
		orders := map[order]map[string]string{}
		for key, stack := range w.limits[name] {
			top := stack[len(stack)-1]
			o := order{top.term, top.untilReload}
			if orders[o] == nil {
				orders[o] = map[string]string{}
			}
			orders[o][key] = top.value
		}
		for _, o := range slices.SortedFunc(maps.Keys(orders), func(a, b order) int { return a.since.Compare(b.since) }) {
			s.Overrides = append(s.Overrides, control.Override{
				Limit: name, Set: orders[o], Since: o.since, Until: o.end(), UntilReload: o.untilReload,
			})
		}
	}
	for p, t := range w.blocks {
		s.Blocks = append(s.Blocks, control.Block{Prefix: p.String(), Since: t.since, Until: t.end()})
	}
	slices.SortFunc(s.Blocks, func(a, b control.Block) int { return cmp.Compare(a.Prefix, b.Prefix) })
}
