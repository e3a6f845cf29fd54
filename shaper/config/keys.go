package config

import (
	"slices"
	"strings"
)

//go:generate go test . -run ^(TestGenerated|TestReference)$ -update

// keys describes the keys of a table, in the order of the reference. The decoder, the
// checks, the canonical form, docs/configuration.md and the JSON schema for editors are
// all based on it.
type keys []key

// key describes one key.
type key struct {
	name        string
	typ         valueType
	field       field // where the value is stored; zero if the loader has code for the key
	required    bool
	def         string               // default value, in TOML
	defText     string               // default in words, if there is no single value
	preset      func(record any) any // default value, if it depends on keys before this one
	needs       []condition          // conditions without which the key has no effect
	overridable bool                 // an [[override]] may set the key
	perHost     bool                 // [Config.SharedLimits] leaves the key out
	doc         string               // documentation: sentences in Markdown
	ifEmpty     string               // what to do instead, in the error about an empty array

	// The canonical form has the keys that have an effect, in the order of the reference,
	// except as these say.
	shown     func(c *Config, record any) bool // whether it has the key, in place of needs
	omitZero  bool                             // it leaves the key out at its zero value
	after     string                           // the key before it
	textAfter string                           // the key before it, in text
	label     string                           // the name in text
	text      func(record any) string          // the value in text; "" is no line
}

// condition is something that a key needs to have an effect.
type condition struct {
	doc string // in the reference, in Markdown: a thing, or "at listeners"; "" if the key's documentation has it
	msg string // the error if it is not met; "" is a message with doc

	// met reports whether it is met by a table that became record, unless nil: then other
	// code checks it.
	met func(record any, has isSet) bool
}

// isSet reports whether a key of a table is set. A dotted key is one of a table in it.
type isSet func(key string) bool

func (c *condition) message() string {
	if c.msg != "" {
		return c.msg
	}
	return "has no effect without " + strings.ReplaceAll(c.doc, "`", "")
}

// needs returns a condition of keys of a table that becomes a T.
func needs[T any](doc, msg string, met func(*T, isSet) bool) condition {
	return condition{doc, msg, func(record any, has isSet) bool { return met(record.(*T), has) }}
}

// anyOf is the condition that one of some keys is set.
func anyOf(keys ...string) condition {
	return condition{
		doc: "`" + joinOr(keys, "`, `", "` or `") + "`",
		met: func(_ any, has isSet) bool { return slices.ContainsFunc(keys, has) },
	}
}

// field is the place of a key's value in the record, a pointer to the Go type that its table
// becomes.
type field struct {
	get func(record any) any
	set func(record, value any)
}

// fieldOf returns the field to which f returns a pointer.
func fieldOf[T, V any](f func(*T) *V) field {
	return field{
		get: func(record any) any { return *f(record.(*T)) },
		set: func(record, value any) { *f(record.(*T)) = value.(V) },
	}
}

// elementsOf returns the field of an array of tables.
func elementsOf[T, V any](f func(*T) []V) field {
	return field{get: func(record any) any {
		var all []any
		values := f(record.(*T))
		for i := range values {
			all = append(all, &values[i])
		}
		return all
	}}
}

// on adapts a function of the type that a table becomes.
func on[T, V any](f func(*T) V) func(record any) V {
	return func(record any) V { return f(record.(*T)) }
}

// when is on for [key.shown].
func when[T any](f func(*T) bool) func(c *Config, record any) bool {
	return func(_ *Config, record any) bool { return f(record.(*T)) }
}

// noText leaves a key out of the canonical form in text.
func noText(any) string { return "" }

// names returns the names of keys.
func (k keys) names() []string {
	names := make([]string, len(k))
	for i := range k {
		names[i] = k[i].name
	}
	return names
}

// find returns a known key. A dotted name is that of a key of a table in the table.
func (k keys) find(name string) *key {
	name, sub, dotted := strings.Cut(name, ".")
	for i := range k {
		switch {
		case k[i].name != name:
		case dotted:
			return k[i].typ.keys.find(sub)
		default:
			return &k[i]
		}
	}
	panic("unknown key " + name)
}

// setDefaults sets the fields of keys with a default value, also those of tables in the
// table.
func (k keys) setDefaults(record any) {
	for i := range k {
		k := &k[i]
		switch {
		case k.typ.kind == kindTable:
			k.typ.keys.setDefaults(record)
		case k.field.set != nil && k.def != "" && k.def != "[]":
			value, err := k.typ.parse(k.name, literal(k.def), k.field.get(record))
			if err != nil {
				panic(k.name + ": default: " + err.Error())
			}
			k.field.set(record, value)
		}
	}
}

// joinOr joins words, the last one by or.
func joinOr(words []string, comma, or string) string {
	last := len(words) - 1
	if last == 0 {
		return words[0]
	}
	return strings.Join(words[:last], comma) + or + words[last]
}
