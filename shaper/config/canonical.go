package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// Canonical returns c for encoding/json: with all defaults, all values in canonical
// spelling, without keys that have no effect, and quantities also as numbers.
func (c *Config) Canonical() any {
	all := fileKeys.canonical(c, c)
	scheduled := []any{}
	for _, s := range c.scheduled {
		o := object{{"limit", s.Limit}, {"when", s.When.texts()}}
		for k, limit := range c.setBy(&s) {
			o = append(o, member{k.name, k.show(limit)})
		}
		scheduled = append(scheduled, o)
	}
	if len(scheduled) > 0 {
		all = append(all, member{"override", scheduled})
	}
	return all
}

// object is a JSON object. A quantity is one with its text as the first member.
type object []member

type member struct {
	name  string
	value any
}

// MarshalJSON keeps the order of members.
func (o object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	err := writeJSON(&b, o)
	return b.Bytes(), err
}

// writeJSON writes objects and arrays by itself: encoding/json would copy what is nested
// once for each level.
func writeJSON(b *bytes.Buffer, value any) error {
	switch v := value.(type) {
	case object:
		b.WriteByte('{')
		for i, m := range v {
			if i > 0 {
				b.WriteByte(',')
			}
			b.WriteString(strconv.Quote(m.name) + ":")
			if err := writeJSON(b, m.value); err != nil {
				return err
			}
		}
		b.WriteByte('}')
		return nil
	case []any:
		b.WriteByte('[')
		for i, e := range v {
			if i > 0 {
				b.WriteByte(',')
			}
			if err := writeJSON(b, e); err != nil {
				return err
			}
		}
		b.WriteByte(']')
		return nil
	}
	encoder := json.NewEncoder(b)
	encoder.SetEscapeHTML(false) // the caller's encoder does it, or not
	return encoder.Encode(value)
}

// canonical returns the canonical form of a table of c that became record.
func (k keys) canonical(c *Config, record any) object {
	o := object{}
	for _, key := range k.order(func(k *key) string { return k.after }) {
		if !k.isShown(key, c, record) {
			continue
		}
		var value any
		switch key.typ.kind {
		case kindTable:
			value = key.typ.keys.canonical(c, record)
		case kindNamedTables:
			tables := object{}
			l := record.(*shaper.Limit)
			for i := range l.For {
				tier := l.With(&l.For[i].Values)
				tables = append(tables, member{l.For[i].Group, key.typ.keys.canonical(c, &tier)})
			}
			value = tables
		case kindTables:
			tables := []any{}
			for _, record := range key.field.get(record).([]any) {
				tables = append(tables, key.typ.keys.canonical(c, record))
			}
			value = tables
		default:
			value = key.show(record)
		}
		o = append(o, member{key.name, value})
	}
	return o
}

// isShown reports whether a key is in the canonical form of a table.
func (k keys) isShown(key *key, c *Config, record any) bool {
	if key.shown != nil {
		return key.shown(c, record)
	}
	isSet := func(name string) bool { return !isZero(k.find(name).field.get(record)) }
	for _, needs := range key.needs {
		if needs.met != nil && !needs.met(record, isSet) {
			return false
		}
	}
	switch {
	case key.typ.kind == kindTable || key.required:
		return true
	case key.typ.kind == kindTables:
		return key.field.get != nil // an override has its effect in a limit
	}
	return key.def != "" && !key.omitZero || !isZero(key.field.get(record))
}

func isZero(v any) bool {
	r := reflect.ValueOf(v)
	return r.IsZero() || r.Kind() == reflect.Slice && r.Len() == 0
}

// order returns the keys in their order, except those after another one.
func (k keys) order(after func(*key) string) []*key {
	var order, moved []*key
	for i := range k {
		if after(&k[i]) == "" {
			order = append(order, &k[i])
		} else {
			moved = append(moved, &k[i])
		}
	}
	for _, m := range moved {
		i := slices.IndexFunc(order, func(k *key) bool { return k.name == after(m) })
		order = slices.Insert(order, i+1, m)
	}
	return order
}

// show returns the canonical form of the value of a key.
func (k *key) show(record any) any {
	value := k.field.get(record)
	if k.typ.show == nil {
		return value
	}
	return k.typ.show(value)
}

func showDuration(d time.Duration) any {
	return object{{"text", FormatDuration(d)}, {"seconds", d.Seconds()}}
}

// showRate returns exact numbers: an eighth of an integer below 2^53.
func showRate(bits uint64) any {
	return object{{"text", FormatRate(bits) + " = " + FormatRateBytes(bits)}, {"bits_per_second", bits}, {"bytes_per_second", float64(bits) / 8}}
}

func showSize[T int | uint64](bytes T) any {
	return object{{"text", FormatSize(uint64(bytes))}, {"bytes", bytes}}
}

func showPercent(n int) any {
	return object{{"text", fmt.Sprintf("%d%%", n)}, {"percent", n}}
}

// showFrequency returns the period in which Count events may occur as seconds.
func showFrequency(f shaper.Frequency) any {
	return object{{"text", FormatFrequency(f)}, {"count", f.N}, {"seconds", f.Per.Seconds()}}
}
