package config

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// WriteText writes the canonical form of c, as [Config.Canonical], in a readable format.
func (c *Config) WriteText(w io.Writer) error {
	var b bytes.Buffer
	section := func(name string, keys keys, record any) {
		var lines bytes.Buffer
		keys.writeText(&lines, c, record, "")
		if lines.Len() == 0 {
			return
		}
		if b.Len() > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(name + "\n" + lines.String())
	}
	for i := range fileKeys {
		switch k := &fileKeys[i]; {
		case !fileKeys.isShown(k, c, c):
		case k.typ.kind == kindTable:
			section(k.name, k.typ.keys, c)
		default:
			for _, record := range k.field.get(c).([]any) {
				section(fmt.Sprint(k.name, " ", k.typ.keys.find("name").field.get(record)), k.typ.keys, record)
			}
		}
	}
	for _, s := range c.scheduled {
		fmt.Fprintf(&b, "\noverride %s\n  %-20s %v\n", s.Limit, "when", s.When)
		for _, key := range slices.Sorted(maps.Keys(s.Set)) {
			fmt.Fprintf(&b, "  %-20s %s\n", key, s.Set[key])
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// writeText writes the keys of a table of c that became record.
func (k keys) writeText(b *bytes.Buffer, c *Config, record any, prefix string) {
	for _, key := range k.order(func(k *key) string { return cmp.Or(k.textAfter, k.after) }) {
		switch {
		case !k.isShown(key, c, record):
		case key.typ.kind == kindTable && key.text == nil:
			key.typ.keys.writeText(b, c, record, key.name+" ")
		default:
			if text := key.textOf(record); text != "" {
				fmt.Fprintf(b, "  %-20s %s\n", prefix+cmp.Or(key.label, key.name), text)
			}
		}
	}
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
