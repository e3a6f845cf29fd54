package leaky

// MaxLog is the maximum N of a [SlidingLog].
const MaxLog = 1000

// SlidingLog keeps the instants of the last N events: at most N pass in any interval of Per, not counting one of its ends.
type SlidingLog struct {
	Count
	times []Time // a ring once there are N: the oldest is at next
	next  int
}

// NewSlidingLog returns an empty history.
func NewSlidingLog(c Count) *SlidingLog { return &SlidingLog{Count: c} }

// nth returns the instant of the n-th last event, from 0, or false if it is not known, or too long ago to matter at now.
func (l *SlidingLog) nth(n int, now Time) (Time, bool) {
	if n >= len(l.times) {
		return 0, false
	}
	t := l.times[(l.next+len(l.times)-1-n)%len(l.times)]
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
func (l *SlidingLog) Charge(now Time) {
	if len(l.times) < int(l.N) {
		if _, ok := l.nth(0, now); !ok {
			l.times = l.times[:0]
		}
		if n := len(l.times); n == cap(l.times) {
			l.times = append(make([]Time, 0, min(max(2*n, 4), int(l.N))), l.times...)
		}
		l.times = append(l.times, now)
		return
	}
	l.times[l.next] = now
	l.next = (l.next + 1) % len(l.times)
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

// Inherit implements [History].
func (l *SlidingLog) Inherit(o History, now Time) {
	from := o.(*SlidingLog)
	var times []Time // those that matter, in order
	for n := int(max(l.Used(now), from.Used(now))) - 1; n >= 0; n-- {
		a, _ := l.nth(n, now)
		b, _ := from.nth(n, now)
		times = append(times, max(a, b))
	}
	l.times, l.next = times, 0
}

// Resize returns the history under another Count.
func (l *SlidingLog) Resize(c Count, now Time) *SlidingLog {
	was := SlidingLog{Count{l.N, c.Per}, l.times, l.next}
	next := NewSlidingLog(c)
	for n := min(was.Used(now), c.N); n > 0; n-- {
		t, _ := was.nth(int(n)-1, now)
		next.Charge(t)
	}
	return next
}
