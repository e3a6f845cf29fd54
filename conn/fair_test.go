package conn

import (
	"testing"

	"shaperd/leaky"
)

// tree is nodes of two levels, and what a simple mind would have done.
type tree struct {
	root   node
	shares [5]*node
	leaves [5][4]*node
	queued map[*node][]*unit
}

func newTree() *tree {
	t := &tree{queued: map[*node][]*unit{}}
	for i := range t.shares {
		t.shares[i] = &node{parent: &t.root}
		for j := range t.leaves[i] {
			t.leaves[i][j] = &node{parent: t.shares[i]}
		}
	}
	return t
}

// depth is what the droppable units of a leaf cost.
func (t *tree) depth(leaf *node) (sum leaky.Time) {
	for _, u := range t.queued[leaf] {
		if u.droppable {
			sum += u.cost
		}
	}
	return sum
}

// check compares the tree with what is in the queues.
func (t *tree) check(fatal func(...any)) {
	var next *node // the share that starts first, then its leaf
	var deepest leaky.Time
	for i, share := range t.shares {
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
			if at != nil || leaf.active() != (len(t.queued[leaf]) > 0) {
				fatal("a leaf has what it should not")
			}
		}
		if share.active() != (units > 0) || share.depth != sum {
			fatal("a share's depth is ", share.depth, ", want ", sum)
		}
		deepest = max(deepest, sum)
		if units > 0 && (next == nil || byStart{}.before(share, next)) {
			next = share
		}
	}
	if len(t.root.depths) > 0 && t.root.depths[0].depth != deepest {
		fatal("the deepest share has ", t.root.depths[0].depth, ", want ", deepest)
	}
	if next == nil {
		if t.root.first() != nil {
			fatal("an empty tree has a first unit")
		}
		return
	}
	if t.root.starts[0] != next {
		fatal("it is another share's turn")
	}
	first := t.root.first()
	for _, leaf := range next.starts {
		if (byStart{}).before(leaf, next.starts[0]) {
			fatal("it is another leaf's turn")
		}
	}
	if first == nil || t.queued[next.starts[0]][0] != first {
		fatal("the first unit is not that of the first leaf")
	}
}

func TestTurnsAgainstQueues(t *testing.T) {
	rnd := newRand(t)
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
			u := tr.root.first()
			if u == nil {
				continue
			}
			for l, q := range tr.queued {
				if len(q) > 0 && q[0] == u {
					leaf = l
				}
			}
			leaf.serve(u)
			tr.queued[leaf] = tr.queued[leaf][1:]
			leaf.charge(u.cost)
			leaf.done()
			served++
		case n < 9 && len(q) > 0:
			i := rnd.IntN(len(q))
			leaf.remove(q[i])
			tr.queued[leaf] = append(q[:i:i], q[i+1:]...)
			withdrawn++
		case n == 9:
			victim := tr.root.deepest(leaf, 500)
			if victim == nil {
				continue
			}
			if victim == leaf || tr.depth(victim) == 0 {
				t.Fatal("the longest queue is the own one, or has nothing to drop")
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

// One that comes back after a rest has nothing saved up, and one that used much has
// not been forgiven.
func TestRestIsNoCredit(t *testing.T) {
	tr := newTree()
	a, b := tr.leaves[0][0], tr.leaves[1][0]
	serve := func(leaf *node) {
		u := tr.root.first()
		if u != leaf.head {
			t.Fatal("it is the other one's turn")
		}
		leaf.serve(u)
		leaf.charge(100)
		leaf.done()
	}
	for range 10 {
		a.push(&unit{})
		serve(a)
	}
	for range 3 {
		b.push(&unit{})
		a.push(&unit{})
	}
	// b has not sent for long: it starts where a is, and a tie goes to who came first.
	serve(b)
	serve(a)
	serve(b)
	serve(a)
	serve(b)
	serve(a)
}
