package fairq

import (
	"slices"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

type number struct{ value, index int }

type byValue struct{}

func (byValue) Less(a, b *number) bool { return a.value < b.value }
func (byValue) Index(n *number) *int   { return &n.index }

func TestHeap_AgainstMinimum(t *testing.T) {
	rnd := testutil.Rand(t)
	var h Heap[number, byValue]
	for range 100_000 {
		switch n := rnd.IntN(6); {
		case n < 2 && len(h) < 50:
			h.Push(&number{value: rnd.IntN(100)})
		case len(h) == 0:
		case n < 4:
			e := h[rnd.IntN(len(h))]
			h.Remove(e)
			if slices.Contains(h, e) {
				t.Fatal("a removed element is still there")
			}
		default:
			e := h[rnd.IntN(len(h))]
			e.value = rnd.IntN(100)
			h.Fix(e)
		}
		for i, e := range h {
			if e.index != i || e.value < h[0].value {
				t.Fatalf("element %d has index %d and value %d; the first one has %d", i, e.index, e.value, h[0].value)
			}
		}
	}
}

func TestList_AgainstSlice(t *testing.T) {
	type element struct {
		link Link[element]
		in   bool
	}
	rnd := testutil.Rand(t)
	var l List[element]
	var want []*element
	all := make([]element, 10)
	for range 10_000 {
		e := &all[rnd.IntN(len(all))]
		if e.in = !e.in; e.in {
			l.Push(&e.link, e)
			want = append(want, e)
		} else {
			l.Remove(&e.link)
			want = slices.DeleteFunc(want, func(x *element) bool { return x == e })
		}
		backward := slices.Collect(l.Backward())
		slices.Reverse(backward)
		if !slices.Equal(slices.Collect(l.All()), want) || !slices.Equal(backward, want) || l.Empty() != (len(want) == 0) {
			t.Fatal("the list differs")
		}
		if len(want) > 0 && (l.First() != want[0] || l.Last() != want[len(want)-1]) {
			t.Fatal("the first or the last element differs")
		}
	}
}
