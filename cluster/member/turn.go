package member

import (
	"math/rand/v2"

	"shaperd.dev/shaperd/cluster"
)

// turn decides when a host leaves a slot to others. The ledger divides a pool into parts, and of a slot each of
// several hosts may get a fraction, which none can use. A host that has one for a while wants only whole slots,
// so that another one gets the rest, and later wants more again. It does so at once if it has had the slot: then
// it is the turn of another host.
type turn struct {
	had     int64        // parts, when last seen
	lost    bool         // it had more before
	leaveAt cluster.Time // when it leaves the fraction to others; 0 if it has none
	backAt  cluster.Time // when it wants more again
}

const (
	leaveAfter = 200 * cluster.Millisecond // and up to twice that, so that not all hosts do at the same time
	backAfter  = 500 * cluster.Millisecond // and up to three times that
)

// away reports whether the host wants only whole slots now.
func (t *turn) away(now cluster.Time) bool { return now < t.backAt }

// next takes in that the host has so many parts, and whether some of them are a fraction of a slot that it would
// use. It reports whether the host begins or ceases to leave that to others.
func (t *turn) next(now cluster.Time, parts int64, fraction bool) (changed bool) {
	t.lost = parts < t.had || t.lost && parts == t.had
	t.had = parts
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
	t.backAt = now + backAfter + cluster.Time(rand.Int64N(2*int64(backAfter)))
	return true
}
