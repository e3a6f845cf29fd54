package metrics_test

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"shaperd.dev/shaperd/shaper"
)

var (
	tableRow = regexp.MustCompile("(?m)^\\| (`shaperd_[^|]*) \\| ([^|]*)\\|")
	span     = regexp.MustCompile("`([a-z_]+)`")
)

// The table of docs/metrics.md has every metric, and no other, with its labels. A name that begins with
// "_" continues the name before it in its row, after one of its words. Labels in parentheses are
// those of some metrics of the row.
func TestDocument_ListsMetrics(t *testing.T) {
	exported := map[string]exported{}
	for name, m := range parse(scraped(t)) {
		if strings.HasPrefix(name, "shaperd_") {
			exported[name] = m
		}
	}
	if n := strings.Count(readText(t, "descs.go"), " desc(\""); n != len(exported) {
		t.Fatalf("%d metrics are described, and a scrape has %d", n, len(exported))
	}
	document := readText(t, "../../docs/metrics.md")
	listed := map[string]bool{}
	for _, row := range tableRow.FindAllStringSubmatch(document, -1) {
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
				t.Errorf("docs/metrics.md lists %s (%s), which is unknown or listed above", s[1], first)
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
					t.Errorf("docs/metrics.md: %s has no label %s", name, label)
				}
			}
		}
		if got, want := words(row[2]), slices.Sorted(maps.Keys(some)); !slices.Equal(got, want) {
			t.Errorf("docs/metrics.md: the labels at %s are %v, want %v", row[1], got, want)
		}
	}
	for name := range exported {
		if !listed[name] {
			t.Errorf("docs/metrics.md does not list %s", name)
		}
	}
}

// The tables of reasons have every reason and every ending of a connection, and no other.
func TestDocument_ListsReasons(t *testing.T) {
	var reasons, endings []string
	for r := range shaper.NumReasons {
		if r := shaper.Reason(r); r != shaper.None {
			reasons = append(reasons, r.String())
		}
	}
	for e := range shaper.NumEndings {
		endings = append(endings, shaper.Ending(e).String())
	}
	parts := strings.Split(readText(t, "../../docs/metrics.md"), "| Reason | |\n")
	if len(parts) != 3 {
		t.Fatalf("docs/metrics.md has %d tables of reasons", len(parts)-1)
	}
	for i, want := range [][]string{reasons, endings} {
		var got []string
		for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]*) \\|").FindAllStringSubmatch(parts[i+1], -1) {
			for _, s := range regexp.MustCompile("`([a-z-]+)`").FindAllStringSubmatch(row[1], -1) {
				got = append(got, s[1])
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("table %d of docs/metrics.md has %q, want %q", i+1, got, want)
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
