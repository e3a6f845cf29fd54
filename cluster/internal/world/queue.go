package world

import (
	"math"

	"shaperd.dev/shaperd/cluster"
)

// queue is a heap of events by time, and of those at one time by order.
type queue struct {
	heap []event
	seq  int64
}

type event struct {
	at  cluster.Time
	seq int64
	do  func()
}

func (e *event) before(o *event) bool { return e.at < o.at || e.at == o.at && e.seq < o.seq }

// first returns the time of the first event.
func (q *queue) first() cluster.Time {
	if len(q.heap) == 0 {
		return math.MaxInt64
	}
	return q.heap[0].at
}

func (q *queue) push(at cluster.Time, do func()) {
	q.seq++
	q.heap = append(q.heap, event{at, q.seq, do})
	h := q.heap
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if !h[i].before(&h[up]) {
			break
		}
		h[i], h[up] = h[up], h[i]
		i = up
	}
}

func (q *queue) pop() event {
	h := q.heap
	top, last := h[0], len(h)-1
	h[0], h[last] = h[last], event{}
	h = h[:last]
	q.heap = h
	for i := 0; ; {
		least := i
		for down := 2*i + 1; down <= 2*i+2 && down < len(h); down++ {
			if h[down].before(&h[least]) {
				least = down
			}
		}
		if least == i {
			return top
		}
		h[i], h[least] = h[least], h[i]
		i = least
	}
}
