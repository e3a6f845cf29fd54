package conn

// ranking is a container/heap of what knows its place in it, with the first by O at the
// top.
type ranking[T any, O order[T]] []*T

// order is how a ranking ranks, and where its elements keep their place.
type order[T any] interface {
	before(a, b *T) bool
	place(*T) *int
}

func (r ranking[T, O]) Len() int { return len(r) }

func (r ranking[T, O]) Less(i, j int) bool {
	var o O
	return o.before(r[i], r[j])
}

func (r ranking[T, O]) Swap(i, j int) {
	var o O
	r[i], r[j] = r[j], r[i]
	*o.place(r[i]), *o.place(r[j]) = i, j
}

func (r *ranking[T, O]) Push(x any) {
	var o O
	e := x.(*T)
	*o.place(e) = len(*r)
	*r = append(*r, e)
}

func (r *ranking[T, O]) Pop() any {
	last := len(*r) - 1
	e := (*r)[last]
	(*r)[last] = nil
	*r = (*r)[:last]
	return e
}
