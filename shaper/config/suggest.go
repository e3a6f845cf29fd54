package config

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
)

// suggestions returns the keys of t that an unknown key may mean.
func (t table) suggestions(key string) []string {
	known := t.keys.names()
	words := synonyms[t.name]
	if strings.HasPrefix(t.name, "for.") {
		words = synonymsInLimit
	}
	if keys := filterKnown(words[normalized(key)], known); len(keys) > 0 {
		return keys
	}
	if near := Nearest(key, known); near != "" {
		return []string{near}
	}
	if t.name == "[[override]]" && slices.Contains(limitKeys.names(), key) {
		return nil // it cannot be overridden
	}
	old := slices.Sorted(maps.Keys(renamed[t.name]))
	if now := renamed[t.name][Nearest(key, old)]; now != "" {
		return []string{now}
	}
	return nil
}

// normalized returns a key in the spelling of synonyms.
func normalized(key string) string { return strings.ReplaceAll(strings.ToLower(key), "-", "_") }

// filterKnown returns the known ones of keys. A dotted key is known if its table is.
func filterKnown(keys, known []string) (some []string) {
	for _, key := range keys {
		table, _, _ := strings.Cut(key, ".")
		if slices.Contains(known, table) {
			some = append(some, key)
		}
	}
	return some
}

// quotedAlternatives joins names as in: "a", "b" or "c".
func quotedAlternatives(names []string) string {
	return strings.ReplaceAll(alternatives(names), "`", "")
}

// didYouMean returns the suggestion of names for a message, if there are any.
func didYouMean(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return "; did you mean " + quotedAlternatives(names) + "?"
}

// unknownValue returns the message that s is not one of names, of which words has synonyms.
func unknownValue(s string, names []string, words map[string][]string) string {
	meant := filterKnown(words[strings.ToLower(s)], names)
	if near := Nearest(s, names); len(meant) == 0 && near != "" {
		meant = []string{near}
	}
	return fmt.Sprintf("must be %s, not %s", quotedAlternatives(names), quote(s)) + didYouMean(meant)
}

// unknownKey returns the message that key is not one of known, of which words has synonyms.
func unknownKey(key string, known []string, words map[string][]string) string {
	meant := filterKnown(words[normalized(key)], known)
	if near := Nearest(key, known); len(meant) == 0 && near != "" {
		meant = []string{near}
	}
	if len(meant) == 0 {
		return fmt.Sprintf("unknown key %s; known here: %s", quote(key), strings.Join(known, ", "))
	}
	return fmt.Sprintf("unknown key %s", quote(key)) + didYouMean(meant)
}

// Nearest returns the name that s is most likely a misspelling of, or "" if it resembles
// none.
func Nearest(s string, names []string) string {
	s = strings.ToLower(s)
	best, least := "", 0
	for _, name := range names { // a name that is a whole word of s: "rate" of "rate_limit"
		word := strings.ToLower(name)
		if (strings.HasSuffix(s, "_"+word) || strings.HasPrefix(s, word+"_")) && len(word) > len(best) {
			best = name
		}
	}
	if best != "" {
		return best
	}
	for _, name := range names {
		d := distance(strings.ToLower(s), strings.ToLower(name))
		if d <= 1+len(name)/4 && (best == "" || d < least) {
			best, least = name, d
		}
	}
	if letters := stripSeparators(s); best == "" && len(letters) >= 4 { // a name that begins with s: "leastconn"
		for _, name := range names {
			if strings.HasPrefix(stripSeparators(strings.ToLower(name)), letters) {
				return name
			}
		}
	}
	return best
}

func stripSeparators(s string) string { return strings.NewReplacer("-", "", "_", "").Replace(s) }

// distance returns the number of insertions, deletions, substitutions and transpositions of
// neighbors that turn a into b (optimal string alignment).
func distance(a, b string) int {
	if max(len(a), len(b)) > 64 {
		return math.MaxInt
	}
	var before, last, row [65]int
	for j := range len(b) + 1 {
		last[j] = j
	}
	for i := range len(a) {
		row[0] = i + 1
		for j := range len(b) {
			d := last[j]
			if a[i] != b[j] {
				d++
			}
			d = min(d, row[j]+1, last[j+1]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				d = min(d, before[j-1]+1)
			}
			row[j+1] = d
		}
		before, last = last, row
	}
	return last[len(b)]
}
