package config

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// valueType is the type of a key's value.
type valueType struct {
	kind      valueKind
	desc      string     // description, as in "rate"
	example   string     // example of a string
	pattern   string     // pattern of strings: ECMA 262, without flags
	min       int64      // minimum of an integer
	max       int64      // maximum of an integer
	enumNames []string   // values of an enumeration
	elem      *valueType // element type of an array, or of a table with names of the user
	keys      keys       // keys of a table

	// parse returns the Go value of a TOML value. current is the value of the key before,
	// for messages. A result besides an error is the value for further checks.
	parse func(key string, v, current any) (any, error)

	// parseAll returns the Go value of the array under a key, and the positions of its
	// elements, and reports mistakes in them.
	parseAll func(t table, key string) (any, []*node)

	// show returns the canonical form of a Go value, or is nil if it is the value.
	show func(value any) any
}

// valueKind is a type of TOML, or a union of types.
type valueKind uint8

const (
	kindString valueKind = iota
	kindInteger
	kindStringOrInteger
	kindBoolean
	kindArray // array of elem, or a single elem
	kindTable
	kindStringOrTable
	kindTables      // [[...]]
	kindNamedTables // table of tables with the same keys, under names of the user
	kindNamedValues // table of elem, under names of the user
)

// stringType returns a type of strings.
func stringType(words, example, pattern string) valueType {
	return textType(words, example, pattern, func(s string, _ any) (any, error) { return s, nil })
}

// textType returns a type of strings that parse converts or checks.
func textType(words, example, pattern string, parse func(s string, current any) (any, error)) valueType {
	return valueType{desc: words, example: example, pattern: pattern, parse: func(_ string, v, current any) (any, error) {
		s, ok := v.(string)
		if !ok {
			return nil, wrongType(example, v)
		}
		return parse(s, current)
	}}
}

func wrongType(example string, v any) error {
	return fmt.Errorf("must be a string such as %q, not %s", example, kind(v))
}

// quantityType returns a type of strings with a unit.
func quantityType[T any](words, example, pattern string, parse func(string) (T, error), show func(T) any) valueType {
	return valueType{
		desc: words, example: example, pattern: pattern,
		parse: func(_ string, v, _ any) (any, error) { return parseQuantity(v, example, parse) },
		show:  func(v any) any { return show(v.(T)) },
	}
}

func parseQuantity[T any](v any, example string, parse func(string) (T, error)) (any, error) {
	if s, ok := v.(string); ok {
		value, err := parse(s)
		if err != nil {
			return nil, err
		}
		return value, nil
	}
	err := wrongType(example, v)
	// The parser's error about a number without a unit suggests the units.
	if number, ok := formatNumber(v); ok {
		if _, hint := parse(number); hint != nil {
			err = fmt.Errorf("%w: %w", err, hint)
		}
	}
	return nil, err
}

func formatNumber(v any) (string, bool) {
	switch v := v.(type) {
	case int64:
		return strconv.FormatInt(v, 10), true
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64), !math.IsNaN(v) && !math.IsInf(v, 0)
	}
	return "", false
}

// orInteger returns v, a string type, with an integer as an alternative.
func (v valueType) orInteger(first, last int64) valueType {
	v.kind, v.min, v.max = kindStringOrInteger, first, last
	return v
}

func rateType(example string) valueType {
	return quantityType("rate", example, ratePattern, ParseRate, showRate)
}

func sizeType(example string) valueType {
	return quantityType("size", example, sizePattern, ParseSize, showSize)
}

// boundedSizeType returns the type of sizes to last.
func boundedSizeType(example string, last int) valueType {
	parse := func(s string) (int, error) {
		n, err := ParseSize(s)
		if err == nil && n > uint64(last) {
			err = fmt.Errorf("must be at most %s, not %s", FormatSize(uint64(last)), quote(s))
		}
		return int(n), err
	}
	return quantityType(fmt.Sprintf("size to `%s`", FormatSize(uint64(last))), example, sizePattern, parse, showSize)
}

func durationType(first, last time.Duration) valueType {
	parse := func(s string) (time.Duration, error) {
		d, err := ParseDuration(s)
		if err == nil && (d < first || d > last) {
			err = fmt.Errorf("must be from %s to %s, not %s", FormatDuration(first), FormatDuration(last), quote(s))
		}
		return d, err
	}
	v := quantityType(fmt.Sprintf("time from `%s` to `%s`", FormatDuration(first), FormatDuration(last)), "", durationPattern, parse, showDuration)
	v.parse = func(_ string, v, current any) (any, error) {
		d, _ := current.(time.Duration)
		return parseQuantity(v, FormatDuration(d), parse)
	}
	return v
}

// Patterns of quantities with a unit, for editors. They leave finer mistakes to the
// parsers, which explain them.
const (
	number           = `^[0-9]+(\.[0-9]+)? ?([kKmMgGtT][iI]?)?`
	ratePattern      = number + `([bB][iI][tT](/[sS])?|B/[sS])$`
	sizePattern      = number + `B$`
	durationPattern  = `^(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+$|^([0-9]+(\.[0-9]*)?|\.[0-9]+) (ns|us|µs|μs|ms|s|m|h)$`
	frequencyPattern = `^[0-9]+ ?(pps|/[0-9]*(s|min|h))$`
	prefixPattern    = `^[0-9A-Fa-f:.]+(/[0-9]+)?$`
)

func integerType[T int | uint64](first, last T) valueType {
	v := valueType{kind: kindInteger, desc: fmt.Sprintf("integer from %d to %d", first, last), min: int64(first), max: int64(last)}
	v.parse = func(_ string, in, current any) (any, error) {
		n, ok := in.(int64)
		switch {
		case !ok:
			example, _ := current.(T)
			if example < first {
				example = 100
			}
			return nil, fmt.Errorf("must be an integer such as %d, not %s", example, kind(in))
		case n < v.min || n > v.max:
			return nil, fmt.Errorf("must be from %d to %d, not %d", first, last, n)
		}
		return T(n), nil
	}
	return v
}

var booleanType = valueType{kind: kindBoolean, desc: "`true` or `false`", parse: func(_ string, v, _ any) (any, error) {
	if _, ok := v.(bool); !ok {
		return nil, fmt.Errorf("must be true or false, not %s", kind(v))
	}
	return v, nil
}}

// enumType returns the type of an enumeration.
func enumType[T fmt.Stringer](options ...T) valueType {
	names := make([]string, len(options))
	for i, o := range options {
		names[i] = o.String()
	}
	return valueType{
		desc: alternatives(names), example: names[0], enumNames: names,
		parse: func(key string, v, _ any) (any, error) {
			s, ok := v.(string)
			if !ok {
				return nil, wrongType(names[0], v)
			}
			if i := slices.Index(names, s); i >= 0 {
				return options[i], nil
			}
			return nil, errors.New(unknownValue(s, names, valueSynonyms[key]))
		},
		show: func(v any) any { return v.(T).String() },
	}
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

// arrayType returns the type of an array of distinct elements, or a single one. words
// describe an element, parse parses it, and show returns its canonical form.
func arrayType[T comparable](words string, elem valueType, parse func(string) (T, error), show func(T) any) valueType {
	return valueType{
		kind: kindArray, desc: words, elem: &elem,
		parseAll: func(t table, key string) (any, []*node) {
			items := list(t, key, parse)
			return values(items), positions(items)
		},
		show: func(v any) any {
			all := []any{}
			for _, e := range v.([]T) {
				all = append(all, show(e))
			}
			return all
		},
	}
}

// asIs returns a value as its canonical form.
func asIs[T any](v T) any { return v }

// asText returns the text of a value as its canonical form.
func asText[T fmt.Stringer](v T) any { return v.String() }

func tableType(k keys) valueType { return valueType{kind: kindTable, desc: "table", keys: k} }

// namedTablesType returns the type of tables with keys k under names such as example.
func namedTablesType(example string, k keys) valueType {
	return valueType{kind: kindNamedTables, desc: "table of tables by name, such as `" + example + "`", keys: k}
}

// namedValuesType returns the type of values under names such as example.
func namedValuesType(example string, elem valueType) valueType {
	return valueType{kind: kindNamedValues, desc: elem.desc + " by name, such as `" + example + "`", elem: &elem}
}

func tablesType(k keys) valueType { return valueType{kind: kindTables, desc: "tables", keys: k} }

// literal returns the value of a string, an integer or a boolean in TOML.
func literal(s string) any {
	if n, err := strconv.ParseInt(s, 10, 64); err == nil {
		return n
	}
	if text, err := strconv.Unquote(s); err == nil {
		return text
	}
	return s == "true"
}
