// Package docs holds the documents to the repository that they speak of.
package docs

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// A document is a file of Markdown.
type document struct {
	text    string // without blocks of code
	whole   string
	anchors []string // of its headings
}

var (
	fence    = regexp.MustCompile("(?ms)^```.*?^```$")
	indented = regexp.MustCompile(`(?m)^(    |\t).*$`)
	code     = regexp.MustCompile("`[^`\n]+`")
	heading  = regexp.MustCompile(`(?m)^#+ (.+)$`)
	link     = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	dropped  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	path     = regexp.MustCompile(`^(bpf|cmd|configs|conn|control|docs|leaky|scripts|shaper|systemd|test)(/[\w.-]+)+$`)
	metric   = regexp.MustCompile(`\bshaperd_[a-z_]+[a-z]\b`)
	defined  = regexp.MustCompile(`\bdesc\("(\w+)"`)
)

// documents reads all documents, by their paths from the root.
func documents(t *testing.T) map[string]document {
	t.Helper()
	all := map[string]document{}
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			name, err := filepath.Rel(root, file)
			if err != nil {
				t.Fatal(err)
			}
			all[name] = parse(string(text))
		}
	}
	if len(all) < 2 {
		t.Fatalf("there are %d documents", len(all))
	}
	return all
}

func parse(text string) document {
	d := document{whole: text, text: indented.ReplaceAllString(fence.ReplaceAllString(text, ""), "")}
	for _, m := range heading.FindAllStringSubmatch(d.text, -1) {
		d.anchors = append(d.anchors, anchor(m[1]))
	}
	return d
}

// anchor is what a page of a heading's text is linked by, as GitHub makes it.
func anchor(heading string) string {
	return strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(heading), ""), " ", "-")
}

// broken returns the links of the document called name that lead nowhere. there says
// whether a file is.
func broken(all map[string]document, name string, there func(string) bool) (bad []string) {
	for _, m := range link.FindAllStringSubmatch(code.ReplaceAllString(all[name].text, "x"), -1) {
		to, fragment, _ := strings.Cut(m[1], "#")
		if strings.Contains(to, "://") {
			continue
		}
		file := name
		if to != "" {
			file = filepath.Join(filepath.Dir(name), to)
		}
		target, is := all[file]
		switch {
		case !is && !there(file), is && fragment != "" && !slices.Contains(target.anchors, fragment):
			bad = append(bad, m[1])
		}
	}
	return bad
}

func exists(file string) bool {
	_, err := os.Stat(filepath.Join(root, file))
	return err == nil
}

// TestLinks follows relative links, and their anchors.
func TestLinks(t *testing.T) {
	all := documents(t)
	for name := range all {
		for _, l := range broken(all, name, exists) {
			t.Errorf("%s: %q leads nowhere", name, l)
		}
	}
}

func TestBroken(t *testing.T) {
	all := map[string]document{
		"README.md": parse("# One\n[a](docs/a.md) [b](docs/b.md) [c](docs/a.md#what-it-takes) [d](docs/a.md#gone)\n" +
			"[e](#one) [f](#two) [g](https://example.org/x) `[h](gone)` ![i](docs/i.svg)\n\n    [j](gone)\n```\n[k](gone)\n```\n"),
		"docs/a.md": parse("## What it takes\n[l](../README.md#one) [m](a.md)\n"),
	}
	there := func(file string) bool { return file == "docs/i.svg" }
	if got, want := broken(all, "README.md", there), []string{"docs/b.md", "docs/a.md#gone", "#two"}; !slices.Equal(got, want) {
		t.Errorf("broken are %q, want %q", got, want)
	}
	if got := broken(all, "docs/a.md", there); got != nil {
		t.Errorf("broken are %q, want none", got)
	}
	if got, want := anchor("The clock, and late wake-ups: `a_b`"), "the-clock-and-late-wake-ups-a_b"; got != want {
		t.Errorf("the anchor is %q, want %q", got, want)
	}
}

// TestFiles looks for the files of this repository that documents name.
func TestFiles(t *testing.T) {
	named := 0
	for name, d := range documents(t) {
		for _, span := range code.FindAllString(d.text, -1) {
			if span = strings.Trim(span, "`"); !path.MatchString(span) {
				continue
			}
			if named++; !exists(span) {
				t.Errorf("%s names %s, which there is not", name, span)
			}
		}
	}
	if named == 0 {
		t.Error("no document names a file")
	}
}

// TestMetrics looks for the metrics that documents name.
func TestMetrics(t *testing.T) {
	source, err := os.ReadFile(filepath.Join(root, "control/collector.go"))
	if err != nil {
		t.Fatal(err)
	}
	var known []string
	for _, m := range defined.FindAllSubmatch(source, -1) {
		known = append(known, "shaperd_"+string(bytes.TrimSpace(m[1])))
	}
	for name, d := range documents(t) {
		for _, m := range metric.FindAllString(d.whole, -1) {
			base := regexp.MustCompile(`_(bucket|count|sum)$`).ReplaceAllString(m, "")
			if !slices.Contains(known, m) && !slices.Contains(known, base) {
				t.Errorf("%s names the metric %s, which there is not", name, m)
			}
		}
	}
}
