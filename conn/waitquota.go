// Owner: the loop's thread.

package conn

import (
	"net/netip"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// waitQuota bounds the waiting connections of one limit, over all its keys.
type waitQuota struct {
	waiting int
	sources map[netip.Addr]*quotaSource
	largest fairq.Heap[quotaSource, byWaiters]
}

// quotaSource is one source in a quota, at all gates of the limit.
type quotaSource struct {
	sources   fairq.Heap[gateSource, byWaitersAtGate]
	waiting   int // connections
	heapIndex int // in waitQuota.largest
}

// evictNewest refuses the newest waiter of the source that has the most.
func (a *admission) evictNewest(wq *waitQuota, now leaky.Time) {
	src := wq.largest[0].sources[0]
	last := src.queues[len(src.queues)-1] // the newest of several, approximately
	a.refuse(last.waiters.Last(), src.gate, shaper.WaitingFull, now)
}

// insert counts the waiting connections of src in wq.
func (wq *waitQuota) insert(src *gateSource) {
	t := wq.sources[src.addr]
	if t == nil {
		t = &quotaSource{}
		if wq.sources == nil {
			wq.sources = map[netip.Addr]*quotaSource{}
		}
		wq.sources[src.addr] = t
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
		delete(wq.sources, src.addr)
	}
}

// waitingOf is how many connections of a source wait in wq.
func (wq *waitQuota) waitingOf(addr netip.Addr) int {
	if t := wq.sources[addr]; t != nil {
		return t.waiting
	}
	return 0
}

// byWaiters puts the source with the most waiters first.
type byWaiters struct{}

func (byWaiters) Less(a, b *quotaSource) bool { return a.waiting > b.waiting }
func (byWaiters) Index(t *quotaSource) *int   { return &t.heapIndex }

// byWaitersAtGate puts the gate with the most waiters of a source first.
type byWaitersAtGate struct{}

func (byWaitersAtGate) Less(a, b *gateSource) bool { return a.waiting > b.waiting }
func (byWaitersAtGate) Index(src *gateSource) *int { return &src.quotaIndex }
