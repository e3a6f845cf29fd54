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
	limits map[string]map[string]setting // by limit and key
	blocks map[netip.Prefix]term
	bypass *term
}

// setting is the value of one key.
type setting struct {
	value string
	term
}

// term is since when something is in force, and until when; zero is for ever.
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

func (w *wishes) clone() *wishes {
	c := &wishes{limits: map[string]map[string]setting{}, blocks: maps.Clone(w.blocks), bypass: w.bypass}
	if c.blocks == nil {
		c.blocks = map[netip.Prefix]term{}
	}
	for name, l := range w.limits {
		c.limits[name] = maps.Clone(l)
	}
	return c
}

// set adds what is to be set in a limit.
func (w *wishes) set(limit string, set map[string]string, t term) {
	if w.limits[limit] == nil {
		w.limits[limit] = map[string]setting{}
	}
	for key, value := range set {
		w.limits[limit][key] = setting{value, t}
	}
}

// reloaded returns what outlives a reload: what was set in limits does not.
func (w *wishes) reloaded() *wishes {
	c := w.clone()
	c.limits = map[string]map[string]setting{}
	return c
}

// expired returns what is left of w at now, and in words what is over.
func (w *wishes) expired(now time.Time) (left *wishes, over []string) {
	past := func(t term) bool { return !t.until.IsZero() && !t.until.After(now) }
	left = w.clone()
	for _, name := range slices.Sorted(maps.Keys(left.limits)) {
		set := left.limits[name]
		for _, key := range slices.Sorted(maps.Keys(set)) {
			if past(set[key].term) {
				delete(set, key)
				over = append(over, fmt.Sprintf("%s of limit %q", key, name))
			}
		}
		if len(set) == 0 {
			delete(left.limits, name)
		}
	}
	for _, p := range slices.SortedFunc(maps.Keys(left.blocks), netip.Prefix.Compare) {
		if past(left.blocks[p]) {
			delete(left.blocks, p)
			over = append(over, "block of "+p.String())
		}
	}
	if left.bypass != nil && past(*left.bypass) {
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
	for _, l := range w.limits {
		for _, s := range l {
			soonest(s.term)
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
	for key, s := range w.limits[limit] {
		values[key] = s.value
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
		byTerm := map[term]map[string]string{}
		for key, v := range w.limits[name] {
			if byTerm[v.term] == nil {
				byTerm[v.term] = map[string]string{}
			}
			byTerm[v.term][key] = v.value
		}
		terms := slices.SortedFunc(maps.Keys(byTerm), func(a, b term) int { return a.since.Compare(b.since) })
		for _, t := range terms {
			s.Overrides = append(s.Overrides, control.Override{Limit: name, Set: byTerm[t], Since: t.since, Until: t.end()})
		}
	}
	for p, t := range w.blocks {
		s.Blocks = append(s.Blocks, control.Block{Prefix: p.String(), Since: t.since, Until: t.end()})
	}
	slices.SortFunc(s.Blocks, func(a, b control.Block) int { return cmp.Compare(a.Prefix, b.Prefix) })
}
