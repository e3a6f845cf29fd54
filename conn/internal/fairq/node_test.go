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
	var next *Node[item]    // the source with the lowest start tag, then its leaf
	var deepest *Node[item] // for its weight
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
		if deepest == nil || sum*deepest.weight > deepest.backlog*share.weight {
			deepest = share
		}
		if units > 0 && (next == nil || (byStart[item]{}).Less(share, next)) {
			next = share
		}
	}
	var weights leaky.Time
	for _, c := range t.root.activeChildren {
		weights += c.weight
	}
	if t.root.activeWeight != weights {
		fatal("the sources that take turns weigh ", weights, ", not ", t.root.activeWeight)
	}
	if all := t.root.longestChildren; len(all) > 0 && all[0].backlog*deepest.weight != deepest.backlog*all[0].weight {
		fatal("the largest backlog of a source is ", all[0].backlog, " for the weight ", all[0].weight, ", want ", deepest.backlog, " for ", deepest.weight)
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
	var served, dropped, withdrawn, changed int
	for range 100_000 {
		if rnd.IntN(20) == 0 {
			source := tr.sources[rnd.IntN(5)]
			before := (source.startTag - tr.root.virtualTime) * source.weight
			source.SetWeight(1 + rnd.IntN(20))
			after := (source.startTag-tr.root.virtualTime)*source.weight + leaky.Time(source.remains)
			if source.active && source.startTag > 0 && int64(after-before) >= 20 || int64(after) > 1000+20 {
				t.Fatalf("a source that was %d of service ahead is %d after a change of its weight", int64(before), int64(after))
			}
			changed++
			tr.check(t.Fatal)
		}
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
	if served == 0 || dropped == 0 || withdrawn == 0 || changed == 0 {
		t.Errorf("%d served, %d dropped, %d withdrawn, %d weights changed", served, dropped, withdrawn, changed)
	}
}

// What is served of nodes that always have units is as their weights, at any size of the units: also at one that is
// less than a weight.
func TestNode_ServesByWeight(t *testing.T) {
	for _, cost := range []leaky.Time{1, 7, 1000, 1 << 40} {
		tr := newTree()
		var served [3]int
		for i, weight := range []int{1, 7, 100} {
			tr.sources[i].SetWeight(weight)
			for range 2 {
				u := new(item)
				tr.leaves[i][0].Push(&u.link, u, 0)
			}
		}
		for range 10_800 {
			u := tr.root.Next()
			for i := range served {
				if leaf := tr.leaves[i][0]; leaf.units.First() == u {
					leaf.BeginService(&u.link, 0)
					leaf.Push(&u.link, u, 0)
					leaf.Charge(cost)
					leaf.EndService()
					served[i]++
				}
			}
		}
		for i, want := range []int{100, 700, 10_000} {
			if off := served[i] - want; off < -2 || off > 2 {
				t.Errorf("units of %d: %v were served, want 100, 700 and 10000", cost, served)
			}
		}
	}
}

// A node whose weight becomes less when it lags most waits no longer than for its lag.
func TestNode_LessWeightEarly(t *testing.T) {
	tr := newTree()
	tr.sources[0].SetWeight(100)
	for i := range 2 {
		for range 200 {
			u := new(item)
			tr.leaves[1-i][0].Push(&u.link, u, 0)
		}
	}
	u := tr.root.Next()
	tr.leaves[1][0].BeginService(&u.link, 0)
	tr.leaves[1][0].Charge(1000)
	tr.leaves[1][0].EndService()
	tr.sources[0].SetWeight(1)
	if tr.root.Next() != tr.leaves[0][0].units.First() {
		t.Error("a node that lags does not have the turn")
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
