package leaky

import (
	"math/bits"
	"unsafe"
)

// SlidingWindow estimates the events of the last Per from two counters: those of the present window of that length, and those of
// the window before, as if they had come evenly, for the part of it that is in the last Per. An event passes if the estimate does
// not exceed N with it: so of a source that always wants more N - 1 pass in each Per, and if the events of a window have all come at
// its end, nearly 2 N in one.
type SlidingWindow struct {
	Count
	Window            Time // number of the present one; they begin at multiples of Per
	Current, Previous uint64
}

// NewSlidingWindow returns an empty history.
func NewSlidingWindow(c Count) *SlidingWindow { return &SlidingWindow{Count: c} }

func (w *SlidingWindow) roll(now Time) {
	switch n := now / w.Per; {
	case n <= w.Window:
	case n == w.Window+1:
		w.Window, w.Previous, w.Current = n, w.Current, 0
	default:
		w.Window, w.Previous, w.Current = n, 0, 0
	}
}

// Depart implements [History].
func (w *SlidingWindow) Depart(now Time) Time {
	w.roll(now)
	end := (w.Window + 1) * w.Per
	if w.Current >= w.N { // it is the window before when there is room
		return end + w.Per - w.overlap(w.Current, 0)
	}
	return max(now, end-w.overlap(w.Previous, w.Current))
}

// overlap returns the part of Per before the end of a window in which previous events of the window before and current ones
// leave room for another event.
func (w *SlidingWindow) overlap(previous, current uint64) Time {
	room := w.N - 1 - current
	if previous <= room {
		return w.Per
	}
	hi, lo := bits.Mul64(room, uint64(w.Per))
	t, _ := bits.Div64(hi, lo, previous)
	return Time(t)
}

// Charge implements [History].
func (w *SlidingWindow) Charge(n uint64, at Time) {
	w.roll(at)
	w.Current += n
}

// EmptyAt implements [History].
func (w *SlidingWindow) EmptyAt() Time {
	switch {
	case w.Current > 0:
		return (w.Window + 2) * w.Per
	case w.Previous > 0:
		return (w.Window + 1) * w.Per
	}
	return 0
}

// Used implements [History].
func (w *SlidingWindow) Used(now Time) uint64 {
	w.roll(now)
	hi, lo := bits.Mul64(w.Previous, uint64((w.Window+1)*w.Per-max(now, w.Window*w.Per)))
	n, rest := bits.Div64(hi, lo, uint64(w.Per))
	if rest > 0 {
		n++
	}
	return w.Current + n
}

// With implements [History]. With another Per, the events of a window have passed at its end, or now.
func (w *SlidingWindow) With(c Count, now Time) History {
	if w.Count == c {
		return w
	}
	next := NewSlidingWindow(c)
	if w.Per != c.Per {
		w.each(now, next.Charge)
		return next
	}
	*next = *w
	next.Count = c
	return next
}

// each calls f with the events of each window, as late as they may have passed.
func (w *SlidingWindow) each(now Time, f func(n uint64, at Time)) {
	w.roll(now)
	if w.Previous > 0 {
		f(w.Previous, w.Window*w.Per-1)
	}
	if w.Current > 0 {
		f(w.Current, now)
	}
}

// Inherit implements [History].
func (w *SlidingWindow) Inherit(o History, now Time) {
	from := *o.(*SlidingWindow)
	from.roll(now)
	w.roll(now)
	w.Current, w.Previous = max(w.Current, from.Current), max(w.Previous, from.Previous)
}

// Size implements [History].
func (w *SlidingWindow) Size() int { return int(unsafe.Sizeof(*w)) }

// Log returns what is known as a log.
func (w *SlidingWindow) Log(c Count, now Time) *SlidingLog {
	l := NewSlidingLog(c)
	w.each(now, l.Charge)
	return l
}
