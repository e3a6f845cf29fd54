package config

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// table reads the values of one TOML table, and reports mistakes in them.
type table struct {
	*report
	name   string // as in the file: "[[limit]]", "match"; "" is the top level
	keys   keys
	values map[string]any
	at     *node
}

// item is an element of an array.
type item[T any] struct {
	value T
	at    *node
}

func (t table) has(key string) bool { _, ok := t.values[key]; return ok }

// errorf reports a mistake in the value of a key.
func (t table) errorf(key, format string, args ...any) {
	t.add(t.at.child(key), key+": "+fmt.Sprintf(format, args...))
}

// unknownKeys returns the unknown keys.
func (t table) unknownKeys() (unknown []string) {
	known := t.keys.names()
	for key := range t.values {
		if !slices.Contains(known, key) {
			unknown = append(unknown, key)
		}
	}
	return unknown
}

// check reports unknown and missing keys, and keys of earlier versions. It returns the
// suggestions for unknown keys.
func (t table) check() (meant map[string]bool) {
	t.migrate()
	known, unknown := t.keys.names(), t.unknownKeys()
	meant = map[string]bool{}
	slices.SortFunc(unknown, func(a, b string) int {
		return cmp.Compare(t.at.child(a).offset, t.at.child(b).offset)
	})
	for _, key := range unknown[:min(len(unknown), maxMistakes)] {
		msg := "unknown key " + quote(key)
		if t.name != "" {
			msg += " in " + t.name
		}
		names := t.suggestions(key)
		if msg += didYouMean(names); len(names) == 0 {
			msg += "; known here: " + strings.Join(known, ", ")
		}
		for _, name := range names {
			meant[name] = true
		}
		t.add(t.at.child(key), msg)
	}
	for _, k := range t.keys {
		if k.required && !t.has(k.name) && !meant[k.name] {
			example := k.typ.example
			if k.typ.elem != nil {
				example = k.typ.elem.example
			}
			t.add(t.at, fmt.Sprintf("%s: missing key %s, such as %s = %q", t.name, k.name, k.name, example))
		}
	}
	return meant
}

// overriddenKey returns the first of keys that an override has set, or keys[0] if there is none.
func (t table) overriddenKey(keys ...string) string {
	for _, key := range keys {
		if t.at.child(key).override {
			return key
		}
	}
	return keys[0]
}

// requireForEffect reports keys that have no effect because the needed condition is not met.
func (t table) requireForEffect(met bool, needed string, keys ...string) {
	for _, key := range keys {
		if !met && t.has(key) {
			t.errorf(key, "has no effect without %s", needed)
		}
	}
}

// decode sets the fields of the keys that the table has, and reports mistakes in their
// values. It returns the positions of the elements of arrays, by key.
func (t table) decode(record any) (elems map[string][]*node) {
	elems = map[string][]*node{}
	for i := range t.keys {
		k := &t.keys[i]
		if k.preset != nil {
			k.field.set(record, k.preset(record))
		}
		v, ok := t.values[k.name]
		switch {
		case !ok:
		case k.typ.kind == kindTable:
			sub, _ := t.table(k.name)
			for key, at := range sub.decode(record) {
				elems[k.name+"."+key] = at
			}
			sub.checkNeeds(record)
		case k.field.set == nil:
		case k.typ.kind == kindArray:
			value, at := k.typ.parseAll(t, k.name)
			k.field.set(record, value)
			elems[k.name] = at
			if array, ok := elements(v); ok && len(array) == 0 && k.def == "" {
				t.errorf(k.name, "must not be empty%s", k.ifEmpty)
			}
		default:
			value, err := k.parse(v, k.field.get(record))
			if err != nil {
				t.errorf(k.name, "%v", err)
			}
			if value != nil {
				k.field.set(record, value)
			}
		}
	}
	return elems
}

// parse returns the Go value of a TOML value, or of one that was parsed before.
func (k *key) parse(v, current any) (any, error) {
	if parsed, ok := v.(Value); ok {
		return parsed.value, parsed.err
	}
	return k.typ.parse(k.name, v, current)
}

// checkNeeds reports keys that have no effect.
func (t table) checkNeeds(record any) {
	has := func(key string) bool {
		name, sub, _ := strings.Cut(key, ".")
		values, _ := t.values[name].(map[string]any)
		return t.has(name) && (sub == "" || values[sub] != nil)
	}
	for i := range t.keys {
		for _, needs := range t.keys[i].needs {
			if key := t.keys[i].name; t.has(key) && needs.met != nil && !needs.met(record, has) {
				t.errorf(key, "%s", needs.message())
			}
		}
	}
}

// table returns the table under a key, after a check of its keys.
func (t table) table(key string) (table, bool) {
	v, ok := t.values[key]
	if !ok {
		return table{}, false
	}
	values, ok := v.(map[string]any)
	if !ok {
		t.add(t.at.child(key), fmt.Sprintf("%s must be a table, not %s", key, kind(v)))
		return table{}, false
	}
	name := key
	if t.name == "" {
		name = "[" + key + "]"
	}
	sub := table{t.report, name, t.keys.find(key).typ.keys, values, t.at.child(key)}
	sub.check()
	return sub, true
}

// namedTables returns the table of tables under a key.
func (t table) namedTables(key string) (table, bool) {
	v, ok := t.values[key]
	values, isTable := v.(map[string]any)
	if ok && !isTable {
		t.add(t.at.child(key), fmt.Sprintf("%s must be a table, not %s", key, kind(v)))
	}
	return table{t.report, key, t.keys.find(key).typ.keys, values, t.at.child(key)}, isTable
}

// namedTable returns one of the tables of t, which are under names, after a check of its keys.
func (t table) namedTable(name string) (table, bool) {
	values, ok := t.values[name].(map[string]any)
	if !ok {
		t.add(t.at.child(name), fmt.Sprintf("%s.%s must be a table, not %s", t.name, name, kind(t.values[name])))
		return table{}, false
	}
	sub := table{t.report, t.name + "." + name, t.keys, values, t.at.child(name)}
	sub.check()
	return sub, true
}

// tables returns the tables of the array under a key, after a check of their keys.
func (t table) tables(key string) []table {
	v, ok := t.values[key]
	if !ok {
		return nil
	}
	name, at := "[["+key+"]]", t.at.child(key)
	if _, ok := v.(map[string]any); ok {
		t.add(at, fmt.Sprintf("must be %s, with two brackets", name))
		return nil
	}
	elems, ok := elements(v)
	if !ok {
		t.add(at, fmt.Sprintf("%s must be tables %s, not %s", key, name, kind(v)))
	}
	var tables []table
	for i, v := range elems {
		values, ok := v.(map[string]any)
		if !ok {
			t.add(at.elem(i), fmt.Sprintf("an element of %s must be a table, not %s", key, kind(v)))
			continue
		}
		sub := table{t.report, name, t.keys.find(key).typ.keys, values, at.elem(i)}
		sub.check()
		tables = append(tables, sub)
	}
	return tables
}

// elements returns the elements of the array under a key, or the single value in its place.
func (t table) elements(key string) []any {
	v, ok := t.values[key]
	if !ok {
		return nil
	}
	if elems, ok := elements(v); ok {
		return elems
	}
	return []any{v}
}

// elementError returns the error that v is not an element of the array under a key.
func (t table) elementError(key string, v any) error {
	article, one := "a", t.keys.find(key).typ.desc
	if strings.HasPrefix(one, "AS ") {
		article = "an"
	}
	return fmt.Errorf("must be %s %s, or an array of them, not %s", article, one, kind(v))
}

// elements returns the elements of an array, which the decoder returns in two types.
func elements(v any) ([]any, bool) {
	tables, ok := v.([]map[string]any)
	if !ok {
		elems, ok := v.([]any)
		return elems, ok
	}
	elems := make([]any, len(tables))
	for i, t := range tables {
		elems[i] = t
	}
	return elems, true
}

// text returns the string under a key.
func (t table) text(key string) (string, bool) {
	v, ok := t.values[key]
	if !ok {
		return "", false
	}
	text, err := t.keys.find(key).typ.parse(key, v, nil)
	if err != nil {
		t.errorf(key, "%v", err)
		return "", false
	}
	return text.(string), true
}

// list parses the elements of the array under a key, which must be distinct, or the single
// value in its place.
func list[T comparable](t table, key string, parse func(string) (T, error)) []item[T] {
	var items []item[T]
	seen := map[T]bool{}
	integers := t.keys.find(key).typ.elem.kind == kindStringOrInteger
	for i, v := range t.elements(key) {
		if t.full() {
			break
		}
		at := t.at.child(key).elem(i)
		s, ok := v.(string)
		if n, isInteger := v.(int64); isInteger && integers {
			s, ok = strconv.FormatInt(n, 10), true
		}
		if !ok {
			t.add(at, fmt.Sprintf("%s: %v", key, t.elementError(key, v)))
			continue
		}
		value, err := parse(s)
		if err != nil {
			t.add(at, fmt.Sprintf("%s: %v", key, err))
			continue
		}
		if seen[value] {
			t.add(at, fmt.Sprintf("%s: duplicate entry %s", key, quote(s)))
			continue
		}
		seen[value] = true
		items = append(items, item[T]{value, at})
	}
	return items
}

// values returns the values of items.
func values[T any](items []item[T]) []T {
	var vs []T
	for _, i := range items {
		vs = append(vs, i.value)
	}
	return vs
}

// positions returns the positions of items.
func positions[T any](items []item[T]) []*node {
	var at []*node
	for _, i := range items {
		at = append(at, i.at)
	}
	return at
}

// located returns values with their positions.
func located[T any](values []T, at []*node) []item[T] {
	items := make([]item[T], len(values))
	for i, v := range values {
		items[i] = item[T]{v, at[i]}
	}
	return items
}

// kind describes a value of a wrong type.
func kind(v any) string {
	switch v := v.(type) {
	case string:
		return "string " + quote(v)
	case int64:
		return fmt.Sprintf("integer %d", v)
	case float64:
		return fmt.Sprintf("float %v", v)
	case bool:
		return fmt.Sprintf("boolean %t", v)
	case time.Time:
		return "a date or time"
	case map[string]any:
		return "a table"
	}
	return "an array"
}

// quote quotes text from a file, and truncates long text.
func quote(s string) string { return strconv.Quote(clip(s, 80)) }

func clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}
