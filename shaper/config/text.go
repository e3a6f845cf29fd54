package config

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"strings"
)

// section is a table of the canonical form, in words.
type section struct {
	name string // of the table, such as "limit per-source"
	keys []setting
}

type setting struct{ key, value string }

// WriteText writes the canonical form of c, as [Config.Canonical], in a readable format.
func (c *Config) WriteText(w io.Writer) error {
	var b bytes.Buffer
	for i, s := range c.sections() {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(s.name + "\n")
		for _, key := range s.keys {
			fmt.Fprintf(&b, "  %-20s %s\n", key.key, key.value)
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// sections returns the tables of the canonical form that have keys.
func (c *Config) sections() (all []section) {
	add := func(name string, keys keys, record any) {
		if settings := keys.settings(c, record, ""); len(settings) > 0 {
			all = append(all, section{name, settings})
		}
	}
	for i := range fileKeys {
		switch k := &fileKeys[i]; {
		case !fileKeys.isShown(k, c, c):
		case k.typ.kind == kindTable:
			add(k.name, k.typ.keys, c)
		default:
			for _, record := range k.field.get(c).([]any) {
				add(fmt.Sprint(k.name, " ", k.typ.keys[0].field.get(record)), k.typ.keys, record)
			}
		}
	}
	for _, s := range c.scheduled {
		o := section{overrideSection + s.Limit, []setting{{"when", s.When.String()}}}
		for k, limit := range c.setBy(&s) {
			o.keys = append(o.keys, setting{k.name, k.textOf(limit)})
		}
		all = append(all, o)
	}
	return all
}

const overrideSection = "override "

// settings returns the keys of a table of c that became record, in words.
func (k keys) settings(c *Config, record any, prefix string) (all []setting) {
	for _, key := range k.order(func(k *key) string { return cmp.Or(k.textAfter, k.after) }) {
		switch {
		case !k.isShown(key, c, record):
		case key.typ.kind == kindTable && key.text == nil:
			all = append(all, key.typ.keys.settings(c, record, key.name+" ")...)
		default:
			if text := key.textOf(record); text != "" {
				all = append(all, setting{prefix + cmp.Or(key.label, key.name), text})
			}
		}
	}
	return all
}

// textOf returns the canonical value of a key as text, or "" if it is not written.
func (k *key) textOf(record any) string {
	if k.text != nil {
		return k.text(record)
	}
	switch v := k.show(record).(type) {
	case object:
		return v[0].value.(string) // a quantity
	case []any:
		var all []string
		for _, e := range v {
			all = append(all, fmt.Sprint(e))
		}
		return strings.Join(all, ", ")
	default:
		return fmt.Sprint(v)
	}
}
