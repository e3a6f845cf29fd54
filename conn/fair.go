package conn

import (
	"container/heap"

	"shaperd/leaky"
)

// node is one that takes turns with its siblings: a source in a line, a lane of a source,
// a flow of a lane. The leaves have the units.
//
// Turns are by virtual time, as in start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM
// 1996). Each node has a tag, the virtual time at which its next unit starts. The next unit
// to leave is that of the lowest tag, and what it uses is added to the tag. The parent's
// virtual time goes on by that over how many have units then: by what each of them should
// have had (Stoica and others, "A Proportional Share Resource Allocation Algorithm", RTSS
// 1996). It never goes back, and is never behind the tag that is served. Who comes, or comes
// again, starts there, or at its own tag if that is later: it has nothing saved up, and what
// it has used is not forgotten. Like deficit round robin this shares what leaves, and not
// units, and needs no quantum; and one with little to send does not wait for a round.
//
// What that promises, and why, is in the documentation of the package.
type node struct {
	parent *node
	start  leaky.Time // tag: of the next unit, in the parent's virtual time
	turn   uint64     // breaks ties: who came first
	place  int        // in parent.starts
	depth  leaky.Time // what droppable units cost that are queued here and below
	rank   int        // in parent.depths
	member bool       // takes turns: it has units, or the one that is being served was its last
	served bool       // a unit of this leaf is past the line, but not yet charged
	barred bool       // takes no turns: see lane and booking

	virtual leaky.Time // of the children
	rest    leaky.Time // of what was served, that could not be divided among them
	turns   uint64
	starts  ranking[node, byStart] // children that take turns
	depths  ranking[node, byDepth] // those of a depth

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
		n.join()
	} else {
		n.tail.next = u
	}
	n.tail = u
	if u.droppable {
		n.deepen(u.cost)
	}
}

// join has n, which has got units, and the nodes above take turns.
func (n *node) join() {
	for p := n.parent; p != nil && !n.member && !n.barred; n, p = p, p.parent {
		n.start = max(n.start, p.virtual)
		p.turns++
		n.turn = p.turns
		n.member = true
		heap.Push(&p.starts, n)
	}
}

// quit ends the turns of n and the nodes above if nothing is left there.
func (n *node) quit() {
	for p := n.parent; p != nil && n.member && !n.active() && !n.served; n, p = p, p.parent {
		n.member = false
		heap.Remove(&p.starts, n.place)
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
	n.quit()
}

// serve takes u, the first one, out of leaf n. What it costs is told to charge, and that all
// has been told to done: until then n takes turns with the others, so that a unit which
// comes again finds it where it was.
func (n *node) serve(u *unit) {
	for c := n; c.parent != nil; c = c.parent {
		c.parent.virtual = max(c.parent.virtual, c.start)
	}
	n.served = true
	n.remove(u)
}

// bar ends the turns of n until admit.
func (n *node) bar() {
	n.barred = true
	n.quit()
}

// admit has n take turns again like one who comes.
func (n *node) admit() {
	n.barred = false
	if n.active() {
		n.join()
	}
}

// charge counts what a unit of leaf n has used that was served: now, or before it went on. In
// the latter case n, and who is above, need not wait any more: it is as if they came now.
func (n *node) charge(cost leaky.Time) {
	for p := n.parent; p != nil; n, p = p, p.parent {
		members := leaky.Time(len(p.starts))
		if !n.member {
			n.start = max(n.start, p.virtual)
			members++
		}
		n.start += cost
		if members == 1 {
			p.virtual += cost
			continue
		}
		if n.member {
			heap.Fix(&p.starts, n.place)
		}
		p.virtual += (p.rest + cost) / members
		p.rest = (p.rest + cost) % members
	}
}

// done ends serve.
func (n *node) done() {
	n.served = false
	n.quit()
}

// adjust adds to what n and the nodes above have used, when it turns out to be more or less.
func (n *node) adjust(by leaky.Time) {
	for ; n.parent != nil; n = n.parent {
		n.start += by
		if n.member {
			heap.Fix(&n.parent.starts, n.place)
		}
	}
}

// active reports whether n, or what is below it, has units or takes turns for one that has
// just left.
func (n *node) active() bool { return !n.barred && (n.head != nil || len(n.starts) > 0) }

// deepen adds to the depth of n and the nodes above.
func (n *node) deepen(by leaky.Time) {
	if by == 0 {
		return
	}
	for ; n.parent != nil; n = n.parent {
		depths, was := &n.parent.depths, n.depth
		switch n.depth += by; {
		case was == 0:
			heap.Push(depths, n)
		case n.depth == 0:
			heap.Remove(depths, n.rank)
		default:
			heap.Fix(depths, n.rank)
		}
	}
	n.depth += by
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
		if o != nil && o != c && o.depth+cost >= c.depth {
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
