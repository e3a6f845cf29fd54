package penalty

import (
	"hash/maphash"
	"net/netip"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// MaxCounted is the number of sources whose refusals a [Book] counts at once: at most countWays of each set.
const MaxCounted = countSets * countWays

const (
	countSets = 1 << 10
	countWays = 10
)

// counts has the numbers of refusals of sources, in a table of fixed size. A source has its place in one of the slots
// of a set. If all are taken, the source with the fewest refusals loses its place: so a crowd must get as many refusals
// each as the source that it is to push out.
type counts struct {
	seed  maphash.Seed
	slots []count // none before the first refusal
}

// count is the number of refusals of a source in a period that began with the first of them.
type count struct {
	source netip.Prefix
	since  time.Duration
	n      uint32 // 0 in a free slot
}

// over reports whether the period of c has ended.
func (c *count) over(y *shaper.Penalty, now time.Duration) bool {
	return now >= c.since+y.After.Per
}

// set returns the slots that a source may be in.
func (t *counts) set(source netip.Prefix) []count {
	if t.slots == nil {
		return nil
	}
	i := maphash.Comparable(t.seed, source) % countSets * countWays
	return t.slots[i : i+countWays]
}

func (t *counts) find(source netip.Prefix) *count {
	set := t.set(source)
	for i := range set {
		if set[i].n > 0 && set[i].source == source {
			return &set[i]
		}
	}
	return nil
}

func (t *counts) forget(source netip.Prefix) {
	if c := t.find(source); c != nil {
		*c = count{}
	}
}

// add counts a refusal. It reports whether that makes y.After of them, which are forgotten then.
func (t *counts) add(source netip.Prefix, y *shaper.Penalty, now time.Duration) bool {
	if t.slots == nil {
		t.slots = make([]count, MaxCounted)
	}
	c := t.find(source)
	if c == nil {
		c = t.leastOf(t.set(source), y, now)
		*c = count{source: source}
	}
	if c.n == 0 || c.over(y, now) {
		c.n, c.since = 0, now
	}
	if c.n++; uint64(c.n) < y.After.N {
		return false
	}
	*c = count{}
	return true
}

// leastOf returns the slot that another source may have: a free one, or the one with the fewest refusals, of several
// the oldest.
func (t *counts) leastOf(set []count, y *shaper.Penalty, now time.Duration) *count {
	least := &set[0]
	for i := range set {
		c := &set[i]
		if c.n == 0 || c.over(y, now) {
			return c
		}
		if c.n < least.n || c.n == least.n && c.since < least.since {
			least = c
		}
	}
	return least
}
