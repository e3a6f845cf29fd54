// Package fairq has the parts of fair queues: a tree of nodes that share service by start-time fair
// queueing, heaps whose elements know their index, and lists whose links are in their items. It knows
// no connection or datagram.
package fairq

import (
	"errors"
	"fmt"
	"iter"

	"shaperd.dev/shaperd/leaky"
)

// Node is a flow of a scheduling hierarchy. The leaves hold the units, in order. The zero value is the
// root of a tree; the others are made by Child.
//
// The discipline is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each node has a
// start tag, the virtual time at which its next unit starts. The unit with the lowest tag is served,
// and its cost, divided by the node's weight, is added to the tag. The parent's virtual time advances by
// that cost divided by the weights of all backlogged children: by what each of them should have received
// for its weight (Stoica and others, "A Proportional Share Resource Allocation Algorithm", RTSS 1996). It never goes back, and is never
// behind the tag in service. A node that becomes backlogged starts at virtual time, or at its own tag
// if that is later: it has no credit from idle time, and past service is not forgotten. Like deficit
// round robin this shares service and not units, but it needs no quantum, and a node with little to
// send does not wait for a round.
//
// The documentation of package conn states the guarantees and proves them.
type Node[T any] struct {
	parent       *Node[T]
	weight       leaky.Time // 1 or more
	startTag     leaky.Time // of the next unit, in the parent's virtual time
	remains      int64      // of service, too little for startTag to grow or shrink by 1
	seq          uint64     // order of activation, for ties
	startIndex   int        // in parent.activeChildren
	backlog      leaky.Time // cost of the droppable units queued here and below
	backlogIndex int        // in parent.longestChildren
	droppable    int        // units of backlog
	active       bool       // takes turns: has units, or its last unit is in service
	inService    bool       // a unit of this leaf left the queue and is not charged yet
	suspended    bool       // takes no turns: see lane and booking

	weighsChildren bool // the weight is that of activeChildren, or was when there were some; see SetFloor

	virtualTime     leaky.Time // of the children
	remainder       leaky.Time // of service, not divisible among the children
	activeWeight    leaky.Time // of activeChildren
	lastSeq         uint64
	activeChildren  Heap[Node[T], byStart[T]]   // lowest start tag first
	longestChildren Heap[Node[T], byBacklog[T]] // those with droppable units, largest backlog for their weight first
	floors          *floors[T]                  // of the children; nil without

	units List[T] // of a leaf
}

// Child returns a node below n, with no units and weight 1. n must not be moved.
func (n *Node[T]) Child() Node[T] { return Node[T]{parent: n, weight: 1} }

// SetWeight changes the weight of n, which must be 1 or more. What n was served more than it should have been
// stays, as service, and so does what it was served less, as far as virtual time goes back: n gains nothing by the change.
func (n *Node[T]) SetWeight(to int) {
	was, is := n.weight, leaky.Time(to)
	if was == is {
		return
	}
	p := n.parent
	if !n.active {
		n.startTag = max(n.startTag, p.virtualTime)
	}
	ahead := (n.startTag-p.virtualTime)*was + leaky.Time(n.remains) // below 0 if it was served less
	n.weight, n.startTag, n.remains = is, p.virtualTime, 0
	if n.advance(ahead); int64(ahead) < 0 && n.startTag > p.virtualTime {
		n.startTag = 0 // it would be before all time
	}
	n.weightChanged(was)
}

// weightChanged updates the parent of n, whose weight was another one. n has its start tag already.
func (n *Node[T]) weightChanged(was leaky.Time) {
	p := n.parent
	if n.active {
		p.activeChildren.Fix(n)
		p.weighsMore(n.weight - was)
	}
	if n.backlog > 0 {
		p.longestChildren.Fix(n)
	}
}

// weighsMore adds to what the children of n weigh that take turns.
func (n *Node[T]) weighsMore(by leaky.Time) {
	n.activeWeight += by
	if !n.weighsChildren || n.activeWeight == 0 {
		return
	}
	if was := n.weight; n.activeWeight < was && n.startTag <= n.parent.virtualTime {
		// A child that lags no less than n has left, and takes with it what it lacked.
		n.weight, n.remains = n.activeWeight, 0
		n.weightChanged(was)
		return
	}
	n.SetWeight(int(n.activeWeight))
}

// advance adds service, which may be below 0, to the start tag, and returns what that grows by.
func (n *Node[T]) advance(service leaky.Time) (by leaky.Time) {
	by = service
	if n.weight > 1 {
		sum, weight := int64(service)+n.remains, int64(n.weight)
		by, n.remains = leaky.Time(sum/weight), sum%weight
	}
	n.startTag += by
	return by
}

// Next returns the unit whose turn it is, or nil.
func (n *Node[T]) Next() *T {
	for len(n.activeChildren) > 0 {
		next := n.activeChildren[0]
		if n.floors != nil {
			if owed := n.floors.owed(); owed != nil {
				next = owed
			}
		}
		n = next
	}
	return n.units.First()
}

// Backward returns the units of leaf n, the last one first.
func (n *Node[T]) Backward() iter.Seq[*T] { return n.units.Backward() }

// Push appends a unit to leaf n. Its cost counts as backlog, unless backlog is 0.
func (n *Node[T]) Push(k *Link[T], unit *T, backlog leaky.Time) {
	first := n.units.Empty()
	n.units.Push(k, unit)
	if first {
		n.activate()
	}
	n.addBacklog(backlog)
}

// activate makes n and its ancestors take turns, now that n has units.
func (n *Node[T]) activate() {
	for p := n.parent; p != nil && !n.active && !n.suspended; n, p = p, p.parent {
		n.startTag = max(n.startTag, p.virtualTime)
		if p.floors != nil {
			p.floors.activate(n)
		}
		p.lastSeq++
		n.seq = p.lastSeq
		n.active = true
		p.activeChildren.Push(n)
		p.weighsMore(n.weight)
	}
}

// deactivate ends the turns of n and its ancestors where nothing is left.
func (n *Node[T]) deactivate() {
	for p := n.parent; p != nil && n.active && !n.HasUnits() && !n.inService; n, p = p, p.parent {
		n.active = false
		p.activeChildren.Remove(n)
		p.weighsMore(-n.weight)
	}
}

// Remove takes a unit out of leaf n. backlog is that of Push.
func (n *Node[T]) Remove(k *Link[T], backlog leaky.Time) {
	n.addBacklog(-backlog)
	n.units.Remove(k)
	n.deactivate()
}

// BeginService takes the first unit out of leaf n, like Remove. Its cost is reported to Charge, and the end of
// its service to EndService. Until then n remains active, so that a unit that is requeued keeps its
// place.
func (n *Node[T]) BeginService(k *Link[T], backlog leaky.Time) {
	for c, p := n, n.parent; p != nil; c, p = p, p.parent {
		if p.floors == nil || !p.floors.jumps(c) {
			p.virtualTime = max(p.virtualTime, c.startTag)
		}
	}
	n.inService = true
	n.Remove(k, backlog)
}

// Suspend ends the turns of n until Resume.
func (n *Node[T]) Suspend() {
	n.suspended = true
	n.deactivate()
}

// Resume makes n take turns again, like a node that becomes backlogged.
func (n *Node[T]) Resume() {
	n.suspended = false
	if n.HasUnits() {
		n.activate()
	}
}

// Charge adds the cost of a unit of leaf n that was served, now or before it moved on. In the latter
// case n and its ancestors may be inactive: they are charged as if they became backlogged now.
func (n *Node[T]) Charge(cost leaky.Time) {
	for p := n.parent; p != nil; n, p = p, p.parent {
		weights := p.activeWeight
		if !n.active {
			n.startTag = max(n.startTag, p.virtualTime)
			weights += n.weight
		}
		if fs := p.floors; fs != nil {
			if !n.active {
				fs.activate(n)
			}
			jumps := fs.jumps(n)
			fs.charge(n, cost)
			if jumps {
				n.jumped(cost)
				continue
			}
		}
		by := n.advance(cost)
		if weights == n.weight {
			p.virtualTime += by
			continue
		}
		if n.active {
			p.activeChildren.Fix(n)
		}
		p.virtualTime += (p.remainder + cost) / weights
		p.remainder = (p.remainder + cost) % weights
	}
}

// jumped adds the cost of a unit that was served out of turn to the start tag, up to one unit ahead of virtual time.
func (n *Node[T]) jumped(cost leaky.Time) {
	if tag, v := n.startTag, n.parent.virtualTime; tag > v {
		n.startTag = v
		n.advance(cost)
		n.startTag = max(n.startTag, tag)
	} else {
		n.advance(cost)
	}
	if n.active {
		n.parent.activeChildren.Fix(n)
	}
}

// EndService ends what BeginService began.
func (n *Node[T]) EndService() {
	n.inService = false
	n.deactivate()
}

// Adjust corrects the service of n and its ancestors when it turns out to be more or less.
func (n *Node[T]) Adjust(by leaky.Time) {
	for p := n.parent; p != nil; n, p = p, p.parent {
		if p.floors != nil {
			p.floors.adjust(n, by)
		}
		if tag := n.startTag; n.weighsChildren && int64(by) < 0 {
			// The tag may not have grown by all of what is taken back.
			n.advance(by)
			n.startTag = max(n.startTag, min(tag, p.virtualTime))
		} else {
			n.advance(by)
		}
		if n.active {
			p.activeChildren.Fix(n)
		}
	}
}

// Active returns how many children of n take turns.
func (n *Node[T]) Active() int { return len(n.activeChildren) }

// Suspended reports whether n takes no turns, even if it has units.
func (n *Node[T]) Suspended() bool { return n.suspended }

// Ahead reports whether n was served more than its parent's other children at its virtual time, for
// which it has yet to pay by waiting, or more than its floor.
func (n *Node[T]) Ahead() bool {
	if fs := n.parent.floors; fs != nil {
		if f := fs.of(n); f != nil && f.tag > fs.served {
			return true
		}
	}
	return n.startTag > n.parent.virtualTime
}

// Forgive advances the times of n's parent until n is not ahead.
func (n *Node[T]) Forgive() {
	p := n.parent
	p.virtualTime = max(p.virtualTime, n.startTag)
	if p.floors != nil {
		if f := p.floors.of(n); f != nil {
			f.tag = min(f.tag, p.floors.served)
		}
	}
}

// HasUnits reports whether n or a node below has units or a unit in service.
func (n *Node[T]) HasUnits() bool {
	return !n.suspended && (!n.units.Empty() || len(n.activeChildren) > 0)
}

// addBacklog adds the cost of a unit to the backlog of n and its ancestors, or takes it off if that is below 0.
func (n *Node[T]) addBacklog(by leaky.Time) {
	if by == 0 {
		return
	}
	units := 1
	if int64(by) < 0 {
		units = -1
	}
	for ; n.parent != nil; n = n.parent {
		longest, was := &n.parent.longestChildren, n.backlog
		n.droppable += units
		switch n.backlog += by; {
		case was == 0:
			longest.Push(n)
		case n.backlog == 0:
			longest.Remove(n)
		default:
			longest.Fix(n)
		}
	}
	n.backlog += by
}

// Longest returns the leaf with the longest queue of droppable units below n, where each step
// descends to the child with the largest backlog for its weight, except those within their floors. It returns nil if n has no such leaf, or if
// a unit of leaf own would make a queue on its own path longer than that.
func (n *Node[T]) Longest(own *Node[T], cost leaky.Time) *Node[T] {
	for len(n.longestChildren) > 0 {
		o := own
		for o != nil && o.parent != n {
			o = o.parent
		}
		c, spared := n.longestChildren[0], false
		if n.floors != nil {
			if c = n.longest(0); c == nil {
				return nil
			}
			spared = o != nil && o != c && n.floors.spares(o, cost)
		}
		if o != nil && o != c && !spared && (o.backlog+cost)*c.weight >= c.backlog*o.weight {
			return nil
		}
		n = c
	}
	if n == own || n.parent == nil {
		return nil
	}
	return n
}

// Check returns an error if n, or an active node below it, is in service, or takes turns and has no
// units, or the other way round, or does not know what its children weigh. It is for tests, at times when no unit is on its way.
func (n *Node[T]) Check() error {
	if n.inService {
		return errors.New("a node is in service for ever")
	}
	if n.parent != nil && n.active != n.HasUnits() {
		return fmt.Errorf("a node is active: %v, suspended: %v, and has units: %v", n.active, n.suspended, !n.units.Empty())
	}
	var weights leaky.Time
	for _, c := range n.activeChildren {
		if err := c.Check(); err != nil {
			return err
		}
		weights += c.weight
	}
	if weights != n.activeWeight || n.active && n.weighsChildren && weights != n.weight {
		return fmt.Errorf("children that take turns weigh %d, not %d, and their parent %d", weights, n.activeWeight, n.weight)
	}
	return nil
}

// byStart orders nodes by start tag.
type byStart[T any] struct{}

func (byStart[T]) Less(a, b *Node[T]) bool {
	return a.startTag < b.startTag || a.startTag == b.startTag && a.seq < b.seq
}

func (byStart[T]) Index(n *Node[T]) *int { return &n.startIndex }

// byBacklog puts the node with the largest backlog for its weight first.
type byBacklog[T any] struct{}

func (byBacklog[T]) Less(a, b *Node[T]) bool { return a.backlog*b.weight > b.backlog*a.weight }
func (byBacklog[T]) Index(n *Node[T]) *int   { return &n.backlogIndex }
