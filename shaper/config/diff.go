package config

import (
	"fmt"
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
	before, after := identities(was), identities(is)
	for n, s := range is {
		if i := slices.Index(before, after[n]); i < 0 {
			all = append(all, Change{Table: s.name, Added: true, Keys: diffKeys(nil, s.keys)})
		} else if keys := diffKeys(was[i].keys, s.keys); len(keys) > 0 {
			all = append(all, Change{Table: s.name, Keys: keys})
		}
	}
	for n, s := range was {
		if !slices.Contains(after, before[n]) {
			all = append(all, Change{Table: s.name, Removed: true, Keys: diffKeys(s.keys, nil)})
		}
	}
	return all
}

// identities returns what makes each table the same one: its name, and of overrides, of which a limit has one for each schedule, when
// they hold, and which of these it is.
func identities(all []section) (ids []string) {
	seen := map[string]int{}
	for _, s := range all {
		id := s.name
		if strings.HasPrefix(id, overrideSection) {
			id += "\n" + s.keys[0].value
		}
		seen[id]++
		ids = append(ids, fmt.Sprint(id, "\n", seen[id]))
	}
	return ids
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
