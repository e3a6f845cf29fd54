// Package docs checks that the documents match the repository.
package docs

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// A document is a Markdown file.
type document struct {
	text    string // without code blocks
	whole   string
	anchors []string // of the headings
}

var (
	fence    = regexp.MustCompile("(?ms)^```.*?^```$")
	indented = regexp.MustCompile(`(?m)^(    |\t).*$`)
	code     = regexp.MustCompile("`[^`\n]+`")
	heading  = regexp.MustCompile(`(?m)^#+ (.+)$`)
	link     = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	dropped  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	path     = regexp.MustCompile(`^(api|bpf|cmd|configs|conn|control|debian|docs|leaky|packaging|scripts|shaper|systemd|test)(/[\w.-]+)+$`)
	metric   = regexp.MustCompile(`\bshaperd_[a-z_]+[a-z]\b`)
	pageName = regexp.MustCompile(`\bdocs/[\w/-]+\.md\b`)
	defined  = regexp.MustCompile(`\bdesc\("(\w+)"`)
)

// documents reads all documents of the repository, keyed by path relative to it.
func documents(t *testing.T) map[string]document {
	t.Helper()
	return documentsIn(t, root)
}

func documentsIn(t *testing.T, root string) map[string]document {
	t.Helper()
	all := map[string]document{}
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md"} {
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
		t.Fatalf("found only %d documents", len(all))
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

// anchor returns the link anchor of a heading, as GitHub generates it.
func anchor(heading string) string {
	return strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(heading), ""), " ", "-")
}

// brokenLinks returns the links of the document called name whose target does not exist.
// isFile reports whether a file exists.
func brokenLinks(all map[string]document, name string, isFile func(string) bool) (bad []string) {
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
		case !is && !isFile(file), is && fragment != "" && !slices.Contains(target.anchors, fragment):
			bad = append(bad, m[1])
		}
	}
	return bad
}

func exists(file string) bool { return existsIn(root)(file) }

func existsIn(root string) func(file string) bool {
	return func(file string) bool {
		_, err := os.Stat(filepath.Join(root, file))
		return err == nil
	}
}

// TestLinks checks relative links and their anchors.
func TestLinks(t *testing.T) {
	all := documents(t)
	for name := range all {
		for _, l := range brokenLinks(all, name, exists) {
			t.Errorf("%s: broken link %q", name, l)
		}
	}
}

// TestReachable checks that two links lead from the README to each document.
func TestReachable(t *testing.T) {
	all := documents(t)
	const clicks = 2
	reached := map[string]bool{"README.md": true}
	last := []string{"README.md"}
	for range clicks {
		var next []string
		for _, name := range last {
			for _, file := range linksOf(all, name) {
				if !reached[file] {
					reached[file] = true
					next = append(next, file)
				}
			}
		}
		last = next
	}
	for name := range all {
		if !reached[name] && name != "CHANGELOG.md" {
			t.Errorf("%s cannot be reached from the README with %d links", name, clicks)
		}
	}
}

// linksOf returns the documents that the document called name links to.
func linksOf(all map[string]document, name string) (files []string) {
	for _, m := range link.FindAllStringSubmatch(all[name].text, -1) {
		to, _, _ := strings.Cut(m[1], "#")
		if file := filepath.Join(filepath.Dir(name), to); to != "" && all[file].whole != "" {
			files = append(files, file)
		}
	}
	return files
}

// TestLinks_Installed checks the links of the pages that packages contain, and the pages that comments of the examples
// and units name.
func TestLinks_Installed(t *testing.T) {
	dir := t.TempDir()
	install := exec.Command("make", "-s", "install-docs", "DESTDIR="+dir)
	install.Dir = root
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	doc := filepath.Join(dir, "usr/share/doc/shaperd")
	all := documentsIn(t, doc)
	if want := len(documents(t)) - 1; len(all) != want {
		t.Errorf("%d pages are installed, want %d: all but CONTRIBUTING.md", len(all), want)
	}
	for name := range all {
		for _, l := range brokenLinks(all, name, existsIn(doc)) {
			t.Errorf("%s: broken link %q", name, l)
		}
	}
	named := 0
	for _, pattern := range []string{filepath.Join(root, "systemd/*.*"), filepath.Join(doc, "examples/*"), filepath.Join(doc, "examples/*/*")} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				continue // a directory
			}
			for _, page := range pageName.FindAllString(string(text), -1) {
				if named++; !existsIn(doc)(page) {
					t.Errorf("%s names %s, which is not installed", file, page)
				}
			}
		}
	}
	if named == 0 {
		t.Error("no example names a page")
	}
}

func TestBrokenLinks(t *testing.T) {
	all := map[string]document{
		"README.md": parse("# One\n[a](docs/a.md) [b](docs/b.md) [c](docs/a.md#what-it-takes) [d](docs/a.md#gone)\n" +
			"[e](#one) [f](#two) [g](https://example.org/x) `[h](gone)` ![i](docs/i.svg)\n\n    [j](gone)\n```\n[k](gone)\n```\n"),
		"docs/a.md": parse("## What it takes\n[l](../README.md#one) [m](a.md)\n"),
	}
	isFile := func(file string) bool { return file == "docs/i.svg" }
	if got, want := brokenLinks(all, "README.md", isFile), []string{"docs/b.md", "docs/a.md#gone", "#two"}; !slices.Equal(got, want) {
		t.Errorf("broken links %q, want %q", got, want)
	}
	if got := brokenLinks(all, "docs/a.md", isFile); got != nil {
		t.Errorf("broken links %q, want none", got)
	}
	if got, want := anchor("The clock, and late wake-ups: `a_b`"), "the-clock-and-late-wake-ups-a_b"; got != want {
		t.Errorf("the anchor is %q, want %q", got, want)
	}
}

// TestFiles checks that the repository files named in documents exist.
func TestFiles(t *testing.T) {
	named := 0
	for name, d := range documents(t) {
		for _, span := range code.FindAllString(d.text, -1) {
			if span = strings.Trim(span, "`"); !path.MatchString(span) {
				continue
			}
			if named++; !exists(span) {
				t.Errorf("%s names %s, which does not exist", name, span)
			}
		}
	}
	if named == 0 {
		t.Error("no document names a file")
	}
}

// TestMetrics checks that the metrics named in documents exist.
func TestMetrics(t *testing.T) {
	source, err := os.ReadFile(filepath.Join(root, "control/metrics/descs.go"))
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
				t.Errorf("%s names the metric %s, which does not exist", name, m)
			}
		}
	}
}
