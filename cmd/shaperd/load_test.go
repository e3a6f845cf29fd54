package main

import (
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTCPListeners(t *testing.T) {
	l, err := load(writeConfig(t, filepath.Join(t.TempDir(), "shaperd.toml"), `
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
`))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"0.0.0.0:80", "[::]:8000", "[::]:8001"}
	var got []string
	for _, at := range l.tcpListeners() {
		got = append(got, at.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
