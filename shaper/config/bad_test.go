package config

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the messages in testdata")

// TestLoad_Errors loads a file for each mistake, and compares the messages with the golden file.
func TestLoad_Errors(t *testing.T) {
	paths, err := filepath.Glob("testdata/bad/*.toml")
	if err != nil || len(paths) == 0 {
		t.Fatal("no files: ", err)
	}
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), ".toml")
		t.Run(name, func(t *testing.T) {
			_, err := Load(path)
			var mistakes Errors
			if !errors.As(err, &mistakes) {
				t.Fatalf("error is %v, want Errors", err)
			}
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			checkPlaces(t, string(text), mistakes)
			got := strings.ReplaceAll(mistakes.Error(), filepath.Dir(path)+"/", "") + "\n"
			golden(t, strings.TrimSuffix(path, ".toml")+".err", got)
		})
	}
}

// golden compares got with the file at path.
func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Error("-want +got:\n", diff)
	}
}

// checkPlaces checks that mistakes are in order, in lines that exist.
func checkPlaces(t *testing.T, text string, mistakes Errors) {
	t.Helper()
	lines := strings.Split(strings.TrimPrefix(text, "\ufeff"), "\n")
	var last *Error
	for _, e := range mistakes {
		if e.Msg == "" || e.Line < 1 || e.Line > len(lines) || e.Column < 1 || e.Column > len(lines[e.Line-1])+1 {
			t.Errorf("no such place, or no message: %v", e)
		}
		if last != nil && (e.Line < last.Line || e.Line == last.Line && e.Column < last.Column) {
			t.Errorf("%v is after %v", e, last)
		}
		last = e
	}
}
