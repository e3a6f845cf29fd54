package bpf

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// A hot bucket without room has no more than it was given, also when the lease is renewed, until there is room or it is
// cold again.
func TestSetShares_Lacking(t *testing.T) {
	b := newShapedBucket(t, shaper.Limit{})
	for _, i := range b.kernel.hotProbes(b.tag) {
		*b.kernel.hotTag(i) = meterNumber(5, 0)<<tagMeterShift | sharedTag | uint64(i) + 2
	}
	passes := func(at time.Duration) bool {
		_, ok := b.send(at)
		return ok
	}
	b.give(0, 0)
	for at := time.Duration(0); at < 3*time.Second; at += 100 * time.Millisecond {
		if passes(at + 50*time.Millisecond) {
			t.Fatalf("a packet passed at %v", at)
		}
		b.change(at+100*time.Millisecond, 2, shareChange{})
	}
	b.change(3*time.Second, 2, shareChange{cold: []uint64{b.tag}})
	if !passes(3100*time.Millisecond) || len(b.kernel.lacking) != 0 {
		t.Error("nothing passed when the bucket was cold again")
	}
	b.give(3200*time.Millisecond, 0)
	for _, i := range b.kernel.hotProbes(b.tag) {
		*b.kernel.hotTag(i) = 0
	}
	for at := 3300 * time.Millisecond; at < 4500*time.Millisecond; at += 100 * time.Millisecond {
		b.change(at, 2, shareChange{})
	}
	if b.kernel.findHot(b.tag) < 0 || b.kernel.lease().Cold.Parts != shaper.Whole/2 || passes(4500*time.Millisecond) {
		t.Errorf("when there was room, its index was %d, and cold buckets had %d parts", b.kernel.findHot(b.tag), b.kernel.lease().Cold.Parts)
	}
}
