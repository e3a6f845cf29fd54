package testutil

import (
	"testing"
	"time"
)

// timeout is how long tests wait for something to happen: far longer than a busy machine needs.
const timeout = 30 * time.Second

// WaitFor waits until ok returns true.
func WaitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	if !poll(ok) {
		t.Fatalf("waited %v: %s", timeout, what)
	}
}

// poll calls ok until it returns true, and reports whether it did in time.
func poll(ok func() bool) bool {
	for end := time.Now().Add(timeout); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}
