// Owner: the loop's thread.

package conn

// registry holds all connections of one kind. It can be walked a few entries at a time while
// others are added and removed.
type registry[T registered] struct {
	all  []T
	byID map[uint64]T
}

// registered is a connection that can be in a registry.
type registered interface {
	comparable
	entry() *registryEntry
}

// registryEntry is a registry's data about one connection, embedded in it.
type registryEntry struct {
	id      uint64
	index   int    // in registry.all
	listing uint64 // number of the last listing that included it
}

func (e *registryEntry) entry() *registryEntry { return e }

func (r *registry[T]) add(x T, id uint64) {
	if r.byID == nil {
		r.byID = map[uint64]T{}
	}
	*x.entry() = registryEntry{id: id, index: len(r.all)}
	r.all = append(r.all, x)
	r.byID[id] = x
}

func (r *registry[T]) remove(x T) {
	i, last := x.entry().index, len(r.all)-1
	r.all[i] = r.all[last]
	r.all[i].entry().index = i
	var none T
	r.all[last] = none
	r.all = r.all[:last]
	delete(r.byID, x.entry().id)
}

// absorb takes over the connections of o.
func (r *registry[T]) absorb(o *registry[T]) {
	if r.byID == nil {
		r.byID = map[uint64]T{}
	}
	for _, x := range o.all {
		x.entry().index = len(r.all)
		r.all = append(r.all, x)
		r.byID[x.entry().id] = x
	}
	*o = registry[T]{}
}

// prev moves *at, which must be fromEnd at first, one entry back and returns the connection
// there, or false at the beginning. Connections that exist throughout the walk are all
// returned, some of them twice; those added during the walk are not.
func (r *registry[T]) prev(at *int) (x T, ok bool) {
	if *at = min(*at, len(r.all)); *at == 0 {
		return x, false
	}
	*at--
	return r.all[*at], true
}

// fromEnd is the start position of a walk.
const fromEnd = int(^uint(0) >> 1)

// each calls f for all connections, which may end them.
func (r *registry[T]) each(f func(T)) {
	at := fromEnd
	for x, ok := r.prev(&at); ok; x, ok = r.prev(&at) {
		f(x)
	}
}
