package conn

// indexedHeap is a container/heap whose elements know their index. The first in the order O is at the
// top.
type indexedHeap[T any, O heapOrder[T]] []*T

// heapOrder is the order of a heap, and where its elements keep their index.
type heapOrder[T any] interface {
	less(a, b *T) bool
	index(*T) *int
}

func (r indexedHeap[T, O]) Len() int { return len(r) }

func (r indexedHeap[T, O]) Less(i, j int) bool {
	var o O
	return o.less(r[i], r[j])
}

func (r indexedHeap[T, O]) Swap(i, j int) {
	var o O
	r[i], r[j] = r[j], r[i]
	*o.index(r[i]), *o.index(r[j]) = i, j
}

func (r *indexedHeap[T, O]) Push(x any) {
	var o O
	e := x.(*T)
	*o.index(e) = len(*r)
	*r = append(*r, e)
}

func (r *indexedHeap[T, O]) Pop() any {
	last := len(*r) - 1
	e := (*r)[last]
	(*r)[last] = nil
	*r = (*r)[:last]
	return e
}
