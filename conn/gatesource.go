// Owner: the loop's thread.

package conn

import (
	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/leaky"
)

// gateSource is one source at one gate, or, at the levels before it, a prefix or an AS with members below. It has one ticket for all
// that wait below: connections of a source to several ports may need several gates besides this one. A member that is served goes
// behind its siblings.
type gateSource struct {
	key         memberKey
	gate        *gate
	parent      *gateSource                             // that it is of, or nil
	refs        int                                     // of a source the queues that need the gate, wherever they wait; else the members below
	queues      fairq.Heap[waitQueue, byQueueTicket]    // of a source, those that wait here
	below       fairq.Heap[gateSource, byTicket]        // members that wait here
	crowds      fairq.Heap[gateSource, byWaitersAtGate] // the same members
	lastServed  uint64                                  // ticket issued when one below was last served here
	stands      bool                                    // of a source, see patience
	turnedAt    leaky.Time                              // since when connections were served as if stands were wrong, or 0
	waiting     int                                     // connections
	heapIndex   int                                     // in classLine.queued, or in parent.below
	quotaSource *quotaSource                            // of the first level, while some wait here
	quotaIndex  int                                     // in quotaSource.sources, or in parent.crowds
}

// source returns the member with a key, below parent. A missing one is created.
func (gt *gate) source(parent *gateSource, key memberKey) *gateSource {
	src := gt.sources[key]
	if src != nil {
		return src
	}
	src = &gateSource{key: key, gate: gt, parent: parent}
	if parent != nil {
		parent.refs++
	}
	if gt.sources == nil {
		gt.sources = map[memberKey]*gateSource{}
	}
	gt.sources[key] = src
	return src
}

// release ends the need of a queue, and deletes the members that nothing needs any more.
func (src *gateSource) release() {
	for ; src != nil; src = src.parent {
		if src.refs--; src.refs > 0 {
			return
		}
		delete(src.gate.sources, src.key)
	}
}

// top is the member of the first level.
func (src *gateSource) top() *gateSource {
	for src.parent != nil {
		src = src.parent
	}
	return src
}

// next is the queue whose turn it is, of those below that wait here.
func (src *gateSource) next() *waitQueue {
	for len(src.below) > 0 {
		src = src.below[0]
	}
	return src.queues[0]
}

// newest is the newest queue, approximately, of the source that has the most connections that wait here.
func (src *gateSource) newest() *waitQueue {
	for len(src.crowds) > 0 {
		src = src.crowds[0]
	}
	return src.queues[len(src.queues)-1]
}

// ticket decides the order among siblings that wait here: the lowest goes first.
func (src *gateSource) ticket() uint64 {
	if len(src.below) > 0 {
		return max(src.lastServed, src.below[0].ticket())
	}
	return max(src.lastServed, src.queues[0].ticket)
}

// siblings has src while something below it waits here.
func (src *gateSource) siblings() *fairq.Heap[gateSource, byTicket] {
	if src.parent != nil {
		return &src.parent.below
	}
	return &src.gate.line(src.key.class).queued
}

// add makes q, of the source src, wait here.
func (src *gateSource) add(q *waitQueue) {
	src.queues.Push(q)
	joins := len(src.queues) == 1
	for ; src != nil; src = src.parent {
		if !joins {
			src.siblings().Fix(src)
			continue
		}
		src.siblings().Push(src)
		if src.parent == nil {
			src.gate.quota.insert(src)
		} else {
			src.parent.crowds.Push(src)
			joins = len(src.parent.below) == 1
		}
	}
}

// remove undoes add.
func (src *gateSource) remove(q *waitQueue) {
	src.queues.Remove(q)
	leaves := len(src.queues) == 0
	for ; src != nil; src = src.parent {
		if !leaves {
			src.siblings().Fix(src)
			continue
		}
		src.siblings().Remove(src)
		if src.parent == nil {
			src.gate.dropLine(src.key.class)
			src.gate.quota.remove(src)
		} else {
			src.parent.crowds.Remove(src)
			leaves = len(src.parent.below) == 0
		}
	}
}

// passed records that one below was served with a ticket, here or at another gate.
func (src *gateSource) passed(ticket uint64) {
	for ; src != nil; src = src.parent {
		src.lastServed = ticket
		if len(src.queues)+len(src.below) > 0 {
			src.siblings().Fix(src)
		}
	}
}

// addWaiting adds n to the connections of src that wait.
func (src *gateSource) addWaiting(n int, now leaky.Time) {
	gt := src.gate
	for ; src.parent != nil; src = src.parent {
		src.waiting += n
		src.parent.crowds.Fix(src)
	}
	src.waiting += n
	gt.quota.add(src, n)
	gt.waiting += n
	gt.state.Waiting.Add(int64(n))
	if gt.adapter != nil {
		gt.adapter.measure(now)
	}
}

// patience is for how long a connection of src waits at most. While its queue stands that is queue_target: who would
// wait longer would be refused in the end, or served too late, so others are served in time instead. This is CoDel
// (Nichols and Jacobson, 2012) for each source, applied to deadlines as in Facebook's servers (Maurer, 2015).
func (src *gateSource) patience() leaky.Time {
	l := src.gate.limit
	if src.stands && l.QueueTarget > 0 {
		return leaky.FromDuration(min(l.QueueTarget, l.QueueTimeout))
	}
	return leaky.FromDuration(l.QueueTimeout)
}

// steadyTargets is for how many times queue_target all that are served must have waited half of it and longer for the
// queue of a source to stand, or less for it to stand no more.
const steadyTargets = 5

// serve records that a connection of src gets its slot after so long a wait.
func (src *gateSource) serve(waited, now leaky.Time) {
	target := leaky.FromDuration(src.gate.limit.QueueTarget)
	switch waits := waited >= target/2; {
	case waits == src.stands:
		src.turnedAt = 0
	case src.turnedAt == 0:
		src.turnedAt = now
	case now > src.turnedAt+steadyTargets*target:
		src.stands, src.turnedAt = waits, 0
	}
}

// byTicket orders the members at a gate.
type byTicket struct{}

func (byTicket) Less(a, b *gateSource) bool { return a.ticket() < b.ticket() }

func (byTicket) Index(src *gateSource) *int { return &src.heapIndex }
