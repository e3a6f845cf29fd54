// Owner: the loop's thread.

package conn

import (
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
)

// hearing is up to when a loop has handled what came to its sockets. A timer that acts on silence must not be ahead of that: while the
// thread was held up, it may have been the only one that was silent.
type hearing struct {
	until   leaky.Time
	begun   leaky.Time // the poll of this round
	oldest  leaky.Time // the first poll of those that had more to report than they can
	left    int        // how many such polls follow until all has been reported that was ready at oldest; 0 without such polls
	sockets int        // that are watched
}

// end ends a round that has handled the n events of its poll, which reports most at once.
func (h *hearing) end(n, most int) {
	switch {
	case n < most:
		h.until, h.left = h.begun, 0
	case h.left == 0: // epoll reports what is ready in turn
		h.oldest, h.left = h.begun, h.sockets/most+1
	default:
		if h.left--; h.left == 0 {
			h.until = h.oldest
		}
	}
}

// unheard reports whether what came until due, a time at which e may fire, may not have been handled. If so e fires again when more
// has been.
func (l *loop) unheard(e *pacer.Event, due leaky.Time) bool {
	switch {
	case due <= l.hearing.until:
		return false
	case due > l.clock.Now():
		l.pacer.Schedule(e, due)
	default:
		l.pacer.Defer(e)
	}
	return true
}
