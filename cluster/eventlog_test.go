package cluster

import (
	"fmt"
	"testing"
)

// TestEventLog_IsBounded has ever more buckets become cold while a host does not say that it knows.
func TestEventLog_IsBounded(t *testing.T) {
	l := newEventLog()
	version := int64(0)
	for i := range maxBuckets + 5000 {
		key := fmt.Sprintf("k%d", i)
		l.addHot(key, version+1)
		l.addCold(key, version+2, 0)
		version += 2
	}
	if len(l.cold) > maxBuckets || len(l.coldVersion) > maxBuckets || len(l.hot) > 2*eventPage || len(l.hotVersion) > 0 {
		t.Errorf("the log has %d and %d cold buckets, %d and %d hot ones", len(l.cold), len(l.coldVersion), len(l.hot), len(l.hotVersion))
	}
	if page := l.after(version - 2); len(page) != 1 || page[0].Version != version {
		t.Errorf("after the last but one: %v", page)
	}
}
