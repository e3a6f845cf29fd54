package config

import (
	"fmt"
	"slices"
)

// renamed maps keys of earlier versions to the current ones, by TOML table.
var renamed = map[string]map[string]string{
	"[daemon]":     {"page": "dashboard", "buckets": "max_buckets", "pins": "pin_path"},
	"[[listen]]":   {"idle_timeout": "udp_idle_timeout"},
	"downstream":   {"to": "address", "connections": "max_connections"},
	"[[attach]]":   {"idle_timeout": "tcp_idle_timeout"},
	"[[limit]]":    renamedInLimit,
	"[[override]]": renamedInLimit,
}

var renamedInLimit = map[string]string{
	"connections": "max_connections",
	"max_wait":    "queue_timeout",
	"max_waiting": "max_queue",
	"excess":      "refuse_with",
	"share":       "scheduling",
}

// withMode has the tables in which observe replaces the key mode, or in an attachment one of
// its values.
var withMode = []string{"[daemon]", "[[attach]]", "[[limit]]", "[[override]]"}

// migration is the replacement of a key of an earlier version.
type migration struct {
	key   string // "" if there is none
	value any
	msg   string
}

// migrate returns the replacement of a key with a value in a table, if it is of an earlier
// version.
func migrate(table, key string, value any) (m migration, old bool) {
	if _, is := value.(bool); is && table == "[[limit]]" && key == "share" {
		return m, false // shared is meant
	}
	if name, ok := renamed[table][key]; ok {
		return migration{name, value, fmt.Sprintf("%s was renamed to %s", key, name)}, true
	}
	if key != "mode" || !slices.Contains(withMode, table) {
		return m, false
	}
	attach := table == "[[attach]]"
	switch {
	case value == "observe":
		return migration{"observe", true, `mode = "observe" is now observe = true`}, true
	case value == "enforce" && !attach:
		return migration{"observe", false, `mode = "enforce" is now observe = false`}, true
	}
	return migration{msg: "mode was replaced by observe, which is true or false"}, !attach
}

// migrate reports keys of earlier versions, and sets their replacements, so that each yields
// a single error.
func (t table) migrate() {
	var old []string
	for key, value := range t.values {
		if _, ok := migrate(t.name, key, value); ok {
			old = append(old, key)
		}
	}
	slices.Sort(old)
	for _, key := range old {
		m, _ := migrate(t.name, key, t.values[key])
		at := t.at.child(key)
		t.add(at, t.label()+": "+m.msg)
		delete(t.values, key)
		if m.key == "" || t.has(m.key) {
			continue
		}
		t.values[m.key] = m.value
		if at != t.at {
			at.migrated = true
			t.at.keys[m.key] = at
			delete(t.at.keys, key)
		}
	}
}

// label returns the name of a table for messages: limit "db" for [[limit]].
func (t table) label() string {
	kind, key := map[string]string{"[[listen]]": "listen", "[[attach]]": "attach", "[[limit]]": "limit"}[t.name], "name"
	if t.name == "[[override]]" {
		kind, key = "override of limit", "limit"
	}
	if name, ok := t.values[key].(string); ok && kind != "" {
		return kind + " " + quote(name)
	}
	return t.name
}

// RenamedInLimit returns the current name of a limit's key of an earlier version, or "".
func RenamedInLimit(key string) string {
	if key == "mode" {
		return "observe"
	}
	return renamedInLimit[key]
}

// MigrateOverride returns the replacement of a key and value of an [[override]], as
// [FormatOverride] takes them, and whether they are of an earlier version. Without a
// replacement it returns its arguments.
func MigrateOverride(key, value string) (newKey, newValue string, migrated bool) {
	m, _ := migrate("[[override]]", key, value)
	if m.key == "" {
		return key, value, false
	}
	return m.key, fmt.Sprint(m.value), true
}
