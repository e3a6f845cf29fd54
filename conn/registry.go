package conn

// registry is all connections of one kind. They can be looked at a few at a time, while
// others come and go. It belongs to the loop's thread.
type registry[T enroller] struct {
	all  []T
	byID map[uint64]T
}

// enroller is a connection that can be in a registry.
type enroller interface {
	comparable
	enrolment() *enrolled
}

// enrolled is what a registry knows of one of its connections.
type enrolled struct {
	id    uint64
	index int
	shown uint64 // the last listing that it was in
}

func (e *enrolled) enrolment() *enrolled { return e }

func (r *registry[T]) add(x T, id uint64) {
	if r.byID == nil {
		r.byID = map[uint64]T{}
	}
	*x.enrolment() = enrolled{id: id, index: len(r.all)}
	r.all = append(r.all, x)
	r.byID[id] = x
}

func (r *registry[T]) remove(x T) {
	i, last := x.enrolment().index, len(r.all)-1
	r.all[i] = r.all[last]
	r.all[i].enrolment().index = i
	var none T
	r.all[last] = none
	r.all = r.all[:last]
	delete(r.byID, x.enrolment().id)
}

// before returns a connection that comes before *at, which is to be toAll at first, and
// moves it there; false when there is none. Those that are there from the first call to the
// last one are all returned, some of them twice; those that come meanwhile are not.
func (r *registry[T]) before(at *int) (x T, ok bool) {
	if *at = min(*at, len(r.all)); *at == 0 {
		return x, false
	}
	*at--
	return r.all[*at], true
}

// toAll is where a walk begins.
const toAll = int(^uint(0) >> 1)

// each calls f for all connections, which may end them.
func (r *registry[T]) each(f func(T)) {
	at := toAll
	for x, ok := r.before(&at); ok; x, ok = r.before(&at) {
		f(x)
	}
}
