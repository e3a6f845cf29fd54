package control

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// socketPath returns a path for a socket in a folder of its own, which everybody may enter.
func socketPath(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "shaperd") // a socket's path is 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "control.sock")
}

// firstEvent returns the data of the first event of a stream.
func firstEvent(t *testing.T, r io.Reader) []byte {
	t.Helper()
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			t.Fatal(err)
		}
		if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
			return data
		}
	}
}
