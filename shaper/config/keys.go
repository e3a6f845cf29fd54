package config

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

//go:generate go test . -run ^TestGenerated$ -update

// keys describes the keys of a table, in the order of the reference. What is decoded,
// what stands in docs/configuration.md and what editors know by the JSON schema all
// come from it.
type keys []key

// key describes one key.
type key struct {
	name     string
	takes    value
	required bool
	preset   string // what it is when it is left out, in TOML
	without  string // the same in words, where there is no one value
	needs    string // what it has no effect without
	settable bool   // by an [[override]]
	about    string // sentences; Markdown
}

// value describes what a key takes.
type value struct {
	kind    valueKind
	words   string   // what it is, as in "a rate"
	example string   // of what is a string
	pattern string   // that strings match; ECMA 262, without flags
	first   int64    // range of an integer, or of a time in ns
	last    int64    //
	options any      // []T of one of several T
	names   []string // of options
	elem    *value   // of an array
	keys    keys     // of a table
}

// valueKind is a type of TOML, or several.
type valueKind uint8

const (
	aString valueKind = iota
	anInteger
	aStringOrInteger
	aBoolean
	aTime   // in a string
	anArray // of what elem takes, or one of it
	aTable
	aStringOrTable
	someTables // [[...]]
)

// text is a string.
func text(words, example, pattern string) value {
	return value{words: words, example: example, pattern: pattern}
}

func integer(first, last int64) value {
	return value{kind: anInteger, words: fmt.Sprintf("integer from %d to %d", first, last), first: first, last: last}
}

// orInteger is v, a string, or an integer in its place.
func (v value) orInteger(first, last int64) value {
	v.kind, v.first, v.last = aStringOrInteger, first, last
	return v
}

var boolean = value{kind: aBoolean, words: "`true` or `false`"}

func duration(first, last time.Duration) value {
	return value{
		kind: aTime, first: int64(first), last: int64(last), pattern: `^(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+$|^([0-9]+(\.[0-9]*)?|\.[0-9]+) (ns|us|µs|μs|ms|s|m|h)$`,
		words: fmt.Sprintf("time from `%s` to `%s`", FormatDuration(first), FormatDuration(last)),
	}
}

// Quantities with a unit. Patterns are for editors: they leave finer mistakes to the
// parsers, which explain them.
const (
	number        = `^[0-9]+(\.[0-9]+)? ?([kKmMgGtT][iI]?)?`
	ratePattern   = number + `([bB][iI][tT](/[sS])?|B/[sS])$`
	sizePattern   = number + `B$`
	prefixPattern = `^[0-9A-Fa-f:.]+(/[0-9]+)?$`
)

func rate(example string) value { return text("rate", example, ratePattern) }
func size(example string) value { return text("size", example, sizePattern) }

// oneOf is the name of one of options.
func oneOf[T fmt.Stringer](options ...T) value {
	v := value{options: options, names: texts(options)}
	v.example = v.names[0]
	v.words = alternatives(v.names)
	return v
}

// alternatives lists names as in: `"a"`, `"b"` or `"c"`.
func alternatives(names []string) string {
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = fmt.Sprintf("`%q`", name)
	}
	last := len(quoted) - 1
	return strings.TrimPrefix(strings.Join(quoted[:last], ", ")+" or "+quoted[last], " or ")
}

// listOf is an array, or one of its elements; words are those of an element.
func listOf(words string, elem value) value {
	return value{kind: anArray, words: words, elem: &elem}
}

func tableOf(k keys) value { return value{kind: aTable, words: "table", keys: k} }

func tablesOf(k keys) value { return value{kind: someTables, words: "tables", keys: k} }

// names returns the names of keys.
func (k keys) names() []string {
	names := make([]string, len(k))
	for i := range k {
		names[i] = k[i].name
	}
	return names
}

// takes returns what a key takes that is known.
func (k keys) takes(name string) *value {
	return &k[slices.IndexFunc(k, func(k key) bool { return k.name == name })].takes
}
