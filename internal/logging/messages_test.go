package logging

import (
	"bytes"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const root = "../.."

// TestMessageIDs checks that each text with an ID is one that the daemon logs.
func TestMessageIDs(t *testing.T) {
	source := readSource(t)
	for text, id := range messageIDs {
		if !regexp.MustCompile(`"` + regexp.QuoteMeta(text) + `[":;]`).Match(source) {
			t.Errorf("nothing logs %q", text)
		}
		if !regexp.MustCompile(`^[0-9a-f]{32}$`).MatchString(id) || messageID(text+": x; y (repeated)") != id {
			t.Errorf("the ID of %q is %q", text, id)
		}
	}
	if n := len(slices.Compact(slices.Sorted(maps.Values(messageIDs)))); n != len(messageIDs) {
		t.Error("a duplicate ID")
	}
	if id := messageID("readying"); id != "" {
		t.Errorf("a text without an ID has %q", id)
	}
}

// readSource returns the source of the packages that log, without tests and this package.
func readSource(t *testing.T) []byte {
	t.Helper()
	var all bytes.Buffer
	for _, folder := range []string{"conn", "bpf", "control", "cluster", "internal"} {
		if err := filepath.WalkDir(filepath.Join(root, folder), func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, "messages.go") {
				return err
			}
			text, err := os.ReadFile(path)
			all.Write(text)
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	return all.Bytes()
}

// TestCatalog checks that journalctl accepts the catalog, that it has each ID and no other, and that
// the fields and manual pages that it names exist.
func TestCatalog(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "systemd/shaperd.catalog"))
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	if err := os.MkdirAll(filepath.Join(folder, "usr/lib/systemd/catalog"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "usr/lib/systemd/catalog/shaperd.catalog"), text, 0o644); err != nil {
		t.Fatal(err)
	}
	journalctl := func(args ...string) string {
		out, err := exec.Command("journalctl", append([]string{"--root", folder}, args...)...).CombinedOutput()
		if err != nil {
			t.Errorf("journalctl %q: %v\n%s", args, err, out)
		}
		return string(out)
	}
	if out := journalctl("--update-catalog"); out != "" {
		t.Errorf("update-catalog: %s", out)
	}
	var ids []string
	for _, line := range strings.Split(strings.TrimSpace(journalctl("--list-catalog")), "\n") {
		id, subject, _ := strings.Cut(line, " ")
		if ids = append(ids, id); !strings.HasPrefix(subject, "shaperd: ") || len(subject) < 20 {
			t.Errorf("subject %q", subject)
		}
	}
	if d := cmp.Diff(slices.Sorted(maps.Values(messageIDs)), slices.Sorted(slices.Values(ids))); d != "" {
		t.Error(d)
	}

	source := readSource(t)
	for _, m := range regexp.MustCompile(`@SHAPERD_(\w+)@`).FindAllSubmatch(text, -1) {
		if !bytes.Contains(source, []byte(`"`+strings.ToLower(string(m[1]))+`", `)) {
			t.Errorf("nothing logs %s", m[0])
		}
	}
	for _, m := range regexp.MustCompile(`man:shaperd-?(\w*)\(8\)`).FindAllSubmatch(text, -1) {
		if verb := string(m[1]); verb != "" && !bytes.Contains(source, []byte(`"`+verb+`"`)) && !bytes.Contains(source, []byte(`"`+verb+` `)) {
			t.Errorf("there is no manual page %s", m[0])
		}
	}
}
