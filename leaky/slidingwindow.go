package leaky

import "math/bits"

// SlidingWindow estimates the events of the last Per from two counters: those of the present window of that length, and those of
// the window before, as if they had come evenly, for the part of it that is in the last Per. An event passes if the estimate does
// not exceed N with it. If the events of a window have all come at its end, nearly 2 N pass within Per.
type SlidingWindow struct {
	Count
	window            Time // number of the present one
	current, previous uint64
}

// NewSlidingWindow returns an empty history.
func NewSlidingWindow(c Count) *SlidingWindow { return &SlidingWindow{Count: c} }

func (w *SlidingWindow) roll(now Time) {
	switch n := now / w.Per; {
	case n <= w.window:
	case n == w.window+1:
		w.window, w.previous, w.current = n, w.current, 0
	default:
		w.window, w.previous, w.current = n, 0, 0
	}
}

// Depart implements [History].
func (w *SlidingWindow) Depart(now Time) Time {
	w.roll(now)
	end := (w.window + 1) * w.Per
	if w.current >= w.N { // it is the window before when there is room
		return end + w.Per - w.overlap(w.current, 0)
	}
	return max(now, end-w.overlap(w.previous, w.current))
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
func (w *SlidingWindow) Charge(now Time) {
	w.roll(now)
	w.current++
}

// EmptyAt implements [History].
func (w *SlidingWindow) EmptyAt() Time {
	switch {
	case w.current > 0:
		return (w.window + 2) * w.Per
	case w.previous > 0:
		return (w.window + 1) * w.Per
	}
	return 0
}

// Used implements [History].
func (w *SlidingWindow) Used(now Time) uint64 {
	w.roll(now)
	hi, lo := bits.Mul64(w.previous, uint64((w.window+1)*w.Per-max(now, w.window*w.Per)))
	n, rest := bits.Div64(hi, lo, uint64(w.Per))
	if rest > 0 {
		n++
	}
	return w.current + n
}

// Inherit implements [History].
func (w *SlidingWindow) Inherit(o History, now Time) {
	from := *o.(*SlidingWindow)
	from.roll(now)
	w.roll(now)
	w.current, w.previous = max(w.current, from.current), max(w.previous, from.previous)
}
