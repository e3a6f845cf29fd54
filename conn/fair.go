package conn

import (
	"container/heap"

	"shaperd.dev/shaperd/leaky"
)

// node is a flow of the scheduling hierarchy: a source in a queue, a lane of a source, or a UDP flow
// or TCP direction of a lane. The leaves hold the units.
//
// The discipline is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each node has a
// start tag, the virtual time at which its next unit starts. The unit with the lowest tag is served,
// and its cost is added to the tag. The parent's virtual time advances by that cost divided by the
// number of backlogged children: by what each of them should have received (Stoica and others, "A
// Proportional Share Resource Allocation Algorithm", RTSS 1996). It never goes back, and is never
// behind the tag in service. A node that becomes backlogged starts at virtual time, or at its own tag
// if that is later: it has no credit from idle time, and past service is not forgotten. Like deficit
// round robin this shares service and not units, but it needs no quantum, and a node with little to
// send does not wait for a round.
//
// The package comment states the guarantees and proves them.
type node struct {
	parent       *node
	startTag     leaky.Time // of the next unit, in the parent's virtual time
	seq          uint64     // order of activation, for ties
	startIndex   int        // in parent.activeChildren
	backlog      leaky.Time // cost of the droppable units queued here and below
	backlogIndex int        // in parent.longestChildren
	active       bool       // takes turns: has units, or its last unit is in service
	inService    bool       // a unit of this leaf left the queue and is not charged yet
	suspended    bool       // takes no turns: see lane and booking

	virtualTime     leaky.Time // of the children
	remainder       leaky.Time // of service, not divisible among the children
	lastSeq         uint64
	activeChildren  indexedHeap[node, byStart]   // lowest start tag first
	longestChildren indexedHeap[node, byBacklog] // those with droppable units, largest backlog first

	head, tail *unit // units of a leaf
}

// nextUnit returns the unit whose turn it is, or nil.
func (n *node) nextUnit() *unit {
	for len(n.activeChildren) > 0 {
		n = n.activeChildren[0]
	}
	return n.head
}

// push appends u to leaf n.
func (n *node) push(u *unit) {
	u.prev, u.next = n.tail, nil
	if n.head == nil {
		n.head = u
		n.activate()
	} else {
		n.tail.next = u
	}
	n.tail = u
	if u.droppable {
		n.addBacklog(u.cost)
	}
}

// activate makes n and its ancestors take turns, now that n has units.
func (n *node) activate() {
	for p := n.parent; p != nil && !n.active && !n.suspended; n, p = p, p.parent {
		n.startTag = max(n.startTag, p.virtualTime)
		p.lastSeq++
		n.seq = p.lastSeq
		n.active = true
		heap.Push(&p.activeChildren, n)
	}
}

// deactivate ends the turns of n and its ancestors where nothing is left.
func (n *node) deactivate() {
	for p := n.parent; p != nil && n.active && !n.hasUnits() && !n.inService; n, p = p, p.parent {
		n.active = false
		heap.Remove(&p.activeChildren, n.startIndex)
	}
}

// remove takes u out of leaf n.
func (n *node) remove(u *unit) {
	if u.droppable {
		n.addBacklog(-u.cost)
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
	n.deactivate()
}

// beginService takes u, the first unit, out of leaf n. Its cost is reported to charge, and the end of
// its service to endService. Until then n remains active, so that a unit that is requeued keeps its
// place.
func (n *node) beginService(u *unit) {
	for c := n; c.parent != nil; c = c.parent {
		c.parent.virtualTime = max(c.parent.virtualTime, c.startTag)
	}
	n.inService = true
	n.remove(u)
}

// suspend ends the turns of n until resume.
func (n *node) suspend() {
	n.suspended = true
	n.deactivate()
}

// resume makes n take turns again, like a node that becomes backlogged.
func (n *node) resume() {
	n.suspended = false
	if n.hasUnits() {
		n.activate()
	}
}

// charge adds the cost of a unit of leaf n that was served, now or before it moved on. In the latter
// case n and its ancestors may be inactive: they are charged as if they became backlogged now.
func (n *node) charge(cost leaky.Time) {
	for p := n.parent; p != nil; n, p = p, p.parent {
		members := leaky.Time(len(p.activeChildren))
		if !n.active {
			n.startTag = max(n.startTag, p.virtualTime)
			members++
		}
		n.startTag += cost
		if members == 1 {
			p.virtualTime += cost
			continue
		}
		if n.active {
			heap.Fix(&p.activeChildren, n.startIndex)
		}
		p.virtualTime += (p.remainder + cost) / members
		p.remainder = (p.remainder + cost) % members
	}
}

// endService ends what beginService began.
func (n *node) endService() {
	n.inService = false
	n.deactivate()
}

// adjust corrects the service of n and its ancestors when it turns out to be more or less.
func (n *node) adjust(by leaky.Time) {
	for ; n.parent != nil; n = n.parent {
		n.startTag += by
		if n.active {
			heap.Fix(&n.parent.activeChildren, n.startIndex)
		}
	}
}

// hasUnits reports whether n or a node below has units or a unit in service.
func (n *node) hasUnits() bool { return !n.suspended && (n.head != nil || len(n.activeChildren) > 0) }

// addBacklog adds to the backlog of n and its ancestors.
func (n *node) addBacklog(by leaky.Time) {
	if by == 0 {
		return
	}
	for ; n.parent != nil; n = n.parent {
		depths, was := &n.parent.longestChildren, n.backlog
		switch n.backlog += by; {
		case was == 0:
			heap.Push(depths, n)
		case n.backlog == 0:
			heap.Remove(depths, n.backlogIndex)
		default:
			heap.Fix(depths, n.backlogIndex)
		}
	}
	n.backlog += by
}

// longestQueue returns the leaf with the longest queue of droppable units below n, where each step
// descends to the child with the largest backlog. It returns nil if there is none, or if a unit of
// leaf own would make a queue on its own path longer than that.
func (n *node) longestQueue(own *node, cost leaky.Time) *node {
	for len(n.longestChildren) > 0 {
		c := n.longestChildren[0]
		o := own
		for o != nil && o.parent != n {
			o = o.parent
		}
		if o != nil && o != c && o.backlog+cost >= c.backlog {
			return nil
		}
		n = c
	}
	if n == own || n.parent == nil {
		return nil
	}
	return n
}

// byStart orders nodes by start tag.
type byStart struct{}

func (byStart) less(a, b *node) bool {
	return a.startTag < b.startTag || a.startTag == b.startTag && a.seq < b.seq
}

func (byStart) index(n *node) *int { return &n.startIndex }

// byBacklog puts the node with the largest backlog first.
type byBacklog struct{}

func (byBacklog) less(a, b *node) bool { return a.backlog > b.backlog }
func (byBacklog) index(n *node) *int   { return &n.backlogIndex }
