package fairq

import (
	"slices"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// item is a unit of the tests.
type item struct {
	link      Link[item]
	cost      leaky.Time
	droppable bool
}

func (u *item) backlog() leaky.Time {
	if u.droppable {
		return u.cost
	}
	return 0
}

// tree is two levels of nodes, and a naive model of them.
type tree struct {
	root    Node[item]
	sources [5]*Node[item]
	leaves  [5][4]*Node[item]
	queued  map[*Node[item]][]*item
}

func newTree() *tree {
	t := &tree{queued: map[*Node[item]][]*item{}}
	for i := range t.sources {
		source := t.root.Child()
		t.sources[i] = &source
		for j := range t.leaves[i] {
			leaf := source.Child()
			t.leaves[i][j] = &leaf
		}
	}
	return t
}

// depth is the cost of the droppable units of a leaf.
func (t *tree) depth(leaf *Node[item]) (sum leaky.Time) {
	for _, u := range t.queued[leaf] {
		if u.droppable {
			sum += u.cost
		}
	}
	return sum
}

// check compares the nodes with the model.
func (t *tree) check(fatal func(...any)) {
	var next *Node[item] // the source with the lowest start tag, then its leaf
	var deepest leaky.Time
	for i, share := range t.sources {
		var sum leaky.Time
		units := 0
		for _, leaf := range t.leaves[i] {
			units += len(t.queued[leaf])
			sum += t.depth(leaf)
			if !slices.Equal(slices.Collect(leaf.units.All()), t.queued[leaf]) {
				fatal("a queue is out of order")
			}
			if leaf.HasUnits() != (len(t.queued[leaf]) > 0) {
				fatal("a leaf has a unit that is not its own")
			}
		}
		if share.HasUnits() != (units > 0) || share.backlog != sum {
			fatal("the backlog of a source is ", share.backlog, ", want ", sum)
		}
		deepest = max(deepest, sum)
		if units > 0 && (next == nil || (byStart[item]{}).Less(share, next)) {
			next = share
		}
	}
	if len(t.root.longestChildren) > 0 && t.root.longestChildren[0].backlog != deepest {
		fatal("the largest backlog of a source is ", t.root.longestChildren[0].backlog, ", want ", deepest)
	}
	if next == nil {
		if t.root.Next() != nil {
			fatal("an empty tree has a first unit")
		}
		return
	}
	if t.root.activeChildren[0] != next {
		fatal("the turn is another source's")
	}
	first := t.root.Next()
	for _, leaf := range next.activeChildren {
		if (byStart[item]{}).Less(leaf, next.activeChildren[0]) {
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
			u := &item{cost: leaky.Time(1 + rnd.IntN(1000)), droppable: rnd.IntN(4) > 0}
			leaf.Push(&u.link, u, u.backlog())
			tr.queued[leaf] = append(q, u)
		case n < 8:
			u := tr.root.Next()
			if u == nil {
				continue
			}
			for l, q := range tr.queued {
				if len(q) > 0 && q[0] == u {
					leaf = l
				}
			}
			leaf.BeginService(&u.link, u.backlog())
			tr.queued[leaf] = tr.queued[leaf][1:]
			leaf.Charge(u.cost)
			leaf.EndService()
			served++
		case n < 9 && len(q) > 0:
			i := rnd.IntN(len(q))
			leaf.Remove(&q[i].link, q[i].backlog())
			tr.queued[leaf] = append(q[:i:i], q[i+1:]...)
			withdrawn++
		case n == 9:
			victim := tr.root.Longest(leaf, 500)
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
			victim.Remove(&q[i].link, q[i].backlog())
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
	push := func(leaf *Node[item]) {
		u := new(item)
		leaf.Push(&u.link, u, 0)
	}
	serve := func(leaf *Node[item]) {
		u := tr.root.Next()
		if u != leaf.units.First() {
			t.Fatal("the turn is the other one's")
		}
		leaf.BeginService(&u.link, u.backlog())
		leaf.Charge(100)
		leaf.EndService()
	}
	for range 10 {
		push(a)
		serve(a)
	}
	for range 3 {
		push(b)
		push(a)
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
