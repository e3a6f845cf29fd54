package testutil

import (
	"bytes"
	"strings"
	"sync"
	"testing"
)

// A Buffer keeps the first MiB that is written to it: the output of a program, or a log. It is
// safe for concurrent use.
type Buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if room := 1<<20 - b.buf.Len(); room > 0 {
		b.buf.Write(p[:min(len(p), room)])
	}
	return len(p), nil
}

func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// WaitFor waits until the buffer contains a text.
func (b *Buffer) WaitFor(t testing.TB, text string) {
	t.Helper()
	if !poll(func() bool { return strings.Contains(b.String(), text) }) {
		t.Fatalf("%q is not in:\n%s", text, b)
	}
}
