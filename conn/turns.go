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
	longest sourceHeap // sources with waiters
}

// source is the queue of one source address at one gate.
type source struct {
	addr    netip.Addr
	gate    *gate
	waiters []*waiter
	index   int // in room.longest
}

type waiter struct {
	source  *source
	since   leaky.Time
	decided chan struct{} // closed when granted or refused
	refused shaper.Reason
	granted bool
}

// enqueue adds w to its source's queue. When the room is full it takes the place
// of the newest waiter of the source with the most, unless that is its own.
func (gt *gate) enqueue(w *waiter, addr netip.Addr, maxWaiting int) bool {
	addr = turnAddr(addr)
	rm := gt.room
	src := gt.sources[addr]
	own := 0
	if src != nil {
		own = len(src.waiters)
	}
	if rm.waiting >= maxWaiting {
		if len(rm.longest) == 0 || len(rm.longest[0].waiters) <= own+1 {
			return false
		}
		longest := rm.longest[0]
		last := longest.waiters[len(longest.waiters)-1]
		longest.remove(last)
		last.refused = shaper.WaitingFull
		close(last.decided)
	}
	if src == nil {
		src = &source{addr: addr, gate: gt}
		gt.sources[addr] = src
		gt.turns = append(gt.turns, src)
		heap.Push(&rm.longest, src)
	}
	w.source = src
	src.waiters = append(src.waiters, w)
	heap.Fix(&rm.longest, src.index)
	rm.waiting++
	gt.state.Waiting.Add(1)
	return true
}

// pop takes the waiter whose turn it is.
func (gt *gate) pop() *waiter {
	src := gt.turns[0]
	w := src.waiters[0]
	gt.turns = append(gt.turns[1:], src)
	src.remove(w)
	return w
}

// remove takes w out of the queue of its source.
func (s *source) remove(w *waiter) {
	i := 0
	for s.waiters[i] != w {
		i++
	}
	s.waiters = append(s.waiters[:i], s.waiters[i+1:]...)
	rm := s.gate.room
	rm.waiting--
	s.gate.state.Waiting.Add(-1)
	if len(s.waiters) > 0 {
		heap.Fix(&rm.longest, s.index)
		return
	}
	heap.Remove(&rm.longest, s.index)
	delete(s.gate.sources, s.addr)
	for i, t := range s.gate.turns {
		if t == s {
			s.gate.turns = append(s.gate.turns[:i], s.gate.turns[i+1:]...)
			break
		}
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

// sourceHeap has the source with the most waiters first.
type sourceHeap []*source

func (h sourceHeap) Len() int           { return len(h) }
func (h sourceHeap) Less(i, j int) bool { return len(h[i].waiters) > len(h[j].waiters) }
func (h sourceHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *sourceHeap) Push(x any) {
	s := x.(*source)
	s.index = len(*h)
	*h = append(*h, s)
}

func (h *sourceHeap) Pop() any {
	old := *h
	s := old[len(old)-1]
	*h = old[:len(old)-1]
	return s
}
