package fairq

import (
	"math/rand/v2"
	"slices"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// largest is the cost of the largest unit of these tests.
const largest = 1000

// floorTree is a root with some leaves of its own, and with nodes with floors that have others.
type floorTree struct {
	root    Node[item]
	own     [3]*Node[item]
	classes [3]*Node[item]
	percent [3]int
	leaves  [3][4]*Node[item]
	most    leaky.Time   // that backlogged children of the root ever weighed
	all     float64      // service
	served  [3]float64   // of classes
	low     [3]float64   // the least of what a class is owed since it became backlogged
	jumps   map[bool]int // services by whether they were out of turn
}

func newFloorTree(percent [3]int) *floorTree {
	t := &floorTree{percent: percent, jumps: map[bool]int{}}
	for i := range t.own {
		leaf := t.root.Child()
		t.own[i] = &leaf
	}
	for c := range t.classes {
		class := t.root.Child()
		t.classes[c] = &class
		class.SetFloor(percent[c])
		for i := range t.leaves[c] {
			leaf := class.Child()
			t.leaves[c][i] = &leaf
		}
	}
	return t
}

// any returns a random leaf.
func (t *floorTree) any(rnd *rand.Rand) *Node[item] {
	if rnd.IntN(3) == 0 {
		return t.own[rnd.IntN(len(t.own))]
	}
	return t.leaves[rnd.IntN(3)][rnd.IntN(4)]
}

func (t *floorTree) push(leaf *Node[item], cost leaky.Time) {
	u := &item{cost: cost, droppable: cost%2 == 0}
	leaf.Push(&u.link, u, u.backlog())
}

// begin takes the unit whose turn it is.
func (t *floorTree) begin() (*Node[item], *item) {
	u := t.root.Next()
	for _, leaf := range t.everyLeaf() {
		if u != nil && leaf.units.First() == u {
			at := leaf
			for at.parent != &t.root {
				at = at.parent
			}
			t.jumps[t.root.activeChildren[0] != at]++
			leaf.BeginService(&u.link, u.backlog())
			return leaf, u
		}
	}
	return nil, nil
}

func (t *floorTree) everyLeaf() []*Node[item] {
	all := slices.Clone(t.own[:])
	for c := range t.leaves {
		all = append(all, t.leaves[c][:]...)
	}
	return all
}

func (t *floorTree) end(leaf *Node[item], cost leaky.Time) {
	leaf.Charge(cost)
	t.note(leaf, cost)
	leaf.EndService()
}

// note records a service.
func (t *floorTree) note(leaf *Node[item], cost leaky.Time) {
	t.all += float64(cost)
	for c, class := range t.classes {
		if leaf.parent == class {
			t.served[c] += float64(cost)
		}
	}
}

// checkFloors checks that a class that is backlogged gets its part of all service, but for one unit of its own, and the part of one of
// each class with a floor and of one more.
func (t *floorTree) checkFloors(fatal func(string, ...any)) {
	for c, class := range t.classes {
		f := float64(t.percent[c]) / 100
		lag := f*t.all - t.served[c]
		if !class.active {
			t.low[c] = lag
			continue
		}
		t.low[c] = min(t.low[c], lag)
		if most := (f*float64(len(t.classes)+1) + 1) * largest; lag-t.low[c] > most+1 {
			fatal("class %d is owed %.2f units, want at most %.2f", c, (lag-t.low[c])/largest, most/largest)
		}
	}
}

// checkTags checks the lemmas of package conn: of any children that take turns, the lags times the weights add up to no more than F of
// what they weigh.
func (t *floorTree) checkTags(fatal func(string, ...any)) {
	r := &t.root
	t.most = max(t.most, r.activeWeight)
	byLag := slices.Clone([]*Node[item](r.activeChildren))
	slices.SortFunc(byLag, func(a, b *Node[item]) int { return int(int64(a.startTag - b.startTag)) })
	var sum, weights float64
	for _, c := range byLag {
		lag := float64(int64(r.virtualTime - c.startTag))
		if -lag*float64(c.weight) > 2*largest+float64(2*c.weight) {
			fatal("a node of weight %d is %.2f units ahead", c.weight, -lag*float64(c.weight)/largest)
		}
		sum += lag * float64(c.weight)
		weights += float64(c.weight)
		most := weights
		for w := weights + 1; w <= float64(t.most); w++ {
			most += weights / w
		}
		if sum > most*largest+weights*10 {
			fatal("%.0f of weight lag %.3f units, want at most %.3f", weights, sum/largest, most)
		}
	}
	if err := r.Check(); err != nil {
		fatal("%v", err)
	}
}

// Whatever comes, goes, and changes its weight or its floor: a class has its floor, and the turns are as fair as without.
func TestFloors_AgainstChurn(t *testing.T) {
	rnd := testutil.Rand(t)
	jumped := map[bool]int{}
	for range 60 {
		var percent [3]int
		for c, left := 0, 100; c < 3; c++ {
			percent[c] = min(left, rnd.IntN(60))
			left -= percent[c]
		}
		tr := newFloorTree(percent)
		busy := 1 + rnd.IntN(12)
		for range 4000 {
			switch n := rnd.IntN(12); {
			case n < 5:
				leaf := tr.any(rnd)
				for range 1 + rnd.IntN(busy) {
					cost := leaky.Time(largest)
					if rnd.IntN(2) == 0 {
						cost = leaky.Time(1 + rnd.IntN(largest))
					}
					tr.push(leaf, cost)
				}
			case n < 10:
				for range 1 + rnd.IntN(2*busy) {
					if leaf, u := tr.begin(); u != nil {
						tr.end(leaf, u.cost)
						tr.checkFloors(t.Fatalf)
					}
				}
			case n < 11: // resets
				leaf := tr.any(rnd)
				for u := leaf.units.First(); u != nil; u = leaf.units.First() {
					leaf.Remove(&u.link, u.backlog())
				}
			default:
				tr.any(rnd).SetWeight(1 + rnd.IntN(20))
			}
			tr.checkFloors(t.Fatalf)
			tr.checkTags(t.Fatalf)
		}
		jumped[true] += tr.jumps[true]
		jumped[false] += tr.jumps[false]
	}
	if jumped[true] < 1000 || jumped[false] < 1000 {
		t.Errorf("%d units were served out of turn, %d in turn", jumped[true], jumped[false])
	}
}

// busy makes leaves have always something to send, for n services. It returns what each was served.
func (t *floorTree) busy(n int, leaves ...*Node[item]) map[*Node[item]]float64 {
	got := map[*Node[item]]float64{}
	for range n {
		for _, leaf := range leaves {
			if leaf.units.Empty() {
				t.push(leaf, largest)
			}
		}
		leaf, u := t.begin()
		if leaf.units.Empty() {
			t.push(leaf, largest)
		}
		t.end(leaf, u.cost)
		got[leaf]++
	}
	for _, leaf := range leaves {
		for u := leaf.units.First(); u != nil; u = leaf.units.First() {
			leaf.Remove(&u.link, u.backlog())
		}
	}
	return got
}

// A class has its floor or what it has by weight, whichever is more, and owes nothing for the one when the other begins.
func TestFloors_FloorOrWeight(t *testing.T) {
	tr := newFloorTree([3]int{50, 0, 0})
	gold := tr.leaves[0]
	near := func(what string, got, want float64) {
		t.Helper()
		if got < want-6 || got > want+6 {
			t.Errorf("%s: %v units, want %v", what, got, want)
		}
	}
	all := append([]*Node[item]{gold[0]}, tr.own[:]...)
	got := tr.busy(6000, all...)
	near("a class alone with its floor", got[gold[0]], 3000)
	for _, leaf := range tr.own {
		near("one of three others", got[leaf], 1000)
	}
	got = tr.busy(600, gold[0], tr.own[0])
	near("one of two", got[tr.own[0]], 300)
	tr.own[1].SetWeight(2)
	got = tr.busy(600, append(gold[:], tr.own[0], tr.own[1])...) // 4 : 1 : 2
	near("the weight 1 of 7", got[tr.own[0]], 600./7)
	near("the weight 2 of 7", got[tr.own[1]], 1200./7)
	for _, leaf := range gold {
		near("a source of a class with more than its floor", got[leaf], 600./7)
	}
	got = tr.busy(600, tr.own[0], tr.own[1])
	near("what is lent", got[tr.own[0]], 200)
	got = tr.busy(800, all...)
	near("a class that is back", got[gold[0]], 400)
	got = tr.busy(800, append(tr.own[:], gold[0], gold[1])...)
	near("a source of two", got[gold[0]], 200)
	near("the other one", got[gold[1]], 200)
}

// All of a bucket may be parts: those that have more by weight get the parts nevertheless.
func TestFloors_AllOfIt(t *testing.T) {
	tr := newFloorTree([3]int{70, 20, 10})
	for _, leaf := range tr.leaves[2] {
		leaf.SetWeight(100)
	}
	got := tr.busy(1000, append(tr.leaves[2][:], tr.own[0], tr.leaves[0][0], tr.leaves[1][0])...)
	for leaf, want := range map[*Node[item]]float64{tr.leaves[0][0]: 700, tr.leaves[1][0]: 200, tr.leaves[2][0]: 25, tr.own[0]: 0} {
		if n := got[leaf]; n < want-3 || n > want+3 {
			t.Errorf("%v units, want %v", n, want)
		}
	}
}

// Children that leave a class take with them what they lack, and do not leave it to those that stay.
func TestFloors_LeaversTakeTheirLag(t *testing.T) {
	tr := newFloorTree([3]int{1, 0, 0})
	tr.busy(100, tr.own[0])
	tr.push(tr.own[0], largest)
	for _, leaf := range tr.leaves[0] {
		tr.push(leaf, largest)
	}
	tr.root.floors.list[0].tag += 1000 * largest // it is not owed
	leaf, u := tr.begin()
	if leaf != tr.own[0] {
		t.Fatal("the turn is another one's")
	}
	tr.push(leaf, largest)
	tr.end(leaf, u.cost) // a fifth of it is due to each of five
	for _, leaf := range tr.leaves[0][1:] {
		u := leaf.units.First()
		leaf.Remove(&u.link, u.backlog())
	}
	class := tr.classes[0]
	if lag := (tr.root.virtualTime - class.startTag) * class.weight; lag != leaky.Time(largest)/5 {
		t.Errorf("the one that stays lacks %d, want %d", lag, largest/5)
	}
}

// Units whose service is taken back leave a class no credit: served out of turn, they may not have counted as turns.
func TestFloors_AdjustGivesNoCredit(t *testing.T) {
	tr := newFloorTree([3]int{90, 0, 0})
	tr.busy(100, tr.leaves[0][0], tr.own[0])
	for range 100 {
		tr.push(tr.leaves[0][0], largest)
		tr.push(tr.own[0], largest)
	}
	before, cost := tr.jumps[true], leaky.Time(largest)
	var taken []*Node[item]
	for tr.jumps[true] < before+5 {
		leaf, u := tr.begin()
		tr.end(leaf, u.cost)
		taken = append(taken, leaf)
	}
	for _, leaf := range taken[len(taken)-3:] {
		leaf.Adjust(-cost)
	}
	if class := tr.classes[0]; class.startTag < tr.root.virtualTime {
		t.Errorf("the class has a credit of %d", tr.root.virtualTime-class.startTag)
	}
}

// What waits of a class within its part of all that waits is not dropped, even if it is the longest queue; what is beyond is.
func TestFloors_SpareTheirPartOfTheQueue(t *testing.T) {
	tr := newFloorTree([3]int{30, 20, 0})
	gold, silver := tr.leaves[0][0], tr.leaves[1][0]
	for range 3 {
		tr.push(gold, 100)
	}
	tr.push(tr.own[0], 100)
	for range 2 {
		tr.push(silver, 100)
	}
	for range 3 {
		tr.push(tr.own[1], 100)
		tr.push(tr.own[2], 100)
	}
	if got := tr.root.Longest(tr.own[0], 100); got == gold || got == silver || got == nil {
		t.Error("what is dropped is of a class within its part")
	}
	tr.push(gold, 100)
	tr.push(gold, 100)
	if got := tr.root.Longest(tr.own[0], 100); got != gold {
		t.Error("what is dropped is not of the class with more than its part and for its weight")
	}
	if got := tr.root.Longest(silver, 100); got != gold {
		t.Error("a class within its part finds no space")
	}
}

// A class has its floor of what is served even if its units turn out smaller than they were charged, and no credit from before it
// was backlogged.
func TestFloors_SmallerThanExpected(t *testing.T) {
	tr := newFloorTree([3]int{30, 0, 0})
	for _, leaf := range tr.own {
		leaf.SetWeight(100)
	}
	var all, class leaky.Time
	for range 10_000 {
		for _, leaf := range append(tr.own[:], tr.leaves[0][:]...) {
			if leaf.units.Empty() {
				tr.push(leaf, largest)
			}
		}
		leaf, u := tr.begin()
		leaf.Charge(u.cost)
		cost := u.cost
		if leaf.parent == tr.classes[0] {
			cost /= 10
			leaf.Adjust(cost - u.cost)
			class += cost
		}
		leaf.EndService()
		all += cost
	}
	if got := float64(class) / float64(all); got < 0.295 || got > 0.305 {
		t.Errorf("a class with 30%% got %.1f%%", 100*got)
	}
	f := tr.root.floors.of(tr.classes[0])
	for _, leaf := range tr.leaves[0] {
		for u := leaf.units.First(); u != nil; u = leaf.units.First() {
			leaf.Remove(&u.link, u.backlog())
		}
	}
	tr.busy(100, tr.own[0])
	tr.push(tr.leaves[0][0], largest)
	unit := leaky.Time(largest)
	tr.leaves[0][0].Adjust(-unit)
	if f.tag < tr.root.floors.served {
		t.Errorf("what is taken back is a credit of %d", tr.root.floors.served-f.tag)
	}
}
