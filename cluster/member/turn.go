package member

import (
	"math/rand/v2"

	"shaperd.dev/shaperd/cluster"
)

// turn decides when a host leaves a slot to others. The ledger divides a pool into parts, and of a slot each of
// several hosts may get a fraction, which none can use. A host that has one for a while wants only whole slots,
// so that another one gets the rest, and later wants more again. It does so at once if it has had the slot: then
// it is the turn of another host.
//
// Weights are seldom equal, and the heavier host may have a part that is enough for the slot whenever it wants
// one. So each time that a host which has no slot of the pool leaves without having had one, its weight doubles, until
// it has had it.
type turn struct {
	had     int64        // parts, when last seen
	lost    bool         // it had more before
	leaveAt cluster.Time // when it leaves the fraction to others; 0 if it has none
	backAt  cluster.Time // when it wants more again
	next    int64        // parts with which it has the slot that it waits for; 0 if it does not
	passed  int          // how often it has left without having had that
	got     bool         // it has had that since it left last
}

const (
	leaveAfter = 200 * cluster.Millisecond // and up to twice that, so that not all hosts do at the same time
	backAfter  = 500 * cluster.Millisecond // and up to three times that
	maxPassed  = 16
)

// away reports whether the host wants only whole slots now.
func (t *turn) away(now cluster.Time) bool { return now < t.backAt }

// weight is that of a host at which so many sources wait.
func (t *turn) weight(waiting int) int64 { return max(1, int64(waiting)) << t.passed }

// observe takes in that the host has so many parts, and whether some of them are a fraction of a slot that it would
// use. The slots that it has need fit parts. With next parts it would have one more; that is 0 if nothing waits for it.
// It reports whether the host begins or ceases to leave the fraction to others.
func (t *turn) observe(now cluster.Time, parts, fit, next int64, fraction bool) (changed bool) {
	t.lost = parts < t.had || t.lost && parts == t.had
	t.had = parts
	switch {
	case next == 0 && !t.away(now):
		t.next, t.passed, t.got = 0, 0, false
	case t.next != 0 && parts >= t.next:
		t.next, t.passed, t.got = 0, 0, true
	case fit > 0:
		t.passed = 0
	}
	switch {
	case t.backAt != 0 && !t.away(now):
		t.backAt, t.leaveAt = 0, 0
		return true
	case t.backAt != 0 || !fraction:
		t.leaveAt = 0
		return false
	case t.leaveAt == 0:
		t.leaveAt = now
		if !t.lost {
			t.leaveAt += leaveAfter + cluster.Time(rand.Int64N(int64(leaveAfter)))
		}
	}
	if now < t.leaveAt {
		return false
	}
	if !t.got && fit == 0 {
		t.passed = min(t.passed+1, maxPassed)
	}
	t.next, t.got = next, false
	t.backAt = now + backAfter + cluster.Time(rand.Int64N(2*int64(backAfter)))
	return true
}
