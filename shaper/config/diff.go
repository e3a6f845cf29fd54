package config

import (
	"slices"
	"strings"
)

// A Change is a table that differs between two configurations, in the words of [Config.WriteText].
type Change struct {
	Table   string      `json:"table"` // such as "limit per-source"
	Added   bool        `json:"added,omitempty"`
	Removed bool        `json:"removed,omitempty"`
	Keys    []KeyChange `json:"keys"`
}

// KeyChange is a key with another value. A value is "" where the table does not have the key.
type KeyChange struct {
	Key string `json:"key"`
	Old string `json:"old"`
	New string `json:"new"`
}

// Diff returns the tables of b that are others in a, in the order of b, and then those that are only in a. The order of tables
// makes no difference.
func Diff(a, b *Config) (all []Change) {
	was, is := a.sections(), b.sections()
	for _, s := range is {
		if i := slices.IndexFunc(was, s.isSameTable); i < 0 {
			all = append(all, Change{Table: s.name, Added: true, Keys: diffKeys(nil, s.keys)})
		} else if keys := diffKeys(was[i].keys, s.keys); len(keys) > 0 {
			all = append(all, Change{Table: s.name, Keys: keys})
		}
	}
	for _, s := range was {
		if !slices.ContainsFunc(is, s.isSameTable) {
			all = append(all, Change{Table: s.name, Removed: true, Keys: diffKeys(s.keys, nil)})
		}
	}
	return all
}

// isSameTable reports whether s and t are about the same: a limit has an override for each schedule.
func (s section) isSameTable(t section) bool {
	return s.name == t.name && (!strings.HasPrefix(s.name, overrideSection) || s.keys[0] == t.keys[0])
}

func diffKeys(was, is []setting) (all []KeyChange) {
	find := func(keys []setting, name string) string {
		if i := slices.IndexFunc(keys, func(s setting) bool { return s.key == name }); i >= 0 {
			return keys[i].value
		}
		return ""
	}
	for _, s := range is {
		if old := find(was, s.key); old != s.value {
			all = append(all, KeyChange{s.key, old, s.value})
		}
	}
	for _, s := range was {
		if find(is, s.key) == "" {
			all = append(all, KeyChange{s.key, s.value, ""})
		}
	}
	return all
}
