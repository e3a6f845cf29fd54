package conn

import (
	"container/heap"
	"slices"

	"shaperd/leaky"
)

// reservation is what a gate keeps for one queue.
//
// Where gates cross, each may be kept full by those who need it alone, and a queue that needs
// several would never find them open at one instant. So one whose turn at a gate is in vain for
// the second time, as another gate is shut, claims a reservation: of each of its gates the next
// slot, or the next connection of a pace, goes to nobody whose turn is later. It ends when the queue goes on, or
// lapses after as long as its turns had been in vain when it began.
//
// A reservation is a turn spent waiting, and bounded like one:
//
//   - a queue claims one only when nobody waits at its gates whose turn is earlier, but for those whose
//     source has had something reserved since;
//   - claims have one order, the same at all gates: by the turn of the queue, or the last reservation of
//     its source if that was later. So no source has a second one before the others that claim one have
//     had theirs, however many queues it has;
//   - a reservation is of all gates at once, and begins only when the claim is the first at each of them, nothing
//     there is reserved, and none of them rests. So none has a gate reserved in vain, as another gate of it
//     is kept for a third queue;
//   - after a reservation its gates rest for three times as long. So of one slot, or of a pace,
//     a quarter of the time is lost at most.
//
// The package comment says for how long one who needs several waits.
type reservation struct {
	queue  *queue                 // for which it is, or nil
	rest   leaky.Time             // until when nothing is reserved
	claims ranking[stay, byClaim] // for the next ones
}

// party is a source, at whatever gates it waits.
type party struct {
	queues   int
	reserved uint64 // turn at which a reservation for one of them ended last
}

// missed notes that it is the turn of q where it waits, in vain.
func (g *gates) missed(q *queue, now leaky.Time) {
	if q.missed == 0 {
		q.missed = now
	}
	at := &q.stays[q.pos]
	switch {
	case !at.missed:
		at.missed = true
	case q.claimed == 0 && q.reserved == 0 && !slices.ContainsFunc(q.gates, func(gt *gate) bool { return gt.precedes(q, 0) }):
		g.turn++
		q.claimed = g.turn
		for i, gt := range q.gates {
			if gt.reservable() {
				heap.Push(&gt.reserved.claims, &q.stays[i])
			}
		}
	}
}

func (gt *gate) reservable() bool { return gt.pool == nil && !gt.rule.Observe }

// precedes reports whether one waits whose turn is before that of q, of those from i down in the heap.
func (gt *gate) precedes(q *queue, i int) bool {
	if i >= len(gt.turns) || gt.turns[i].turn() >= q.turn {
		return false
	}
	return gt.turns[i].queues[0].claim() < q.turn || gt.precedes(q, 2*i+1) || gt.precedes(q, 2*i+2)
}

// claim is when it was the turn of q last, or its source had something reserved.
func (q *queue) claim() uint64 { return max(q.turn, q.party.reserved) }

// next is the queue for which gt will be reserved next, or nil.
func (gt *gate) next() *queue {
	claims := &gt.reserved.claims
	for len(*claims) > 0 {
		first := (*claims)[0]
		if claim := first.queue.claim(); first.claim < claim { // its source has had another one
			first.claim = claim
			heap.Fix(claims, 0)
			continue
		}
		return first.queue
	}
	return nil
}

// reserve begins the next reservation at gt, if it can.
func (g *gates) reserve(gt *gate, now leaky.Time) {
	q := gt.next()
	if q == nil || slices.ContainsFunc(q.gates, func(gt *gate) bool {
		r := &gt.reserved
		return gt.reservable() && (r.queue != nil || now < r.rest || gt.next() != q)
	}) {
		return
	}
	q.unclaim()
	for i := range q.stays {
		q.stays[i].turn = q.turnAt(i)
	}
	q.reserved = now
	q.lapse.Fire = func(now leaky.Time) { g.release(q, now); g.run(now) }
	g.wheel.Schedule(&q.lapse, now+now.Sub(q.missed))
	for _, gt := range q.gates {
		if gt.reservable() {
			gt.reserved.queue = q
		}
	}
}

func (q *queue) unclaim() {
	if q.claimed == 0 {
		return
	}
	q.claimed = 0
	for i, gt := range q.gates {
		if gt.reservable() {
			heap.Remove(&gt.reserved.claims, q.stays[i].rank)
		}
	}
}

// release ends what is reserved for q. Who gets it is tried in the next run.
func (g *gates) release(q *queue, now leaky.Time) {
	g.turn++
	q.party.reserved = g.turn
	for _, gt := range q.gates {
		if r := &gt.reserved; r.queue == q {
			r.queue, r.rest = nil, now+3*now.Sub(q.reserved)
			g.freed = append(g.freed, gt)
		}
	}
	q.reserved = 0
	g.wheel.Cancel(&q.lapse)
}

// renounce has q start again as one whose turns were not in vain.
func (g *gates) renounce(q *queue, now leaky.Time) {
	q.missed = 0
	for i := range q.stays {
		q.stays[i].missed = false
	}
	q.unclaim()
	if q.reserved != 0 {
		g.release(q, now)
	}
}

// keeps reports whether what is free of gt is reserved for one whose turn is before that of q,
// or of who has just come. A cap keeps one slot, a pace all.
func (gt *gate) keeps(q *queue, paid bool) bool {
	r := gt.reserved.queue
	if r == nil || r == q || r.gates[r.pos] == gt || q != nil && gt.before(q, r) {
		return false
	}
	return gt.rule.Connections > 0 && gt.inFlight+1 >= gt.rule.Connections ||
		!paid && !r.paid && !gt.shape.Packets.Unlimited()
}

// first is whose turn it is at gt: of who waits there, or for whom it is reserved.
func (gt *gate) first() *queue {
	top := gt.turns[0].queues[0]
	if r := gt.reserved.queue; r != nil && r.gates[r.pos] == gt && !gt.before(top, r) {
		return r
	}
	return top
}

// before reports whether the turn of q at gt is before that of r.
func (gt *gate) before(q, r *queue) bool {
	return q.turnAt(slices.Index(q.gates, gt)) < r.turnAt(slices.Index(r.gates, gt))
}

// turnAt is the turn of q at its i-th gate: that of its source, but what is reserved for it is
// not lost as its source is served meanwhile.
func (q *queue) turnAt(i int) uint64 {
	if q.reserved != 0 {
		return q.stays[i].turn
	}
	return max(q.turn, q.sources[i].served)
}

// byClaim has the queue first that claims the next reservation. Of those of one source, it is
// the one whose claim was made first.
type byClaim struct{}

func (byClaim) before(a, b *stay) bool {
	if a.claim != b.claim {
		return a.claim < b.claim
	}
	return a.queue.claimed < b.queue.claimed
}

func (byClaim) place(s *stay) *int { return &s.rank }
