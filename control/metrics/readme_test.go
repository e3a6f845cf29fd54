package metrics_test

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	tableRow = regexp.MustCompile("(?m)^\\| (`shaperd_[^|]*) \\| ([^|]*)\\|")
	span     = regexp.MustCompile("`([a-z_]+)`")
)

// The table of the README has every metric, and no other, with its labels. A name that begins with
// "_" continues the name before it in its row, after one of its words. Labels in parentheses are
// those of some metrics of the row.
func TestREADME_ListsMetrics(t *testing.T) {
	exported := map[string]exported{}
	for name, m := range parse(scraped(t)) {
		if strings.HasPrefix(name, "shaperd_") {
			exported[name] = m
		}
	}
	if n := strings.Count(readText(t, "descs.go"), " desc(\""); n != len(exported) {
		t.Fatalf("%d metrics are described, and a scrape has %d", n, len(exported))
	}
	listed := map[string]bool{}
	for _, row := range tableRow.FindAllStringSubmatch(readText(t, "../../README.md"), -1) {
		some, first := map[string]bool{}, ""
		for _, s := range span.FindAllStringSubmatch(row[1], -1) {
			name := s[1]
			if strings.HasPrefix(name, "_") {
				name = continued(exported, first, name)
			} else {
				first = name
			}
			m, known := exported[name]
			if !known || listed[name] {
				t.Errorf("README.md lists %s (%s), which is unknown or listed above", s[1], first)
				continue
			}
			listed[name] = true
			for label := range m.labels {
				if label != "le" { // of histograms
					some[label] = true
				}
			}
			for _, label := range words(regexp.MustCompile(`\(.*\)`).ReplaceAllString(row[2], "")) {
				if m.labels[label] == nil {
					t.Errorf("README.md: %s has no label %s", name, label)
				}
			}
		}
		if got, want := words(row[2]), slices.Sorted(maps.Keys(some)); !slices.Equal(got, want) {
			t.Errorf("README.md: the labels at %s are %v, want %v", row[1], got, want)
		}
	}
	for name := range exported {
		if !listed[name] {
			t.Errorf("README.md does not list %s", name)
		}
	}
}

// continued returns the longest metric that is some words of name, and then suffix.
func continued(metrics map[string]exported, name, suffix string) string {
	for {
		if _, known := metrics[name+suffix]; known {
			return name + suffix
		}
		i := strings.LastIndexByte(name, '_')
		if i < 0 {
			return suffix
		}
		name = name[:i]
	}
}

// words returns the labels of a cell, sorted.
func words(cell string) []string {
	all := strings.FieldsFunc(cell, func(r rune) bool { return strings.ContainsRune(" ,()", r) })
	slices.Sort(all)
	return all
}
