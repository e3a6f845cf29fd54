package shaper

import (
	"container/heap"
	"slices"

	"shaperd.dev/shaperd/leaky"
)

// historyMemory is how much memory the histories of one limit may take, in bytes.
const historyMemory = 16 << 20

// histories are those of the keys of one limit that no one has checked out. Like a table of buckets it never grows beyond its
// capacity. If it is full, the history that is empty first is evicted, and a new key inherits from all that were evicted before
// they were empty.
type histories struct {
	limit    Limit // with the largest maximum and the longest period of all keys
	capacity int
	byKey    map[Key]*historyEntry
	soonest  historyHeap
	floor    leaky.History

	evicted uint64 // before they were empty
}

type historyEntry struct {
	key     Key
	history leaky.History
	emptyAt leaky.Time
	index   int // in the heap
}

func newHistories(l *Limit) *histories {
	h := &histories{byKey: map[Key]*historyEntry{}}
	h.follow(l, 0)
	return h
}

// follow makes h keep the histories of l, a limit of the same name as before, from now on. Those that it has are converted when
// they are taken.
func (h *histories) follow(l *Limit, now leaky.Time) {
	size := 320 // of an entry and its key
	if l.Algorithm == SlidingLog {
		size += 8 * int(l.NewConnections.N)
	}
	h.limit, h.capacity = *l, historyMemory/size
	h.floor = l.continueHistory(h.floor, now)
}

// take removes the history of k, and returns it, or that of a new key of l.
func (h *histories) take(k Key, l *Limit, now leaky.Time) leaky.History {
	if e := h.byKey[k]; e != nil {
		h.remove(e)
		return e.history
	}
	history := l.newHistory()
	if h.floor.EmptyAt() > now {
		history.Inherit(l.continueHistory(h.floor, now), now)
	}
	return history
}

func (h *histories) remove(e *historyEntry) {
	heap.Remove(&h.soonest, e.index)
	delete(h.byKey, e.key)
}

// put adds the history of k, which has none here.
func (h *histories) put(k Key, history leaky.History, now leaky.Time) {
	emptyAt := history.EmptyAt()
	if emptyAt <= now {
		return
	}
	e := &historyEntry{key: k, history: history, emptyAt: emptyAt}
	h.byKey[k] = e
	heap.Push(&h.soonest, e)
	for range 2 { // more than are added, until all that are empty are gone
		switch first := h.soonest[0]; {
		case first.emptyAt <= now:
			h.remove(first)
		case len(h.soonest) > h.capacity:
			h.remove(first)
			h.floor.Inherit(h.limit.continueHistory(first.history, now), now)
			h.evicted++
		}
	}
}

// CheckOutHistory removes the history of k, a key of new connections under limit i of p, from those that s keeps, and returns it to
// the caller, its only owner until CheckInHistory. It is nil if the limit has a bucket instead: if it had a history before, that
// is charged to b, the bucket of k. If on the other hand it had a bucket before, what b owes becomes the history.
func (s *Shaper) CheckOutHistory(p *Policy, i int, k Key, b *leaky.Bucket, shape *leaky.Shape, now leaky.Time) leaky.History {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, st := p.LimitFor(i, &k), p.states[i]
	if st.histories == nil && l.Algorithm.HasHistory() {
		st.histories = newHistories(p.largestCount(i))
	}
	var history leaky.History
	if st.histories != nil && (l.Algorithm.HasHistory() || st.histories.byKey[k] != nil) {
		history = st.histories.take(k, l, now)
	}
	return l.ContinueHistory(history, b, shape, now)
}

// largestCount returns limit i with the largest maximum of new connections, and the longest period, of all keys.
func (p *Policy) largestCount(i int) *Limit {
	l := p.limits[i]
	for _, t := range p.tiers[i] {
		l.NewConnections.N = max(l.NewConnections.N, t.values.NewConnections.N)
		l.NewConnections.Per = max(l.NewConnections.Per, t.values.NewConnections.Per)
	}
	return &l
}

// ContinueHistory returns the history of a key of l's new connections, of which h is what it had before, or nil, and b its bucket, of
// that shape. One of the two is empty, and becomes the other if l counts in another way. It returns nil if l has buckets.
func (l *Limit) ContinueHistory(h leaky.History, b *leaky.Bucket, shape *leaky.Shape, now leaky.Time) leaky.History {
	switch {
	case !l.Algorithm.HasHistory() && h == nil:
		return nil
	case !l.Algorithm.HasHistory():
		b.Charge(shape, 0, h.Used(now), now)
		return nil
	}
	h = l.continueHistory(h, now)
	if _, owed := b.Backlog(shape, now); !b.Drained(now) {
		charge(h, min(owed+1, l.NewConnections.N), now)
		*b = leaky.Bucket{}
	}
	return h
}

// continueHistory returns h, which may be nil, as a history of l, which has such.
func (l *Limit) continueHistory(h leaky.History, now leaky.Time) leaky.History {
	next := l.newHistory()
	switch was := h.(type) {
	case nil:
		return next
	case *leaky.SlidingLog:
		if to, ok := next.(*leaky.SlidingLog); ok {
			if was.Count == to.Count {
				return h
			}
			return was.Resize(to.Count, now)
		}
	case *leaky.SlidingWindow:
		if to, ok := next.(*leaky.SlidingWindow); ok && was.Count == to.Count {
			return h
		}
	}
	charge(next, min(h.Used(now), l.NewConnections.N), now)
	return next
}

func charge(h leaky.History, n uint64, now leaky.Time) {
	for range n {
		h.Charge(now)
	}
}

// CheckInHistory returns a history to s. l is the limit under which it was in use, st its state.
func (s *Shaper) CheckInHistory(st *LimitState, l *Limit, k Key, h leaky.History, now leaky.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.histories == nil {
		st.histories = newHistories(l)
	}
	st.histories.put(k, h, now)
}

// NextAdmission returns when a history that is not checked out would let a connection pass.
func (s *Shaper) NextAdmission(p *Policy, i int, k Key, now leaky.Time) leaky.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := p.states[i].histories
	if kept == nil {
		return now
	}
	l := p.LimitFor(i, &k)
	h := kept.take(k, l, now)
	defer kept.put(k, h, now)
	return l.continueHistory(h, now).Depart(now)
}

// HistoryUsage is the fill level of the histories of a limit.
type HistoryUsage struct {
	Entries, Capacity int
	Evicted           uint64 // before they were empty
}

// HistoryUsage returns the fill level of the histories of a limit, all 0 before there was one.
func (s *Shaper) HistoryUsage(st *LimitState) HistoryUsage {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := st.histories; h != nil {
		return HistoryUsage{len(h.soonest), h.capacity, h.evicted}
	}
	return HistoryUsage{}
}

// historyHeap orders entries by the instant at which they are empty.
type historyHeap []*historyEntry

func (h historyHeap) Len() int           { return len(h) }
func (h historyHeap) Less(i, j int) bool { return h[i].emptyAt < h[j].emptyAt }
func (h historyHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *historyHeap) Push(e any) {
	entry := e.(*historyEntry)
	entry.index = len(*h)
	*h = append(*h, entry)
}

func (h *historyHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h = slices.Delete(*h, last, last+1)
	return e
}
