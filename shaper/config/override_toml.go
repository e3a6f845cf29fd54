package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
)

// FormatOverride returns the TOML text of an [[override]] of a limit, with values as in the
// configuration but without quotes: {"rate": "10Mbit/s", "max_connections": "50"}. Errors are
// no values, a key that is not one of [OverrideKeys], and a value that should be an integer
// or a boolean. Mistakes in other values are reported when the text is loaded.
func FormatOverride(limit string, set map[string]string) (string, error) {
	if err := checkOverrideKeys(limit, set); err != nil {
		return "", err
	}
	return formatOverride(limit, set)
}

// formatOverride formats keys that are known, or of an earlier version.
func formatOverride(limit string, set map[string]string) (string, error) {
	var b strings.Builder
	b.WriteString("[[override]]\n")
	writeKey(&b, "limit", limit)
	for _, key := range slices.Sorted(maps.Keys(set)) {
		value, err := parseScalar(key, set[key])
		if err != nil {
			return "", fmt.Errorf("override limit %s: %w", quote(limit), err)
		}
		writeKey(&b, key, value)
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
