package plan

import (
	"os"
	"path/filepath"
	"testing"
)

// The revision depends on what a configuration means, not on how it is written.
func TestRevision(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shaperd.toml")
	revision := func(limit, override string) string {
		t.Helper()
		text := "[[listen]]\nname = \"db\"\naddress = [\"tcp://127.0.0.1:5432\"]\ndownstream = [\"127.0.0.1:9\"]\n[[limit]]\nname = \"l\"\n" + limit +
			"[[override]]\nlimit = \"l\"\nwhen = \"22:00-06:00 UTC\"\n" + override
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		p, err := Load(path)
		if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		return p.Revision()
	}
	was := revision("rate = \"80Mbit/s\"\nmax_connections = 5\n", "rate = \"8Mbit/s\"\nmax_connections = 3\n")
	if is := revision("# ten\nmax_connections = 5\nrate = '10MB/s'\nmax_delay = \"200ms\"\n", "max_connections = 0x3\nrate = \"1MB/s\"\n"); is != was {
		t.Errorf("%s is %s in other words", was, is)
	}
	if is := revision("rate = \"80Mbit/s\"\nmax_connections = 5\n", "rate = \"9Mbit/s\"\nmax_connections = 3\n"); is == was {
		t.Error("another value of an override has the same revision")
	}
}
