package fairq

import "iter"

// List is a doubly linked list whose links are in its items, so that adding one allocates nothing.
type List[T any] struct{ first, last *Link[T] }

// Link is the place of an item in a list.
type Link[T any] struct {
	item       *T
	next, prev *Link[T]
}

// Push appends item, whose link k is in no list.
func (l *List[T]) Push(k *Link[T], item *T) {
	k.item, k.prev, k.next = item, l.last, nil
	if l.last == nil {
		l.first = k
	} else {
		l.last.next = k
	}
	l.last = k
}

// PushBefore inserts item, whose link k is in no list, before those at the end for which later holds.
func (l *List[T]) PushBefore(k *Link[T], item *T, later func(*T) bool) {
	after := l.last
	for after != nil && later(after.item) {
		after = after.prev
	}
	next := l.first
	if after != nil {
		next = after.next
	}
	k.item, k.prev, k.next = item, after, next
	if after == nil {
		l.first = k
	} else {
		after.next = k
	}
	if next == nil {
		l.last = k
	} else {
		next.prev = k
	}
}

// Remove removes the item of k.
func (l *List[T]) Remove(k *Link[T]) {
	if k.prev == nil {
		l.first = k.next
	} else {
		k.prev.next = k.next
	}
	if k.next == nil {
		l.last = k.prev
	} else {
		k.next.prev = k.prev
	}
	*k = Link[T]{}
}

// Empty reports whether l has no items.
func (l *List[T]) Empty() bool { return l.first == nil }

// First returns the first item, or nil.
func (l *List[T]) First() *T {
	if l.first == nil {
		return nil
	}
	return l.first.item
}

// Last returns the last item, or nil.
func (l *List[T]) Last() *T {
	if l.last == nil {
		return nil
	}
	return l.last.item
}

// All returns the items from the first to the last. None may be removed meanwhile.
func (l *List[T]) All() iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for k := l.first; k != nil && yield(k.item); k = k.next {
		}
	}
}

// Backward returns the items from the last to the first. None may be removed meanwhile.
func (l *List[T]) Backward() iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for k := l.last; k != nil && yield(k.item); k = k.prev {
		}
	}
}
