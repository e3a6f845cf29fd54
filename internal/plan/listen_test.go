package plan

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTCPListeners(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shaperd.toml")
	if err := os.WriteFile(path, []byte(`
[[listen]]
name = "a"
address = ["tcp://0.0.0.0:80", "udp://0.0.0.0:53"]
downstream = ["192.0.2.1"]

[[listen]]
name = "b"
address = ["tcp://[::]:8000-8001"]
downstream = ["192.0.2.1"]

[[limit]]
name = "l"
rate = "1MB/s"
`), 0o644); err != nil {
		t.Fatal(err)
	}
	p, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"0.0.0.0:80", "[::]:8000", "[::]:8001"}
	var got []string
	for _, at := range p.TCPListeners() {
		got = append(got, at.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
