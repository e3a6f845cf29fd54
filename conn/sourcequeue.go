// Owner: the loop's thread.

package conn

import (
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/shaper"
)

// sourceQueue is a source in a queue. It exists while the source has flows, and until virtual time has
// reached its start tag, so a source that leaves and returns gains nothing. Unverified flows, whose
// sources may be forged, count as one source: together they get no more than one verified source. In a
// FIFO all flows count as one source.
type sourceQueue struct {
	fairq.Node[unit]
	source netip.Addr // the zero address for unverified flows, and for a FIFO
	lanes  []*lane
	flows  int
	idle   bool // in queue.idleSources
}

// lane is the flows of a source that pass the same later queues. Units of a lane that wait in a later
// queue hold back those behind them in the lane, and no others.
type lane struct {
	fairq.Node[unit]
	later      []*queue
	flows      int
	shared     fairq.Node[unit] // sub-queue of a FIFO, or of unverified flows that have sent only once
	laterBytes uint64           // bytes of units that moved on and wait in a later queue
}

// laneLimit is how many bytes of a lane may wait in later queues, or one unit. With one unit alone
// small units would get less than large ones.
const laneLimit = fullDatagram

// maxIdleSources bounds the sources without flows that a queue retains.
const maxIdleSources = 4096

// queueSource returns the source that f counts as in a queue.
func queueSource(f *shaper.Flow, fifo, unverified bool) (source netip.Addr) {
	if !fifo && !unverified {
		source = sourceKey(f.Source)
	}
	return source
}

// addFlow adds a flow to q that passes the queues of later after it.
func (q *queue) addFlow(f *shaper.Flow, fifo, unverified bool, later []*queue) hop {
	q.refs++
	source := queueSource(f, fifo, unverified)
	sq := q.sources[source]
	if sq == nil {
		sq = &sourceQueue{source: source, Node: q.root.Child()}
		if q.sources == nil {
			q.sources = map[netip.Addr]*sourceQueue{}
		}
		q.sources[source] = sq
	}
	sq.flows++
	ln := sq.lane(later)
	ln.flows++
	h := hop{queue: q, source: sq, lane: ln, fifo: fifo, flowQueue: &ln.shared}
	if !fifo && !unverified {
		own := ln.Child()
		h.flowQueue = &own
	}
	return h
}

// lane returns the lane to the queues of later. A missing one is created.
func (sq *sourceQueue) lane(later []*queue) *lane {
	for _, ln := range sq.lanes {
		if slices.Equal(ln.later, later) {
			return ln
		}
	}
	ln := &lane{later: later, Node: sq.Child()}
	ln.shared = ln.Child()
	sq.lanes = append(sq.lanes, ln)
	return ln
}

// removeFlow removes a flow from its source and its lane.
func (h *hop) removeFlow() {
	if h.lane.flows--; h.lane.flows == 0 {
		i := slices.Index(h.source.lanes, h.lane)
		h.source.lanes = slices.Delete(h.source.lanes, i, i+1)
	}
	if h.source.flows--; h.source.flows == 0 && h.queue.sources[h.source.source] == h.source {
		h.retire(h.source)
	}
}

// giveOwnQueues gives an unverified flow that has sent again, and has nothing queued, sub-queues of
// its own. Flows that have sent only once share one: of a flood of forged sources each sends once, so
// together they get no more than one flow that goes on without a reply.
func giveOwnQueues(path []hop) {
	for i := range path {
		if h := &path[i]; !h.fifo && h.flowQueue == &h.lane.shared {
			own := h.lane.Child()
			h.flowQueue = &own
		}
	}
}

// retire deletes sq, which has no flows left, and those before it, once virtual time has reached their
// start tags. If there are too many, virtual time is advanced: sources that join get slightly less
// than their share, those present do not.
func (q *queue) retire(sq *sourceQueue) {
	if !sq.idle {
		sq.idle = true
		q.idleSources = append(q.idleSources, sq)
	}
	for len(q.idleSources) > 0 {
		first := q.idleSources[0]
		if first.flows == 0 && first.Ahead() {
			if len(q.idleSources) <= maxIdleSources {
				return
			}
			first.Forgive()
		}
		first.idle = false
		q.idleSources[0] = nil
		q.idleSources = q.idleSources[1:]
		if first.flows == 0 {
			delete(q.sources, first.source)
		}
	}
}
