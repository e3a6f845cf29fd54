package config

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// OverrideKeys returns the keys of a limit that an override may set.
func OverrideKeys() []string { return overrideKeys.names()[2:] }

// Override has values that replace those of a limit, and of overrides of it in files.
type Override struct {
	Source string // shown in errors in place of a file name
	Limit  string
	For    netip.Prefix // the sources whose buckets alone have these values; invalid for all
	Values map[string]Value
}

// Value is the value of a key of an override.
type Value struct {
	Text  string // as in the configuration, without quotes
	value any    // of the field; nil if it is invalid
	err   error  // a mistake in the value
	form  error  // the mistake that Text is not even of the key's type in TOML
}

// ParseValue parses the value of a key of an override. [Config.With] reports mistakes.
func ParseValue(key, text string) Value {
	v := Value{Text: text}
	if !slices.Contains(OverrideKeys(), key) {
		return v
	}
	var raw any
	if raw, v.form = parseScalar(key, text); v.form == nil {
		v.value, v.err = overrideKeys.find(key).typ.parse(key, raw, nil)
	}
	return v
}

// check reports unknown keys, and values that are not of their key's type.
func (o *Override) check() error {
	texts := map[string]string{}
	for key, v := range o.Values {
		texts[key] = v.Text
	}
	if err := checkOverrideKeys(o.Limit, texts); err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(texts)) {
		if o.For.IsValid() && !slices.Contains(tierKeys.names(), key) {
			return fmt.Errorf("override limit %s: %s is the same for all sources; keys of one are %s", quote(o.Limit), key, strings.Join(tierKeys.names(), ", "))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(o.Values)) {
		if err := o.Values[key].form; err != nil {
			return fmt.Errorf("override limit %s: %w", quote(o.Limit), err)
		}
	}
	return nil
}

// locatedValue is the value of a key of an override with its position. It is a TOML value, or
// a [Value].
type locatedValue struct {
	value any
	at    *node
}

// overridesOf returns the overrides of a limit by key. The map can be modified.
func (l *loader) overridesOf(limit string) map[string]locatedValue {
	if l.overrides[limit] == nil {
		l.overrides[limit] = map[string]locatedValue{}
	}
	return l.overrides[limit]
}

// fileOverride collects the values of one [[override]]. A key of a limit may be overridden once.
func (l *loader) fileOverride(t table) {
	if !slices.ContainsFunc(slices.Collect(maps.Keys(t.values)), func(key string) bool { return key != "limit" && key != "when" }) {
		t.add(t.at, "[[override]] has no effect: set a key of the limit, such as rate")
	}
	limit, ok := t.text("limit")
	if !ok {
		return
	}
	l.overridden = append(l.overridden, item[string]{limit, t.at.child("limit")})
	if t.has("when") {
		l.schedule(t, limit)
		return
	}
	values := l.overridesOf(limit)
	for _, key := range OverrideKeys() {
		if !t.has(key) {
			continue
		}
		at := *t.at.child(key)
		at.override = true
		if first, ok := values[key]; ok {
			t.errorf(key, "duplicate override of limit %s, first at %s:%d", quote(limit), first.at.file.name, first.at.line())
			continue
		}
		values[key] = locatedValue{t.values[key], &at}
		if l.c.overridden[limit] == nil {
			l.c.overridden[limit] = map[string]string{}
		}
		l.c.overridden[limit][key] = fmt.Sprintf("%s:%d", at.file.name, at.line())
	}
}

// maxSchedules is the maximum number of overrides with a schedule for one limit: all sets of them are checked.
const maxSchedules = 4

// maxAllSchedules is the maximum number of them.
const maxAllSchedules = 64

// Scheduled is an override that holds at some times.
type Scheduled struct {
	Limit  string
	When   Schedule
	Set    map[string]string // values by key, as in the configuration without quotes
	values map[string]locatedValue
}

// schedule collects an override that has a schedule.
func (l *loader) schedule(t table, limit string) {
	s := Scheduled{Limit: limit, Set: map[string]string{}, values: map[string]locatedValue{}}
	for _, one := range list(t, "when", parseSpan) {
		s.When = append(s.When, one.value)
	}
	if elems, ok := elements(t.values["when"]); ok && len(elems) == 0 {
		t.errorf("when", "must not be empty: remove the key for values that always hold")
	}
	for _, key := range OverrideKeys() {
		if t.has(key) {
			at := *t.at.child(key)
			at.override = true
			s.values[key] = locatedValue{t.values[key], &at}
			s.Set[key] = fmt.Sprint(t.values[key])
		}
	}
	l.c.scheduled = append(l.c.scheduled, s)
	n := 0
	for _, o := range l.c.scheduled {
		if o.Limit == limit {
			n++
		}
	}
	if n == maxSchedules+1 || len(l.c.scheduled) == maxAllSchedules+1 {
		t.errorf("when", "too many overrides with when: at most %d for a limit, and %d in all", maxSchedules, maxAllSchedules)
	}
}

// applySchedules replaces values of limits by those of overrides with a schedule, as far as they are active.
func (l *loader) applySchedules() {
	for i, s := range l.c.scheduled {
		if l.c.active>>i&1 != 0 {
			maps.Copy(l.overridesOf(s.Limit), s.values)
		}
	}
}

// checkSchedules reports mistakes that c has only while some of the overrides with a schedule hold.
func (c *Config) checkSchedules() error {
	return c.EachSchedule(func(_ string, active uint64) error {
		_, err := c.With(active)
		return err
	})
}

// EachSchedule calls check for each limit that has overrides with a schedule, with each combination of these that may hold, as bits. It
// returns the first error, and adds when that is.
func (c *Config) EachSchedule(check func(limit string, active uint64) error) error {
	byLimit := map[string]uint64{}
	for i, s := range c.scheduled {
		byLimit[s.Limit] |= 1 << i
	}
	for _, limit := range slices.Sorted(maps.Keys(byLimit)) {
		all := byLimit[limit]
		for some := all; some != 0; some = (some - 1) & all { // all subsets
			if err := check(limit, some); err != nil {
				return c.whileActive(err, some)
			}
		}
	}
	return nil
}

// whileActive adds to err, of c with some of its overrides with a schedule, which these are.
func (c *Config) whileActive(err error, active uint64) error {
	var whens []string
	for i, s := range c.scheduled {
		if active>>i&1 != 0 {
			whens = append(whens, quote(s.When.String()))
		}
	}
	when := " (while " + whens[0] + " holds)"
	if len(whens) > 1 {
		when = " (while " + strings.Join(whens, " and ") + " hold together)"
	}
	var all Errors
	var one *Error
	switch {
	case errors.As(err, &all):
		for _, e := range all {
			e.Msg += when
		}
	case errors.As(err, &one):
		one.Msg += when
	default:
		return fmt.Errorf("%w%s", err, when)
	}
	return err
}

// setBy returns the keys that s sets, by name, each with a limit that has its value.
func (c *Config) setBy(s *Scheduled) iter.Seq2[*key, *shaper.Limit] {
	return func(yield func(*key, *shaper.Limit) bool) {
		i := slices.IndexFunc(c.Limits, func(l shaper.Limit) bool { return l.Name == s.Limit })
		for _, name := range slices.Sorted(maps.Keys(s.values)) {
			k, limit := limitKeys.find(name), c.Limits[i]
			value, err := k.typ.parse(name, s.values[name].value, k.field.get(&limit))
			if err != nil {
				continue // reported before
			}
			if k.field.set(&limit, value); !yield(k, &limit) {
				return
			}
		}
	}
}

// Scheduled returns the overrides with a schedule. The result must not be modified.
func (c *Config) Scheduled() []Scheduled { return c.scheduled }

// ActiveAt returns which of the overrides with a schedule hold at an instant, as bits.
func (c *Config) ActiveAt(at time.Time) (active uint64) {
	for i, s := range c.scheduled {
		if s.When.Holds(at) {
			active |= 1 << i
		}
	}
	return active
}

// Active returns which of the overrides with a schedule are in effect in c, as bits.
func (c *Config) Active() uint64 { return c.active }

// override adds an override, which replaces those of files. Its positions are the lines that
// [FormatOverride] writes. order is that of files.
func (l *loader) override(o Override, order int) {
	keys := slices.Sorted(maps.Keys(o.Values))
	f := &file{name: o.Source, order: order}
	for line := range 2 + len(keys) {
		f.lines = append(f.lines, line)
	}
	l.overridden = append(l.overridden, item[string]{o.Limit, &node{file: f, offset: 1}})
	if o.For.IsValid() {
		l.ofSources = append(l.ofSources, locatedOverride{o, f})
		return
	}
	values := l.overridesOf(o.Limit)
	for i, key := range keys {
		values[key] = locatedValue{o.Values[key], &node{file: f, offset: 2 + i, override: true}}
	}
}

// locatedOverride is an override for some sources, with the file that stands for it in errors.
type locatedOverride struct {
	Override
	file *file
}

// sourceOverrides adds the overrides for some sources to their limits.
func (l *loader) sourceOverrides() {
	for _, o := range l.ofSources {
		i := slices.IndexFunc(l.c.Limits, func(l shaper.Limit) bool { return l.Name == o.Limit })
		if i < 0 {
			continue // reported elsewhere
		}
		limit := &l.c.Limits[i]
		valid := true
		bad := func(format string, args ...any) {
			valid = false
			l.add(&node{file: o.file, offset: 1}, fmt.Sprintf(format, args...))
		}
		switch bits, name := limit.PrefixOf(o.For.Addr()); {
		case limit.InPacketPlane():
			bad("%s", noTiers)
		case limit.Key&shaper.KeySource == 0 || limit.Key&shaper.KeyConnection != 0:
			bad("limit %s has no bucket for each source: its key lacks \"source\"", quote(o.Limit))
		case limit.Shared || limit.Adapt != shaper.AdaptOff:
			bad("limit %s is shared or adaptive: its buckets have one value", quote(o.Limit))
		case o.For.Bits() > bits:
			bad("%v is longer than %s = %d of limit %s: a bucket has one value", o.For, name, bits, quote(o.Limit))
		default:
			tier := *limit
			for _, key := range slices.Sorted(maps.Keys(o.Values)) {
				if v := o.Values[key]; v.err != nil {
					bad("%s: %v", key, v.err)
				} else {
					tierKeys.find(key).field.set(&tier, v.value)
				}
			}
			values := tier.Values()
			if err := limit.CheckValues(&values); err != nil && valid {
				bad("%v", err)
			}
			limit.BySource = append(limit.BySource, shaper.SourceValues{Source: o.For, Values: values})
		}
	}
}

// withOverrides returns a limit with values replaced by those of overrides, before it is
// decoded: errors in them have the position of the override.
func (l *loader) withOverrides(t table) table {
	name, _ := t.values["name"].(string)
	if len(l.overrides[name]) == 0 {
		return t
	}
	at := *t.at
	t.values, at.keys, t.at = maps.Clone(t.values), maps.Clone(at.keys), &at
	for key, v := range l.overrides[name] {
		t.values[key], at.keys[key] = v.value, v.at
	}
	return t
}

// parseScalar returns the TOML value of a key that is known, or of an earlier version.
func parseScalar(key, text string) (any, error) {
	kind := kindString // type of mode, a key of an earlier version
	if key != "mode" {
		kind = overrideKeys.find(cmp.Or(renamedInLimit[key], key)).typ.kind
	}
	switch kind {
	case kindInteger:
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: must be an integer such as 100, not %s", key, quote(text))
		}
		return n, nil
	case kindBoolean:
		if text != "true" && text != "false" {
			return nil, fmt.Errorf("%s: must be true or false, not %s", key, quote(text))
		}
		return text == "true", nil
	}
	return text, nil
}

// checkOverrideKeys returns an error if there are no keys, or one that is unknown or of an
// earlier version.
func checkOverrideKeys(limit string, set map[string]string) error {
	known := OverrideKeys()
	if len(set) == 0 {
		return fmt.Errorf("override limit %s: nothing to set; keys are %s", quote(limit), strings.Join(known, ", "))
	}
	for _, key := range slices.Sorted(maps.Keys(set)) {
		if m, old := migrate("[[override]]", key, set[key]); old {
			return fmt.Errorf("override limit %s: %s", quote(limit), m.msg)
		}
		if !slices.Contains(known, key) {
			return fmt.Errorf("override limit %s: %s", quote(limit), unknownKey(key, known, synonymsInLimit))
		}
	}
	return nil
}
