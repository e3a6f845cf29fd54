package fairq

import (
	"slices"

	"shaperd.dev/shaperd/leaky"
)

// floors are the floors of the children of a node.
type floors[T any] struct {
	served leaky.Time // all service of the node
	list   []floor[T]
}

// floor is the least that a child gets of its parent's service while it is backlogged, whatever it weighs. It is a tag like
// a start tag, but in the parent's service, and it grows by what the child is served for its part. A child whose tag is not
// ahead of the service is owed: it has the turn before all that are not.
//
// What a child gets beyond its floor is not held against it later, so its tag is at most the part of one unit ahead of the service. And
// what it gets because it is owed is not held against its turns, nor against those of others: virtual time does not advance by it, and the start tag
// grows to at most one unit ahead of that.
type floor[T any] struct {
	child   *Node[T]
	percent leaky.Time // of the parent's service, 1 to 100
	tag     leaky.Time
	since   leaky.Time // tag when child became backlogged
}

// SetFloor gives n at least percent of its parent's service, of which siblings have at most 100 in all. From the first call on n weighs
// what those of its children weigh that take turns. A percentage of 0 removes the floor. n gains nothing by a change.
func (n *Node[T]) SetFloor(percent int) {
	n.weighsChildren = true
	p := n.parent
	if p.floors == nil {
		p.floors = &floors[T]{}
	}
	fs := p.floors
	for i := range fs.list {
		if f := &fs.list[i]; f.child == n {
			if percent == 0 {
				fs.list = slices.Delete(fs.list, i, i+1)
				return
			}
			if f.tag > fs.served {
				f.tag = fs.served + part((f.tag-fs.served)*f.percent/100, leaky.Time(percent))
			}
			f.percent, f.since = leaky.Time(percent), f.tag
			return
		}
	}
	if percent > 0 {
		fs.list = append(fs.list, floor[T]{child: n, percent: leaky.Time(percent), tag: fs.served, since: fs.served})
	}
}

// part is the service of a parent of which service is percent.
func part(service, percent leaky.Time) leaky.Time {
	return service/percent*100 + service%percent*100/percent
}

func (fs *floors[T]) of(child *Node[T]) *floor[T] {
	for i := range fs.list {
		if fs.list[i].child == child {
			return &fs.list[i]
		}
	}
	return nil
}

// owed returns the child that is owed for longest, or nil.
func (fs *floors[T]) owed() *Node[T] {
	var first *floor[T]
	for i := range fs.list {
		if f := &fs.list[i]; f.child.active && f.tag <= fs.served && (first == nil || f.tag < first.tag) {
			first = f
		}
	}
	if first == nil {
		return nil
	}
	return first.child
}

// activate makes the tag of a child that becomes backlogged not less than the service: it has no credit from idle time.
func (fs *floors[T]) activate(child *Node[T]) {
	if f := fs.of(child); f != nil {
		f.tag = max(f.tag, fs.served)
		f.since = f.tag
	}
}

// jumps reports whether child is served out of turn, because it is owed.
func (fs *floors[T]) jumps(child *Node[T]) bool {
	f := fs.of(child)
	turns := child.parent.activeChildren
	return f != nil && f.tag <= fs.served && len(turns) > 0 && turns[0] != child
}

// charge adds service of child.
func (fs *floors[T]) charge(child *Node[T], service leaky.Time) {
	if f := fs.of(child); f != nil {
		f.tag = max(f.tag, min(f.tag, fs.served)+part(service, f.percent))
	}
	fs.served += service
}

// adjust corrects the service of child, by less than one unit. A child that is owed gets back what it was not served, or it would have less
// than its floor where units turn out smaller than expected. It gets no credit from before it became backlogged.
func (fs *floors[T]) adjust(child *Node[T], by leaky.Time) {
	if int64(by) >= 0 {
		fs.charge(child, by)
		return
	}
	fs.served += by
	if f := fs.of(child); f != nil {
		f.tag = max(f.tag-min(f.tag, part(-by, f.percent)), min(f.tag, f.since, fs.served))
	}
}

// spares reports whether the queue of child, with a unit of cost more if that is not 0, is no more than the floor of child is of all queues:
// then nothing of it is dropped. Neither is a single unit of a child that is owed, or it had nothing where few units may wait.
func (fs *floors[T]) spares(child *Node[T], more leaky.Time) bool {
	f := fs.of(child)
	if f == nil {
		return false
	}
	single := child.droppable == 0 || child.droppable == 1 && more == 0
	return single && f.tag <= fs.served || (child.backlog+more)*100 <= (child.parent.backlog+more)*f.percent
}

// longest returns the child of n with the longest queue for its weight, as of index i in the heap of these, that no floor spares, or nil.
func (n *Node[T]) longest(i int) *Node[T] {
	if i >= len(n.longestChildren) {
		return nil
	}
	c := n.longestChildren[i]
	if !n.floors.spares(c, 0) {
		return c
	}
	a, b := n.longest(2*i+1), n.longest(2*i+2)
	if a == nil || b != nil && (byBacklog[T]{}).Less(b, a) {
		return b
	}
	return a
}
