package conn

import (
	"container/heap"
	"net/netip"

	"shaperd/leaky"
	"shaperd/shaper"
)

// room is what bounds the waiting connections of one limit, over all its keys.
type room struct {
	waiting int
	tenants map[netip.Addr]*tenant
	longest ranking[tenant, byWaiters]
}

// tenant is one source in a room, at however many gates of the limit it waits.
type tenant struct {
	sources ranking[source, byWaitersHere]
	len     int // connections
	place   int // in room.longest
}

// evict refuses the newest waiter of the source with the most.
func (g *gates) evict(rm *room, now leaky.Time) {
	src := rm.longest[0].sources[0]
	last := src.queues[len(src.queues)-1] // the newest one, if there are several, or nearly
	g.refuse(last.tail, src.gate, shaper.WaitingFull, now)
}

// enter has the connections of s that wait be in rm.
func (rm *room) enter(s *source) {
	t := rm.tenants[s.addr]
	if t == nil {
		t = &tenant{}
		if rm.tenants == nil {
			rm.tenants = map[netip.Addr]*tenant{}
		}
		rm.tenants[s.addr] = t
		heap.Push(&rm.longest, t)
	}
	s.tenant = t
	heap.Push(&t.sources, s)
}

// leave is the opposite of enter. None of s is left.
func (rm *room) leave(s *source) {
	t := s.tenant
	s.tenant = nil
	heap.Remove(&t.sources, s.index)
	if len(t.sources) == 0 {
		heap.Remove(&rm.longest, t.place)
		delete(rm.tenants, s.addr)
	}
}

// has is how many connections of a source wait in rm.
func (rm *room) has(addr netip.Addr) int {
	if t := rm.tenants[addr]; t != nil {
		return t.len
	}
	return 0
}

// byWaiters has the source first of which most connections wait in a room.
type byWaiters struct{}

func (byWaiters) before(a, b *tenant) bool { return a.len > b.len }
func (byWaiters) place(t *tenant) *int     { return &t.place }

// byWaitersHere is the same for the gates where they wait.
type byWaitersHere struct{}

func (byWaitersHere) before(a, b *source) bool { return a.len > b.len }
func (byWaitersHere) place(s *source) *int     { return &s.index }
