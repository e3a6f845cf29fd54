package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
)

// TestRevisions_Write keeps ten, each once and the newest first, whatever the clock is and whatever else is in the folder.
func TestRevisions_Write(t *testing.T) {
	r := revisions{folder: filepath.Join(t.TempDir(), "kept")}
	at := time.Now()
	write := func(revision string) {
		t.Helper()
		at = at.Add(-time.Hour) // the clock is set back
		if err := r.write(&keptRevision{revision, at, []api.ConfigFile{{Path: "/f.toml", Text: revision}}}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 12 {
		write(fmt.Sprintf("%012x", i))
	}
	for i := range 20 {
		if err := os.WriteFile(filepath.Join(r.folder, fmt.Sprintf("zz%d.json", i)), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("000000000005")
	write("00000000000f")
	kept, err := r.read()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, k := range kept {
		got = append(got, strings.TrimLeft(k.Revision, "0"))
	}
	if want := "f 5 b a 9 8 7 6 4 3"; strings.Join(got, " ") != want {
		t.Errorf("%v, want %s", got, want)
	}

	for revision, want := range map[string]string{"": "f.toml", "0000": "10 revisions begin with", "000000000003": "revision 000000000003: ", "77": `unknown revision "77"`} {
		if _, err := find(kept, revision, "00000000000f"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", revision, err, want)
		}
	}
}
