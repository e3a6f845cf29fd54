package config

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

//go:generate go test . -run ^TestGenerated$ -update

// keys describes the keys of a table, in the order of the reference. The decoder,
// docs/configuration.md and the JSON schema for editors are all based on it.
type keys []key

// key describes one key.
type key struct {
	name        string
	typ         valueType
	required    bool
	def         string // default value, in TOML
	defText     string // default in words, if there is no single value
	needs       string // condition without which the key has no effect
	overridable bool   // an [[override]] may set the key
	doc         string // documentation: sentences in Markdown
}

// valueType is the type of a key's value.
type valueType struct {
	kind      valueKind
	desc      string     // description, as in "rate"
	example   string     // example of a string
	pattern   string     // pattern of strings: ECMA 262, without flags
	min       int64      // minimum of an integer, or of a time in ns
	max       int64      // maximum of an integer, or of a time in ns
	enum      any        // []T: the values of an enumeration
	enumNames []string   // names of the values of enum
	elem      *valueType // element type of an array
	keys      keys       // keys of a table
}

// valueKind is a type of TOML, or a union of types.
type valueKind uint8

const (
	kindString valueKind = iota
	kindInteger
	kindStringOrInteger
	kindBoolean
	kindDuration // a string
	kindArray    // array of elem, or a single elem
	kindTable
	kindStringOrTable
	kindTables // [[...]]
)

// stringType returns a string type.
func stringType(words, example, pattern string) valueType {
	return valueType{desc: words, example: example, pattern: pattern}
}

func integerType(first, last int64) valueType {
	return valueType{kind: kindInteger, desc: fmt.Sprintf("integer from %d to %d", first, last), min: first, max: last}
}

// orInteger returns v, a string type, with an integer as an alternative.
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

// Patterns of quantities with a unit, for editors. They leave finer mistakes to the
// parsers, which explain them.
const (
	number        = `^[0-9]+(\.[0-9]+)? ?([kKmMgGtT][iI]?)?`
	ratePattern   = number + `([bB][iI][tT](/[sS])?|B/[sS])$`
	sizePattern   = number + `B$`
	prefixPattern = `^[0-9A-Fa-f:.]+(/[0-9]+)?$`
)

func rateType(example string) valueType { return stringType("rate", example, ratePattern) }
func sizeType(example string) valueType { return stringType("size", example, sizePattern) }

// enumType returns the type of an enumeration.
func enumType[T fmt.Stringer](options ...T) valueType {
	v := valueType{enum: options, enumNames: stringsOf(options)}
	v.example = v.enumNames[0]
	v.desc = alternatives(v.enumNames)
	return v
}

// alternatives joins names as in: `"a"`, `"b"` or `"c"`.
func alternatives(names []string) string {
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = fmt.Sprintf("`%q`", name)
	}
	last := len(quoted) - 1
	return strings.TrimPrefix(strings.Join(quoted[:last], ", ")+" or "+quoted[last], " or ")
}

// arrayType returns the type of an array or a single element; words describe an element.
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

// typeOf returns the type of a known key.
func (k keys) typeOf(name string) *valueType {
	return &k[slices.IndexFunc(k, func(k key) bool { return k.name == name })].typ
}
