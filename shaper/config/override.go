package config

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"
)

// OverrideKeys returns the keys of a limit that an override may set.
func OverrideKeys() []string { return overrideKeys.names()[1:] }

// overrideValue is the value of a key of an override, with its position.
type overrideValue struct {
	value any
	at    *node
}

// override collects the values of one [[override]]. A runtime text replaces values of files;
// apart from that, a key of a limit may be overridden once.
func (l *loader) override(t table) {
	if len(t.values) == 0 || len(t.values) == 1 && t.has("limit") {
		t.add(t.at, "[[override]] has no effect: set a key of the limit, such as rate")
	}
	limit, ok := t.text("limit")
	if !ok {
		return
	}
	l.overridden = append(l.overridden, item[string]{limit, t.at.child("limit")})
	settings := l.overrides[limit]
	if settings == nil {
		settings = map[string]overrideValue{}
		l.overrides[limit] = settings
	}
	for _, key := range OverrideKeys() {
		if !t.has(key) {
			continue
		}
		at := *t.at.child(key)
		at.override = true
		if first, ok := settings[key]; ok && first.at.file.runtime == at.file.runtime {
			t.errorf(key, "duplicate override of limit %s, first at %s:%d", quote(limit), first.at.file.name, first.at.line())
			continue
		}
		settings[key] = overrideValue{t.values[key], &at}
		if !at.file.runtime {
			if l.c.overridden[limit] == nil {
				l.c.overridden[limit] = map[string]string{}
			}
			l.c.overridden[limit][key] = fmt.Sprintf("%s:%d", at.file.name, at.line())
		}
	}
}

// applyOverrides replaces values of a limit by those of overrides, before they are decoded:
// errors in them have the position of the override.
func (l *loader) applyOverrides(t table) {
	name, _ := t.values["name"].(string)
	for key, s := range l.overrides[name] {
		t.values[key], t.at.keys[key] = s.value, s.at
	}
}

// FormatOverride returns the TOML text of an [[override]] of a limit, with values as in the
// configuration but without quotes: {"rate": "10Mbit/s", "max_connections": "50"}. Errors are
// no values, a key that is not one of [OverrideKeys], and a value that should be an integer
// or a boolean. Mistakes in other values are reported when the text is loaded.
func FormatOverride(limit string, set map[string]string) (string, error) {
	known := OverrideKeys()
	if len(set) == 0 {
		return "", fmt.Errorf("override limit %s: nothing to set; keys are %s", quote(limit), strings.Join(known, ", "))
	}
	for _, key := range slices.Sorted(maps.Keys(set)) {
		if m, old := migrate("[[override]]", key, set[key]); old {
			return "", fmt.Errorf("override limit %s: %s", quote(limit), m.msg)
		}
		if !slices.Contains(known, key) {
			return "", fmt.Errorf("override limit %s: %s", quote(limit), unknownKey(key, known, synonymsInLimit))
		}
	}
	return formatOverride(limit, set)
}

// formatOverride formats keys that are known, or of an earlier version.
func formatOverride(limit string, set map[string]string) (string, error) {
	var b strings.Builder
	b.WriteString("[[override]]\n")
	writeKey(&b, "limit", limit)
	for _, key := range slices.Sorted(maps.Keys(set)) {
		bad := func(want string) (string, error) {
			return "", fmt.Errorf("override limit %s: %s: must be %s, not %s", quote(limit), key, want, quote(set[key]))
		}
		kind := kindString // type of mode, a key of an earlier version
		if key != "mode" {
			kind = overrideKeys.find(cmp.Or(renamedInLimit[key], key)).typ.kind
		}
		switch kind {
		case kindInteger:
			n, err := strconv.ParseInt(set[key], 10, 64)
			if err != nil {
				return bad("an integer such as 100")
			}
			writeKey(&b, key, n)
		case kindBoolean:
			if set[key] != "true" && set[key] != "false" {
				return bad("true or false")
			}
			writeKey(&b, key, set[key] == "true")
		default:
			writeKey(&b, key, set[key])
		}
	}
	return b.String(), nil
}

// ParseOverride is the inverse of [FormatOverride]. Keys of earlier versions are migrated. It
// is an error if text has anything else in it, such as a comment.
func ParseOverride(limit, text string) (map[string]string, error) {
	var read struct{ Override []map[string]any }
	was, set := map[string]string{}, map[string]string{}
	if err := decode(text, &read); err == nil && len(read.Override) == 1 {
		for key, value := range read.Override[0] {
			was[key] = fmt.Sprint(value)
		}
		delete(was, "limit")
	}
	for key, value := range was {
		key, value, _ = MigrateOverride(key, value)
		set[key] = value
	}
	if _, err := FormatOverride(limit, set); err == nil && len(set) == len(was) {
		if again, err := formatOverride(limit, was); err == nil && again == text {
			return set, nil
		}
	}
	return nil, fmt.Errorf("must be one [[override]] of limit %s", quote(limit))
}

// writeKey writes a key with a string, an integer or a boolean.
func writeKey(b *strings.Builder, key string, value any) {
	text, err := toml.Marshal(map[string]any{"v": value})
	if err != nil {
		panic(err) // strings, integers and booleans marshal
	}
	b.WriteString(key + strings.TrimPrefix(string(text), "v"))
}
