// Owner: the loop's thread.

package conn

import (
	"slices"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/shaper"
)

// sourceQueue is a member of a queue: a source, or at the levels before it a prefix or an AS. It exists while it
// has flows, and until virtual time has reached its start tag, so a source that leaves and returns gains nothing.
// Unverified flows, whose sources may be forged, count as one source: together they get no more than one verified
// source. In a FIFO all flows count as one source.
type sourceQueue struct {
	fairq.Node[unit]
	key    memberKey
	parent *sourceQueue // that it is of, or nil
	below  int          // members of which it is the parent
	lanes  []*lane      // of a source
	flows  int          // also of the members below
	idle   bool         // in queue.idleSources
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

// queueMembers returns the members that the flow of spec, of class, is of in a queue of limit i.
func (spec *pathSpec) queueMembers(i int, class *shaper.ClassState) members {
	l := spec.policy.Limit(i)
	if l.Scheduling == shaper.ScheduleFIFO {
		return members{n: 1}
	}
	k := memberKey{class: class}
	var m members
	if l.ReservedFor(class.Name) > 0 {
		k.by = wholeClass
		m.keys[0], m.n = k, 1
	}
	m.add(k, l, spec.flow.Source, spec.route.ASN, spec.unverified)
	return m
}

// class is the class of the flow of spec.
func (spec *pathSpec) class() *shaper.ClassState {
	return spec.policy.ClassState(spec.policy.ClassOf(spec.flow, spec.route, spec.unverified))
}

// addFlow adds a flow of m to q that passes the queues of later after it.
func (q *queue) addFlow(m members, fifo, unverified bool, later []*queue) hop {
	q.refs++
	var sq *sourceQueue
	for _, key := range m.all() {
		sq = q.member(sq, key)
		sq.flows++
	}
	ln := sq.lane(later)
	ln.flows++
	h := hop{queue: q, source: sq, lane: ln, fifo: fifo, flowQueue: &ln.shared}
	if !fifo && !unverified {
		own := ln.Child()
		h.flowQueue = &own
	}
	return h
}

// member returns the member of q with a key, of parent. A missing one is created.
func (q *queue) member(parent *sourceQueue, key memberKey) *sourceQueue {
	sq := q.sources[key]
	if sq != nil {
		return sq
	}
	sq = &sourceQueue{key: key, parent: parent}
	if parent != nil {
		sq.Node = parent.Child()
		parent.below++
	} else {
		sq.Node = q.root.Child()
	}
	q.weigh(sq)
	if q.sources == nil {
		q.sources = map[memberKey]*sourceQueue{}
	}
	q.sources[key] = sq
	return sq
}

// weigh sets the weight of sq to that of its class, if it is of the first level in that, and the floor if it is the class.
func (q *queue) weigh(sq *sourceQueue) {
	switch {
	case sq.key.class == nil || sq.parent != nil && sq.parent.key.by != wholeClass:
	case sq.key.by == wholeClass && sq.parent == nil:
		sq.SetFloor(q.floor(sq.key.class))
	default:
		sq.SetWeight(q.policy.Class(q.policy.FindClass(sq.key.class)).Weight)
	}
}

// floor returns the percentage that is reserved for a class.
func (q *queue) floor(class *shaper.ClassState) int {
	if i := q.policy.IndexOf(q.state); i >= 0 {
		return q.policy.Limit(i).ReservedFor(class.Name)
	}
	return 0 // the limit was removed
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

// removeFlow removes a flow from its members and its lane.
func (h *hop) removeFlow() {
	if h.lane.flows--; h.lane.flows == 0 {
		i := slices.Index(h.source.lanes, h.lane)
		h.source.lanes = slices.Delete(h.source.lanes, i, i+1)
	}
	for sq := h.source; sq != nil; sq = sq.parent {
		if sq.flows--; sq.flows == 0 {
			h.addIdle(sq)
		}
	}
	h.retire()
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

func (q *queue) addIdle(sq *sourceQueue) {
	if !sq.idle {
		sq.idle = true
		q.idleSources = append(q.idleSources, sq)
	}
}

// retire deletes members without flows, in the order in which they lost them, once virtual time has reached their
// start tags. If there are too many, virtual time is advanced: sources that join get slightly less
// than their share, those present do not.
func (q *queue) retire() {
	looks := 2
	for len(q.idleSources) > 0 {
		first := q.idleSources[0]
		if first.flows == 0 && first.keepsTag() {
			if len(q.idleSources) <= maxIdleSources {
				if looks--; looks == 0 || first.parent == nil && first.below == 0 {
					return
				}
				// Virtual time may stand still below its parent, and where it has members these come after it. It does not hold up others.
				q.idleSources[0] = nil
				q.idleSources = append(q.idleSources[1:], first)
				continue
			}
			first.Forgive()
		}
		first.idle = false
		q.idleSources[0] = nil
		q.idleSources = q.idleSources[1:]
		if first.flows == 0 && first.below == 0 { // else the last one below adds it again
			q.delete(first)
		}
	}
}

// keepsTag reports whether a member without flows is kept for its start tag. Below a parent without flows the tag is of
// no use: no other member there competes with it.
func (sq *sourceQueue) keepsTag() bool {
	return sq.Ahead() && (sq.parent == nil || sq.parent.flows > 0)
}

// delete deletes a member without flows and without members below.
func (q *queue) delete(sq *sourceQueue) {
	delete(q.sources, sq.key)
	if sq.key.by == wholeClass && sq.parent == nil {
		sq.SetFloor(0)
	}
	if p := sq.parent; p != nil {
		if p.below--; p.below == 0 && p.flows == 0 {
			q.addIdle(p)
		}
	}
}
