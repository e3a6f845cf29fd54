package conn

import (
	"container/heap"

	"shaperd/leaky"
)

// node is one that takes turns with its siblings: a source in a line, a flow of a
// source. The root of a line has the sources, or itself the units when they leave in
// the order they came.
//
// Turns are by start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair
// Queuing", SIGCOMM 1996). Each node has a virtual time at which its next unit
// starts, in which what it has used is counted; the next one is the one that starts
// first. One that comes back after a rest starts with what is served now: it has
// nothing saved up. Like deficit round robin it shares what leaves, and not units,
// and needs no quantum; and one with little to send does not wait for a round.
type node struct {
	parent *node
	start  leaky.Time // of the next unit, in the parent's virtual time
	turn   uint64     // breaks ties: who came first
	place  int        // in parent.starts
	depth  leaky.Time // what droppable units cost that are queued here and below
	rank   int        // in parent.depths

	virtual leaky.Time // start of the child whose unit left last
	turns   uint64
	starts  ranking[node, byStart] // children with units
	depths  ranking[node, byDepth] // likewise; only used when something is dropped

	head, tail *unit // of a leaf
}

// first returns the unit whose turn it is, or nil.
func (n *node) first() *unit {
	for len(n.starts) > 0 {
		n = n.starts[0]
	}
	return n.head
}

// push puts u at the end of leaf n.
func (n *node) push(u *unit) {
	u.prev, u.next = n.tail, nil
	if n.head == nil {
		n.head = u
		n.wake()
	} else {
		n.tail.next = u
	}
	n.tail = u
	if u.droppable {
		n.deepen(u.cost)
	}
}

// wake has n, which has got units, and the nodes above take turns.
func (n *node) wake() {
	for p := n.parent; p != nil; n, p = p, p.parent {
		n.start = max(n.start, p.virtual)
		p.turns++
		n.turn = p.turns
		heap.Push(&p.starts, n)
		heap.Push(&p.depths, n)
		if len(p.starts) > 1 {
			return
		}
	}
}

// remove takes u out of leaf n.
func (n *node) remove(u *unit) {
	if u.droppable {
		n.deepen(-u.cost)
	}
	if u.prev == nil {
		n.head = u.next
	} else {
		u.prev.next = u.next
	}
	if u.next == nil {
		n.tail = u.prev
	} else {
		u.next.prev = u.prev
	}
	u.next, u.prev = nil, nil
	if n.head != nil {
		return
	}
	for p := n.parent; p != nil; n, p = p, p.parent {
		heap.Remove(&p.starts, n.place)
		heap.Remove(&p.depths, n.rank)
		if len(p.starts) > 0 {
			return
		}
	}
}

// serve takes u, the first one, out of leaf n. What it costs is told to charge.
func (n *node) serve(u *unit) {
	for c := n; c.parent != nil; c = c.parent {
		c.parent.virtual = c.start
	}
	n.remove(u)
}

// charge counts what a unit of leaf n has used.
func (n *node) charge(cost leaky.Time) {
	for p := n.parent; p != nil; n, p = p, p.parent {
		n.start += cost
		if n.active() {
			heap.Fix(&p.starts, n.place)
		}
	}
}

// active reports whether n takes turns: it, or what is below it, has units.
func (n *node) active() bool { return n.head != nil || len(n.starts) > 0 }

// deepen adds to the depth of n and the nodes above.
func (n *node) deepen(by leaky.Time) {
	for ; n != nil; n = n.parent {
		n.depth += by
		if n.parent != nil {
			heap.Fix(&n.parent.depths, n.rank)
		}
	}
}

// deepest returns the leaf of the longest queue of droppable units below root, where at
// each branch the way goes to the deepest one. It is nil when there is none, or when a
// unit of leaf own would make a queue longer than that on its way.
func (n *node) deepest(own *node, cost leaky.Time) *node {
	for len(n.depths) > 0 {
		c := n.depths[0]
		o := own
		for o != nil && o.parent != n {
			o = o.parent
		}
		if c.depth == 0 || o != nil && o != c && o.depth+cost >= c.depth {
			return nil
		}
		n = c
	}
	if n == own || n.parent == nil {
		return nil
	}
	return n
}

// byStart has the node first whose turn it is.
type byStart struct{}

func (byStart) before(a, b *node) bool {
	return a.start < b.start || a.start == b.start && a.turn < b.turn
}

func (byStart) place(n *node) *int { return &n.place }

// byDepth has the node with the longest queue first.
type byDepth struct{}

func (byDepth) before(a, b *node) bool { return a.depth > b.depth }
func (byDepth) place(n *node) *int     { return &n.rank }
