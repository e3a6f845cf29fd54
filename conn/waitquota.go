// Owner: the loop's thread.

package conn

import (
	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// waitQuota bounds the waiting connections of one limit, over all its keys.
type waitQuota struct {
	waiting int
	sources map[memberKey]*quotaSource
	largest fairq.Heap[quotaSource, byWaiters]
}

// quotaSource is one source in a quota, at all gates of the limit.
type quotaSource struct {
	precedence precedence
	sources    fairq.Heap[gateSource, byWaitersAtGate]
	waiting    int // connections
	heapIndex  int // in waitQuota.largest
}

// displaces reports whether the next waiter of a source takes the place of another source's: of one of lower priority, or
// of the same that has more.
func (wq *waitQuota) displaces(key memberKey, st precedence) bool {
	if len(wq.largest) == 0 {
		return false
	}
	first := wq.largest[0]
	return first.precedence.priority < st.priority || first.precedence.priority == st.priority && first.waiting > wq.waitingOf(key)+1
}

// evictNewest refuses the newest waiter of the source that has the most, of those of the lowest priority.
func (a *admission) evictNewest(wq *waitQuota, now leaky.Time) {
	src := wq.largest[0].sources[0]
	last := src.queues[len(src.queues)-1] // the newest of several, approximately
	a.refuse(last.waiters.Last(), src.gate, shaper.WaitingFull, now)
}

// insert counts the waiting connections of src in wq.
func (wq *waitQuota) insert(src *gateSource) {
	t := wq.sources[src.key]
	if t == nil {
		t = &quotaSource{precedence: src.queues[0].precedence}
		if wq.sources == nil {
			wq.sources = map[memberKey]*quotaSource{}
		}
		wq.sources[src.key] = t
		wq.largest.Push(t)
	}
	src.quotaSource = t
	t.sources.Push(src)
}

// remove undoes insert, when none of src waits.
func (wq *waitQuota) remove(src *gateSource) {
	t := src.quotaSource
	src.quotaSource = nil
	t.sources.Remove(src)
	if len(t.sources) == 0 {
		wq.largest.Remove(t)
		delete(wq.sources, src.key)
	}
}

// waitingOf is how many connections of a source wait in wq.
func (wq *waitQuota) waitingOf(key memberKey) int {
	if t := wq.sources[key]; t != nil {
		return t.waiting
	}
	return 0
}

// byWaiters puts the source with the most waiters first, of those of the lowest priority.
type byWaiters struct{}

func (byWaiters) Less(a, b *quotaSource) bool {
	if p, q := a.precedence.priority, b.precedence.priority; p != q {
		return p < q
	}
	return a.waiting > b.waiting
}

func (byWaiters) Index(t *quotaSource) *int { return &t.heapIndex }

// byWaitersAtGate puts the gate with the most waiters of a source first.
type byWaitersAtGate struct{}

func (byWaitersAtGate) Less(a, b *gateSource) bool { return a.waiting > b.waiting }
func (byWaitersAtGate) Index(src *gateSource) *int { return &src.quotaIndex }
