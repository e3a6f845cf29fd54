package cluster

import (
	"math"
	"testing"
)

// A host that waits for more knows when it calls again, so that it need not look all the time.
func TestRetry_Next(t *testing.T) {
	var r Retry
	const interval = 100 * Millisecond
	r.Due(0, interval, true, false) // it waits, and the ledger has what it should get
	now := Time(0)
	for range 20 {
		next := r.Next()
		if r.Due(next-1, interval, true, true) || !r.Due(next, interval, true, true) {
			t.Fatalf("at %v: not due at %v", now, next)
		}
		now = next
	}
	if gap := r.Next() - now; gap != interval {
		t.Errorf("after 20 calls it calls every %v", gap)
	}
	if r.Due(r.Next(), interval, false, false) || r.Next() != math.MaxInt64 {
		t.Error("a host that waits for nothing calls")
	}
}
