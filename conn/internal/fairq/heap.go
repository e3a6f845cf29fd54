package fairq

// Heap is a binary heap whose elements know their index. The first in the order O is at index 0.
type Heap[T any, O Order[T]] []*T

// Order is the order of a heap, and where its elements keep their index.
type Order[T any] interface {
	Less(a, b *T) bool
	Index(*T) *int
}

// Push adds e.
func (h *Heap[T, O]) Push(e *T) {
	var o O
	i := len(*h)
	*o.Index(e) = i
	*h = append(*h, e)
	h.up(i)
}

// Remove removes e.
func (h *Heap[T, O]) Remove(e *T) {
	var o O
	i, last := *o.Index(e), len(*h)-1
	moved := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	if i != last {
		(*h)[i], *o.Index(moved) = moved, i
		h.Fix(moved)
	}
}

// Fix restores the order after e has changed.
func (h Heap[T, O]) Fix(e *T) {
	var o O
	if i := *o.Index(e); !h.down(i) {
		h.up(i)
	}
}

func (h Heap[T, O]) up(i int) {
	var o O
	for i > 0 {
		parent := (i - 1) / 2
		if !o.Less(h[i], h[parent]) {
			return
		}
		h.swap(i, parent)
		i = parent
	}
}

// down reports whether the element at i has moved.
func (h Heap[T, O]) down(i int) bool {
	var o O
	start := i
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if right := child + 1; right < len(h) && o.Less(h[right], h[child]) {
			child = right
		}
		if !o.Less(h[child], h[i]) {
			break
		}
		h.swap(i, child)
		i = child
	}
	return i > start
}

func (h Heap[T, O]) swap(i, j int) {
	var o O
	h[i], h[j] = h[j], h[i]
	*o.Index(h[i]), *o.Index(h[j]) = i, j
}
