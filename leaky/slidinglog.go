package leaky

import "unsafe"

// MaxLog is the maximum N of a [SlidingLog], and of the events that it keeps.
const MaxLog = 1000

// SlidingLog keeps the instants of the last events: at most N pass in any interval of Per, not counting one of its ends. It keeps the
// last N, and before these as many as there have been within Per: so if N was lowered and is raised again, what has passed counts.
type SlidingLog struct {
	Count
	ring []Time
	head int // of the oldest
	n    int
}

// NewSlidingLog returns an empty history.
func NewSlidingLog(c Count) *SlidingLog { return &SlidingLog{Count: c} }

// nth returns the instant of the n-th last event, from 0, or false if it is not known, or too long ago to matter at now.
func (l *SlidingLog) nth(n int, now Time) (Time, bool) {
	if n >= l.n {
		return 0, false
	}
	t := l.ring[(l.head+l.n-1-n)%len(l.ring)]
	return t, t.Add(l.Per) > now
}

// Depart implements [History].
func (l *SlidingLog) Depart(now Time) Time {
	if t, ok := l.nth(int(l.N)-1, now); ok {
		return t.Add(l.Per)
	}
	return now
}

// Charge implements [History].
func (l *SlidingLog) Charge(n uint64, at Time) {
	for range min(n, MaxLog) {
		l.push(at)
	}
}

func (l *SlidingLog) push(at Time) {
	if _, ok := l.nth(0, at); !ok {
		l.head, l.n = 0, 0
	}
	for l.n == MaxLog || l.n >= int(l.N) && l.ring[l.head].Add(l.Per) <= at {
		l.head = (l.head + 1) % len(l.ring)
		l.n--
	}
	if l.n == len(l.ring) {
		size := min(max(2*l.n, 4), MaxLog)
		if l.n < int(l.N) {
			size = min(size, int(l.N))
		}
		l.head, l.ring = 0, append(make([]Time, 0, size), l.Times()...)[:size]
	}
	l.ring[(l.head+l.n)%len(l.ring)] = at
	l.n++
}

// Times returns the instants that are kept, in order.
func (l *SlidingLog) Times() (all []Time) {
	for i := range l.n {
		all = append(all, l.ring[(l.head+i)%len(l.ring)])
	}
	return all
}

// EmptyAt implements [History].
func (l *SlidingLog) EmptyAt() Time {
	if t, ok := l.nth(0, 0); ok {
		return t.Add(l.Per)
	}
	return 0
}

// Used implements [History].
func (l *SlidingLog) Used(now Time) (n uint64) {
	for _, ok := l.nth(0, now); ok; _, ok = l.nth(int(n), now) {
		n++
	}
	return n
}

// With implements [History].
func (l *SlidingLog) With(c Count, _ Time) History {
	if l.Count == c {
		return l
	}
	next := NewSlidingLog(c)
	next.ring = l.Times()
	next.n = len(next.ring)
	return next
}

// Inherit implements [History].
func (l *SlidingLog) Inherit(o History, now Time) {
	from := o.(*SlidingLog)
	var times []Time // those that matter, in order
	for n := int(max(l.Used(now), from.Used(now))) - 1; n >= 0; n-- {
		a, _ := l.nth(n, now)
		b, _ := from.nth(n, now)
		times = append(times, max(a, b))
	}
	l.ring, l.head, l.n = times, 0, len(times)
}

// Size implements [History].
func (l *SlidingLog) Size() int {
	return int(unsafe.Sizeof(*l)) + cap(l.ring)*int(unsafe.Sizeof(Time(0)))
}

// Window returns what is known as two counters.
func (l *SlidingLog) Window(c Count) *SlidingWindow {
	w := NewSlidingWindow(c)
	for _, t := range l.Times() {
		w.Charge(1, t)
	}
	return w
}
