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
	name        string
	typ         valueType
	required    bool
	def         string // what it is when it is left out, in TOML
	defText     string // the same in words, where there is no one value
	needs       string // what it has no effect without
	overridable bool   // by an [[override]]
	doc         string // sentences; Markdown
}

// valueType describes what a key takes.
type valueType struct {
	kind      valueKind
	desc      string     // what it is, as in "a rate"
	example   string     // of what is a string
	pattern   string     // that strings match; ECMA 262, without flags
	min       int64      // range of an integer, or of a time in ns
	max       int64      //
	enum      any        // []T of one of several T
	enumNames []string   // of options
	elem      *valueType // of an array
	keys      keys       // of a table
}

// valueKind is a type of TOML, or several.
type valueKind uint8

const (
	kindString valueKind = iota
	kindInteger
	kindStringOrInteger
	kindBoolean
	kindDuration // in a string
	kindArray    // of what elem takes, or one of it
	kindTable
	kindStringOrTable
	kindTables // [[...]]
)

// stringType is a string.
func stringType(words, example, pattern string) valueType {
	return valueType{desc: words, example: example, pattern: pattern}
}

func integerType(first, last int64) valueType {
	return valueType{kind: kindInteger, desc: fmt.Sprintf("integer from %d to %d", first, last), min: first, max: last}
}

// orInteger is v, a string, or an integer in its place.
func (v valueType) orInteger(first, last int64) valueType {
	v.kind, v.min, v.max = kindStringOrInteger, first, last
	return v
}

var booleanType = valueType{kind: kindBoolean, desc: "`true` or `false`"}

func durationType(first, last time.Duration) valueType {
	return valueType{
		kind: kindDuration, min: int64(first), max: int64(last), pattern: `^(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+$|^([0-9]+(\.[0-9]*)?|\.[0-9]+) (ns|us|µs|μs|ms|s|m|h)$`,
		desc: fmt.Sprintf("time from `%s` to `%s`", FormatDuration(first), FormatDuration(last)),
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

func rateType(example string) valueType { return stringType("rate", example, ratePattern) }
func sizeType(example string) valueType { return stringType("size", example, sizePattern) }

// enumType is the name of one of options.
func enumType[T fmt.Stringer](options ...T) valueType {
	v := valueType{enum: options, enumNames: stringsOf(options)}
	v.example = v.enumNames[0]
	v.desc = alternatives(v.enumNames)
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

// arrayType is an array, or one of its elements; words are those of an element.
func arrayType(words string, elem valueType) valueType {
	return valueType{kind: kindArray, desc: words, elem: &elem}
}

func tableType(k keys) valueType { return valueType{kind: kindTable, desc: "table", keys: k} }

func tablesType(k keys) valueType { return valueType{kind: kindTables, desc: "tables", keys: k} }

// names returns the names of keys.
func (k keys) names() []string {
	names := make([]string, len(k))
	for i := range k {
		names[i] = k[i].name
	}
	return names
}

// typeOf returns what a key takes that is known.
func (k keys) typeOf(name string) *valueType {
	return &k[slices.IndexFunc(k, func(k key) bool { return k.name == name })].typ
}
