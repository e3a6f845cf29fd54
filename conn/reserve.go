package conn

import (
	"slices"

	"shaperd/leaky"
)

// reservation is what a gate keeps for one queue.
//
// Where gates cross, each may be kept full by those who need it alone, and a queue that needs
// several would never find them open at one instant. So one whose turn at a gate is in vain for
// the second time, as another gate is shut, has the next slot there reserved, or the next
// connection of a pace: those whose turn is later wait though it is free. What a queue has reserved ends together:
// when it goes on, or lapses after as long as its turns had been in vain when it began.
//
// A reservation is a turn spent waiting, and bounded like one:
//
//   - a gate reserves for one queue at a time, the one whose turn it is, and none has a second
//     reservation there that lapses before all others have had one;
//   - a queue begins only where none of its gates is reserved for another. So of two, none waits
//     for what the other has reserved;
//   - after a reservation a gate rests for three times as long. So of one slot, or of a pace,
//     a quarter of the time is lost at most.
type reservation struct {
	queue *queue     // for which it is, or nil
	next  *queue     // for which the next one will be
	rest  leaky.Time // until when nothing is reserved
}

// missed notes that it is the turn of q where it waits, in vain.
func (q *queue) missed(now leaky.Time) {
	gt, at := q.gates[q.pos], &q.stays[q.pos]
	first := at.missed == 0
	if first {
		at.missed = now
	}
	switch {
	case gt.pool != nil || gt.rule.Observe || first && q.reserved == 0:
	case gt.reserved.next == nil || q.claim(gt) < gt.reserved.next.claim(gt):
		gt.reserved.next = q
	}
}

// claim tells in which order queues have something of gt reserved.
func (q *queue) claim(gt *gate) uint64 { return max(q.turnAt(gt), q.sourceAt(gt).lapsed) }

func (q *queue) sourceAt(gt *gate) *source { return q.sources[slices.Index(q.gates, gt)] }

func (q *queue) turnAt(gt *gate) uint64 { return max(q.turn, q.sourceAt(gt).served) }

// reserve keeps what is free of gt for whom it is to be, if that waits elsewhere.
func (g *gates) reserve(gt *gate, now leaky.Time) {
	r := &gt.reserved
	q := r.next
	if q == nil || r.queue != nil || now < r.rest || q.gates[q.pos] == gt || gt.capped(now) || !q.paid && gt.paced(now) {
		return
	}
	if q.reserved == 0 {
		if slices.ContainsFunc(q.gates, func(gt *gate) bool { return gt.reserved.queue != nil || now < gt.reserved.rest }) {
			return
		}
		q.reserved = now
		q.lapse.Fire = func(now leaky.Time) { g.lapse(q, now) }
		g.wheel.Schedule(&q.lapse, now+now.Sub(q.stays[slices.Index(q.gates, gt)].missed))
	}
	r.queue, r.next = q, nil
}

// lapse has others go in place of q, which had something reserved for long enough.
func (g *gates) lapse(q *queue, now leaky.Time) {
	g.turn++
	for i, gt := range q.gates {
		if gt.reserved.queue == q {
			q.sources[i].lapsed = g.turn
		}
	}
	g.release(q, now)
	g.run(now)
}

// release ends what is reserved for q. Who gets it is tried in the next run.
func (g *gates) release(q *queue, now leaky.Time) {
	for _, gt := range q.gates {
		if r := &gt.reserved; r.queue == q {
			r.queue, r.rest = nil, now+3*now.Sub(q.reserved)
			g.freed = append(g.freed, gt)
		}
	}
	q.reserved = 0
	g.wheel.Cancel(&q.lapse)
}

// renounce is release for one who will have nothing reserved.
func (g *gates) renounce(q *queue, now leaky.Time) {
	for i, gt := range q.gates {
		q.stays[i].missed = 0
		if gt.reserved.next == q {
			gt.reserved.next = nil
		}
	}
	if q.reserved != 0 {
		g.release(q, now)
	}
}

// keeps reports whether what is free of gt is reserved for one whose turn is before that of q,
// or of who has just come. A cap keeps one slot, a pace all.
func (gt *gate) keeps(q *queue, paid bool) bool {
	r := gt.reserved.queue
	if r == nil || r == q || r.gates[r.pos] == gt || q != nil && q.turnAt(gt) < r.turnAt(gt) {
		return false
	}
	return gt.rule.Connections > 0 && gt.inFlight+1 >= gt.rule.Connections ||
		!paid && !r.paid && !gt.shape.Packets.Unlimited()
}
