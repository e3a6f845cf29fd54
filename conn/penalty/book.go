// Package penalty counts the refusals of sources, and keeps which of them are blocked, in bounded memory. It
// knows no connection, and gets the time as an argument: since some instant, before which it may be as well.
package penalty

import (
	"hash/maphash"
	"net/netip"
	"time"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/shaper"
)

// MaxSources is the maximum number of sources of a [Book] that are blocked, or were and are remembered. Another one
// takes the place of the one whose block has ended longest ago, or, while all last, ends soonest.
const MaxSources = 10_000

// Book has the sources that one limit has refused. It is not safe for concurrent use.
type Book struct {
	counts  counts
	sources map[netip.Prefix]*Source
	active  fairq.Heap[Source, byEnd] // those that are blocked
	ended   fairq.List[Source]        // the others, in the order in which their blocks ended
	blocked [2]int                    // len(active), by Observed
	evicted [2]uint64                 // blocks that ended early, by Observed
}

// Source is a source that is blocked, or was.
type Source struct {
	Prefix   netip.Prefix
	Since    time.Duration // of the last block
	Until    time.Duration
	Times    int  // how often it was blocked in a row
	Observed bool // by a penalty that only observes

	active    bool
	heapIndex int                // in active
	link      fairq.Link[Source] // in ended
}

type byEnd struct{}

func (byEnd) Less(a, b *Source) bool { return a.Until < b.Until }
func (byEnd) Index(s *Source) *int   { return &s.heapIndex }

// NewBook returns an empty book.
func NewBook() *Book {
	return &Book{counts: counts{seed: maphash.MakeSeed()}, sources: map[netip.Prefix]*Source{}}
}

// Blocked returns the block of a source at now, or nil.
func (b *Book) Blocked(source netip.Prefix, now time.Duration) *Source {
	if len(b.active) == 0 {
		return nil
	}
	if s := b.sources[source]; s != nil && s.active && now < s.Until {
		return s
	}
	return nil
}

// Refused counts a refusal of a source. If that was one too many, the source is blocked by y from now on, and Refused
// returns its block. Refusals of a source that is blocked do not count.
func (b *Book) Refused(source netip.Prefix, y *shaper.Penalty, now time.Duration) *Source {
	b.Advance(y, now)
	s := b.sources[source]
	if s != nil && s.active || !b.counts.add(source, y, now) {
		return nil
	}
	if s == nil || s.Observed != y.Observe {
		b.remove(s)
		s = &Source{Prefix: source, Observed: y.Observe}
	} else {
		b.ended.Remove(&s.link)
	}
	s.Since, s.Until = now, now+y.BlockFor(s.Times)
	s.Times++
	b.insert(s)
	return s
}

// insert adds s, which is blocked and not in a list or heap, and makes room for it.
func (b *Book) insert(s *Source) {
	if b.sources[s.Prefix] == nil && len(b.sources) == MaxSources {
		if last := b.ended.First(); last != nil {
			b.remove(last)
		} else {
			first := b.active[0]
			b.evicted[index(first.Observed)]++
			b.remove(first)
		}
	}
	b.sources[s.Prefix] = s
	s.active = true
	b.active.Push(s)
	b.blocked[index(s.Observed)]++
}

// remove forgets s, unless it is nil.
func (b *Book) remove(s *Source) {
	switch {
	case s == nil:
		return
	case s.active:
		b.active.Remove(s)
		b.blocked[index(s.Observed)]--
	default:
		b.ended.Remove(&s.link)
	}
	delete(b.sources, s.Prefix)
}

// Advance ends the blocks that are over at now, and forgets the sources that were not blocked for y.Most since. It
// returns when the next block ends, or 0.
func (b *Book) Advance(y *shaper.Penalty, now time.Duration) (next time.Duration) {
	for len(b.active) > 0 && b.active[0].Until <= now {
		s := b.active[0]
		b.active.Remove(s)
		b.blocked[index(s.Observed)]--
		s.active = false
		b.ended.Push(&s.link, s)
	}
	for s := b.ended.First(); s != nil && s.Until+y.Most <= now; s = b.ended.First() {
		b.remove(s)
	}
	if len(b.active) > 0 {
		return b.active[0].Until
	}
	return 0
}

// Forget forgets a source: its refusals, and how often it was blocked. It reports whether it was ever blocked.
func (b *Book) Forget(source netip.Prefix) bool {
	b.counts.forget(source)
	s := b.sources[source]
	b.remove(s)
	return s != nil
}

// ForgetObserved forgets what a penalty that observes would have done.
func (b *Book) ForgetObserved() {
	for _, s := range b.sources {
		if s.Observed {
			b.remove(s)
		}
	}
}

// Restore adds a source that was blocked until a time, if that is later than what b has of it. Sources whose block has
// ended must be restored in the order of their ends.
func (b *Book) Restore(s Source, now time.Duration) {
	old := b.sources[s.Prefix]
	if old != nil && old.Until >= s.Until {
		return
	}
	b.remove(old)
	if s.Until > now {
		b.insert(&s)
	} else if len(b.sources) < MaxSources {
		b.sources[s.Prefix] = &s
		b.ended.Push(&s.link, &s)
	}
}

// Each calls f for all sources in b.
func (b *Book) Each(f func(s *Source)) {
	for _, s := range b.sources {
		f(s)
	}
}

// Count returns how many refusals of a source were counted, and when the first of them was.
func (b *Book) Count(source netip.Prefix, y *shaper.Penalty, now time.Duration) (n uint64, since time.Duration) {
	if c := b.counts.find(source); c != nil && !c.over(y, now) {
		return uint64(c.n), c.since
	}
	return 0, 0
}

// Totals returns how many sources are blocked, or would be by a penalty that observes, since the last Advance, and how
// many blocks have ended early, as too many sources were blocked.
func (b *Book) Totals(observed bool) (blocked int, evicted uint64) {
	i := index(observed)
	return b.blocked[i], b.evicted[i]
}

func index(observed bool) int {
	if observed {
		return 1
	}
	return 0
}
