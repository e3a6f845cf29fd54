package conn

import (
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// tree is two levels of nodes, and a naive model of them.
type tree struct {
	root    node
	sources [5]*node
	leaves  [5][4]*node
	queued  map[*node][]*unit
}

func newTree() *tree {
	t := &tree{queued: map[*node][]*unit{}}
	for i := range t.sources {
		t.sources[i] = &node{parent: &t.root}
		for j := range t.leaves[i] {
			t.leaves[i][j] = &node{parent: t.sources[i]}
		}
	}
	return t
}

// depth is the cost of the droppable units of a leaf.
func (t *tree) depth(leaf *node) (sum leaky.Time) {
	for _, u := range t.queued[leaf] {
		if u.droppable {
			sum += u.cost
		}
	}
	return sum
}

// check compares the nodes with the model.
func (t *tree) check(fatal func(...any)) {
	var next *node // the source with the lowest start tag, then its leaf
	var deepest leaky.Time
	for i, share := range t.sources {
		var sum leaky.Time
		units := 0
		for _, leaf := range t.leaves[i] {
			units += len(t.queued[leaf])
			sum += t.depth(leaf)
			at := leaf.head
			for _, u := range t.queued[leaf] {
				if at != u {
					fatal("a queue is out of order")
				}
				at = at.next
			}
			if at != nil || leaf.hasUnits() != (len(t.queued[leaf]) > 0) {
				fatal("a leaf has a unit that is not its own")
			}
		}
		if share.hasUnits() != (units > 0) || share.backlog != sum {
			fatal("the backlog of a source is ", share.backlog, ", want ", sum)
		}
		deepest = max(deepest, sum)
		if units > 0 && (next == nil || byStart{}.less(share, next)) {
			next = share
		}
	}
	if len(t.root.longestChildren) > 0 && t.root.longestChildren[0].backlog != deepest {
		fatal("the largest backlog of a source is ", t.root.longestChildren[0].backlog, ", want ", deepest)
	}
	if next == nil {
		if t.root.nextUnit() != nil {
			fatal("an empty tree has a first unit")
		}
		return
	}
	if t.root.activeChildren[0] != next {
		fatal("the turn is another source's")
	}
	first := t.root.nextUnit()
	for _, leaf := range next.activeChildren {
		if (byStart{}).less(leaf, next.activeChildren[0]) {
			fatal("the turn is another leaf's")
		}
	}
	if first == nil || t.queued[next.activeChildren[0]][0] != first {
		fatal("the first unit is not that of the first leaf")
	}
}

func TestNode_AgainstModel(t *testing.T) {
	rnd := testutil.Rand(t)
	tr := newTree()
	var served, dropped, withdrawn int
	for range 100_000 {
		leaf := tr.leaves[rnd.IntN(5)][rnd.IntN(4)]
		q := tr.queued[leaf]
		switch n := rnd.IntN(10); {
		case n < 5:
			u := &unit{cost: leaky.Time(1 + rnd.IntN(1000)), droppable: rnd.IntN(4) > 0}
			leaf.push(u)
			tr.queued[leaf] = append(q, u)
		case n < 8:
			u := tr.root.nextUnit()
			if u == nil {
				continue
			}
			for l, q := range tr.queued {
				if len(q) > 0 && q[0] == u {
					leaf = l
				}
			}
			leaf.beginService(u)
			tr.queued[leaf] = tr.queued[leaf][1:]
			leaf.charge(u.cost)
			leaf.endService()
			served++
		case n < 9 && len(q) > 0:
			i := rnd.IntN(len(q))
			leaf.remove(q[i])
			tr.queued[leaf] = append(q[:i:i], q[i+1:]...)
			withdrawn++
		case n == 9:
			victim := tr.root.longestQueue(leaf, 500)
			if victim == nil {
				continue
			}
			if victim == leaf || tr.depth(victim) == 0 {
				t.Fatal("the longest queue is its own, or has nothing to drop")
			}
			q := tr.queued[victim]
			i := len(q) - 1
			for !q[i].droppable {
				i--
			}
			victim.remove(q[i])
			tr.queued[victim] = append(q[:i:i], q[i+1:]...)
			dropped++
		}
		tr.check(t.Fatal)
	}
	if served == 0 || dropped == 0 || withdrawn == 0 {
		t.Errorf("%d served, %d dropped, %d withdrawn", served, dropped, withdrawn)
	}
}

// A flow that returns after an idle time has no credit, and one that has used much is still charged
// for it.
func TestNode_IdleFlowGainsNoCredit(t *testing.T) {
	tr := newTree()
	a, b := tr.leaves[0][0], tr.leaves[1][0]
	serve := func(leaf *node) {
		u := tr.root.nextUnit()
		if u != leaf.head {
			t.Fatal("the turn is the other one's")
		}
		leaf.beginService(u)
		leaf.charge(100)
		leaf.endService()
	}
	for range 10 {
		a.push(&unit{})
		serve(a)
	}
	for range 3 {
		b.push(&unit{})
		a.push(&unit{})
	}
	// b has been idle for long: it starts where a is, and the one that became active first wins the
	// tie.
	serve(b)
	serve(a)
	serve(b)
	serve(a)
	serve(b)
	serve(a)
}
