package shaper

import (
	"container/heap"
	"slices"

	"shaperd.dev/shaperd/leaky"
)

// historyMemory is how much memory the histories of one limit may take, in bytes.
const historyMemory = 16 << 20

// histories are those of the keys of one limit that no one has checked out. Like a table of buckets they take no more than so much
// memory. If there is no more, the history that is empty first is evicted, and a new key inherits from all that were evicted before
// they were empty.
type histories struct {
	limit   Limit // with the largest maximum and the longest period of all keys, when they had histories last
	byKey   map[Key]*historyEntry
	soonest historyHeap
	size    int // of all, in bytes
	most    int // maximum of size
	floor   leaky.History

	evicted uint64 // before they were empty
}

type historyEntry struct {
	key     Key
	history leaky.History
	emptyAt leaky.Time
	size    int
	index   int // in the heap
}

// entrySize is what an entry takes besides its history: itself, and its places in the map and in the heap.
const entrySize = 280

func newHistories(l *Limit) *histories {
	h := &histories{byKey: map[Key]*historyEntry{}, most: historyMemory}
	h.follow(l, 0)
	return h
}

// follow makes h keep the histories of l, a limit of the same name as before, from now on. Those that it has are converted when
// they are taken.
func (h *histories) follow(l *Limit, now leaky.Time) {
	h.limit = *l
	h.floor = l.continueHistory(h.floor, now)
}

// take removes the history of k, and returns it as one of l, or that of a new key.
func (h *histories) take(k Key, l *Limit, now leaky.Time) leaky.History {
	history := h.peek(k, l, now)
	if e := h.byKey[k]; e != nil {
		h.remove(e)
	}
	return history
}

// peek returns the history of k as one of l, or that of a new key. It may be the one that h keeps: it must not be charged.
func (h *histories) peek(k Key, l *Limit, now leaky.Time) leaky.History {
	if e := h.byKey[k]; e != nil {
		return l.continueHistory(e.history, now)
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
	h.size -= e.size
}

// put adds a history of l to that of k.
func (h *histories) put(k Key, l *Limit, history leaky.History, now leaky.Time) {
	if e := h.byKey[k]; e != nil {
		h.remove(e)
		history.Inherit(l.continueHistory(e.history, now), now)
	}
	if emptyAt := history.EmptyAt(); emptyAt > now {
		e := &historyEntry{key: k, history: history, emptyAt: emptyAt, size: entrySize + history.Size()}
		h.byKey[k] = e
		h.size += e.size
		heap.Push(&h.soonest, e)
	}
	h.makeRoom(now)
}

// makeRoom removes some of those that are empty, more than are added, and evicts as many as are too many.
func (h *histories) makeRoom(now leaky.Time) {
	for n := 0; len(h.soonest) > 0; n++ {
		switch first := h.soonest[0]; {
		case first.emptyAt <= now && n < 8:
			h.remove(first)
		case h.size > h.most:
			h.remove(first)
			h.floor.Inherit(h.limit.continueHistory(first.history, now), now)
			h.evicted++
		default:
			return
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
	if l.Algorithm.HasHistory() {
		return l.ContinueHistory(p.historiesOf(i).take(k, l, now), b, shape, now)
	}
	if h := st.histories; h != nil {
		if e := h.byKey[k]; e != nil {
			h.remove(e)
			l.ContinueHistory(e.history, b, shape, now)
		} else if h.floor.EmptyAt() > now {
			var owed leaky.Bucket
			l.ContinueHistory(h.floor, &owed, shape, now)
			b.Merge(owed)
		}
		if h.makeRoom(now); len(h.soonest) == 0 && h.floor.EmptyAt() <= now {
			st.histories = nil
		}
	}
	return nil
}

// historiesOf returns those of limit i, new ones if it has none.
func (p *Policy) historiesOf(i int) *histories {
	st := p.states[i]
	if st.histories == nil {
		st.histories = newHistories(p.largestCount(i))
	}
	return st.histories
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
		h.Charge(owed+1, now) // a part of one is one
		*b = leaky.Bucket{}
	}
	return h
}

// continueHistory returns h, which may be nil, as a history of l, which has such. It is h itself if it is one already.
func (l *Limit) continueHistory(h leaky.History, now leaky.Time) leaky.History {
	c := leaky.NewCount(l.NewConnections.N, l.NewConnections.Per)
	switch was := h.(type) {
	case *leaky.SlidingLog:
		if l.Algorithm == SlidingWindow {
			return was.Window(c)
		}
	case *leaky.SlidingWindow:
		if l.Algorithm == SlidingLog {
			return was.Log(c, now)
		}
	default:
		return l.newHistory()
	}
	return h.With(c, now)
}

// CheckInHistory returns a history to s. l is the limit under which it was in use, st its state.
func (s *Shaper) CheckInHistory(st *LimitState, l *Limit, k Key, h leaky.History, now leaky.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.histories == nil {
		st.histories = newHistories(l)
	}
	st.histories.put(k, l, h, now)
}

// NextAdmission returns when limit i of p would let a connection of k pass, of which b is the bucket, of that shape, and the history is
// not checked out either.
func (s *Shaper) NextAdmission(p *Policy, i int, k Key, b leaky.Bucket, shape *leaky.Shape, now leaky.Time) leaky.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, kept := p.LimitFor(i, &k), p.states[i].histories
	switch {
	case l.Algorithm.HasHistory():
		h := l.newHistory()
		if kept != nil {
			h.Inherit(kept.peek(k, l, now), now)
		}
		return l.ContinueHistory(h, &b, shape, now).Depart(now)
	case kept != nil && kept.byKey[k] != nil: // of another algorithm
		l.ContinueHistory(kept.byKey[k].history, &b, shape, now)
	}
	return b.Depart(shape, now)
}

// HistoryUsage is the fill level of the histories of a limit.
type HistoryUsage struct {
	Entries int
	Bytes   int    // at most 16 MiB
	Evicted uint64 // before they were empty
}

// HistoryUsage returns the fill level of the histories of a limit, all 0 before there was one.
func (s *Shaper) HistoryUsage(st *LimitState, now leaky.Time) HistoryUsage {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := st.histories
	if h == nil {
		return HistoryUsage{}
	}
	for len(h.soonest) > 0 && h.soonest[0].emptyAt <= now {
		h.remove(h.soonest[0])
	}
	return HistoryUsage{len(h.soonest), h.size, h.evicted}
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
