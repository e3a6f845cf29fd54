package docs

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestPictures checks that each picture is small, that a document shows it, and that a web page can
// show the drawings as images: they are well-formed and run nothing.
func TestPictures(t *testing.T) {
	all := documents(t)
	var files []string
	for _, pattern := range []string{"*.svg", "*.png"} {
		matches, err := filepath.Glob(filepath.Join(root, "docs", pattern))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, matches...)
	}
	if len(files) < 2 {
		t.Fatalf("found only %d pictures", len(files))
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if len(content) > 150_000 {
			t.Errorf("%s has %d bytes, more than 150 kB", file, len(content))
		}
		shown := false
		for _, d := range all {
			shown = shown || strings.Contains(d.text, filepath.Base(file)+")")
		}
		if !shown {
			t.Errorf("no document shows %s", file)
		}
		if filepath.Ext(file) == ".svg" {
			if err := checkDrawing(content); err != nil {
				t.Errorf("%s: %v", file, err)
			}
		}
	}
}

// checkDrawing returns an error if a drawing is not well-formed, runs a script, or loads something.
func checkDrawing(content []byte) error {
	dec := xml.NewDecoder(strings.NewReader(string(content)))
	for {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		element, isStart := token.(xml.StartElement)
		if !isStart {
			continue
		}
		if name := element.Name.Local; name == "script" || name == "foreignObject" {
			return errors.New("it has an element " + name)
		}
		for _, a := range element.Attr {
			if name := strings.ToLower(a.Name.Local); strings.HasPrefix(name, "on") || name == "href" && !strings.HasPrefix(a.Value, "#") {
				return errors.New("it has the attribute " + name + "=" + a.Value)
			}
		}
	}
}

func TestCheckDrawing(t *testing.T) {
	for text, want := range map[string]string{
		`<svg><defs><g id="a"/></defs><use href="#a"/></svg>`: "",
		`<svg><script>x</script></svg>`:                       "it has an element script",
		`<svg onload="x"/>`:                                   "it has the attribute onload=x",
		`<svg><use href="https://example.org/#a"/></svg>`:     "it has the attribute href=https://example.org/#a",
		`<svg><g></svg>`:                                      "XML syntax error on line 1: element <g> closed by </svg>",
	} {
		got := ""
		if err := checkDrawing([]byte(text)); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: error %q, want %q", text, got, want)
		}
	}
}

// The README is one screen: all else is in docs.
func TestFrontPage(t *testing.T) {
	text := documents(t)["README.md"]
	if n := strings.Count(text.whole, "\n"); n > 80 {
		t.Errorf("README.md has %d lines, more than 80", n)
	}
	words := strings.Fields(link.ReplaceAllString(text.text, "]"))
	if len(words) > 500 {
		t.Errorf("README.md has %d words without the configuration, more than 500", len(words))
	}
}
