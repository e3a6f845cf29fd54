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
	longest ranking[source, byWaiters] // sources with waiters
}

// source is the queue of one source address at one gate.
type source struct {
	addr       netip.Addr
	gate       *gate
	head, tail *entrant
	len        int
	next, prev *source // in the ring of the gate's turns
	index      int     // in room.longest
}

// enqueue has e wait in its source's queue at gt. When the room is full it takes the
// place of the newest waiter of the source with the most, unless that is its own.
func (g *gates) enqueue(gt *gate, e *entrant, now leaky.Time) bool {
	addr := turnAddr(e.flow.Source)
	src, rm := gt.sources[addr], gt.room
	own := 0
	if src != nil {
		own = src.len
	}
	if rm.waiting >= e.limit.MaxWaiting {
		if len(rm.longest) == 0 || rm.longest[0].len <= own+1 {
			return false
		}
		last := rm.longest[0].tail
		at := last.source.gate
		g.unqueue(last)
		g.refuse(last, at, shaper.WaitingFull, now)
		src = gt.sources[addr] // others may have gone on, and queued
	}
	if src == nil {
		src = gt.newSource(addr)
	}
	e.source, e.prev, e.next = src, src.tail, nil
	if src.head == nil {
		src.head = e
	} else {
		src.tail.next = e
	}
	src.tail = e
	src.len++
	heap.Fix(&rm.longest, src.index)
	rm.waiting++
	gt.waiting++
	gt.state.Waiting.Add(1)
	return true
}

// newSource adds a source without waiters, whose turn is the last one.
func (gt *gate) newSource(addr netip.Addr) *source {
	src := &source{addr: addr, gate: gt}
	if gt.sources == nil {
		gt.sources = map[netip.Addr]*source{}
	}
	gt.sources[addr] = src
	heap.Push(&gt.room.longest, src)
	if gt.turn == nil {
		src.next, src.prev = src, src
		gt.turn = src
		return src
	}
	src.next, src.prev = gt.turn, gt.turn.prev
	src.prev.next, src.next.prev = src, src
	return src
}

// remove takes e out of the queue of its source.
func (s *source) remove(e *entrant) {
	if e.prev == nil {
		s.head = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		s.tail = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.next, e.prev = nil, nil
	s.len--
	gt := s.gate
	gt.room.waiting--
	gt.waiting--
	gt.state.Waiting.Add(-1)
	if s.len > 0 {
		heap.Fix(&gt.room.longest, s.index)
		return
	}
	heap.Remove(&gt.room.longest, s.index)
	delete(gt.sources, s.addr)
	s.prev.next, s.next.prev = s.next, s.prev
	switch {
	case s.next == s:
		gt.turn = nil
	case gt.turn == s:
		gt.turn = s.next
	}
}

// turnAddr is the source that takes turns: an address, or what one IPv6
// subscriber has at least.
func turnAddr(a netip.Addr) netip.Addr {
	if a.Is4() {
		return a
	}
	return netip.PrefixFrom(a, 64).Masked().Addr()
}

// byWaiters has the source with the most waiters first.
type byWaiters struct{}

func (byWaiters) before(a, b *source) bool { return a.len > b.len }
func (byWaiters) place(s *source) *int     { return &s.index }
