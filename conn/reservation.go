// Owner: the loop's thread.

package conn

import (
	"slices"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/leaky"
)

// reservation is what a gate keeps free for one queue.
//
// Where gates cross, each may be kept full by queues that need that gate alone, and a queue that needs
// several would never find all open at one instant. So a queue that fails for the second time at the
// same gate because another gate is shut claims a reservation: of each of its gates the next slot, or
// the next connection of a rate, goes to no queue with a later ticket. The reservation ends when the
// queue is served, or lapses after as long as its attempts had been failing when it began.
//
// A reservation blocks a gate like a shut one, and so is bounded:
//
//   - a queue claims only when no queue with an earlier ticket waits at its gates, except queues whose
//     source has had a reservation since;
//   - claims have one order, the same at all gates: by the ticket of the queue, or by the last reservation
//     of its source if that is later. So no source has a second reservation before all other claimants had
//     theirs, however many queues it has;
//   - a reservation covers all gates of the queue at once, and begins only when the claim is first at each
//     of them, none is reserved, and none rests. So no gate is reserved for a queue while another of its
//     gates is kept for a third queue;
//   - after a reservation its gates rest for three times as long. So at most a quarter of the time of one
//     slot, or of a rate, is lost.
//
// A queue of a higher priority knows nothing of those below: its claim ends their reservations, and does not wait for
// their gates to rest.
//
// The package comment bounds the wait of a queue that needs several gates.
type reservation struct {
	queue     *waitQueue                    // that it is for, or nil
	restUntil leaky.Time                    // no reservation begins before,
	restsFor  int                           // of this priority or a lower one
	claims    fairq.Heap[gateWait, byClaim] // for the next ones
}

// admissionSource is a source, at all gates.
type admissionSource struct {
	queues       int
	lastReserved uint64 // ticket number at the end of its last reservation
}

// recordFailure records that the turn of q came where it waits, but another of its gates was shut.
func (a *admission) recordFailure(q *waitQueue, now leaky.Time) {
	if q.firstFailure == 0 {
		q.firstFailure = now
	}
	gw := &q.waits[q.pos]
	switch {
	case !gw.failed:
		gw.failed = true
	case q.claimTicket == 0 && q.reservedAt == 0 && !slices.ContainsFunc(q.gates, func(gt *gate) bool { return gt.hasEarlier(q) }):
		q.claimTicket = a.lastTicket.Add(1)
		for i, gt := range q.gates {
			if gt.reservable() {
				gt.reserved.claims.Push(&q.waits[i])
			}
		}
	}
}

func (gt *gate) reservable() bool { return gt.pool == nil && !gt.limit.Observe }

// hasEarlier reports whether a source waits at gt with a ticket and rank before the ticket of q.
func (gt *gate) hasEarlier(q *waitQueue) bool {
	return slices.ContainsFunc(gt.lines, func(l classLine) bool { return l.hasEarlier(q, 0) })
}

// hasEarlier is the same for the subtree of heap position i.
func (l *classLine) hasEarlier(q *waitQueue, i int) bool {
	if i >= len(l.queued) || l.queued[i].ticket() >= q.ticket {
		return false
	}
	return l.queued[i].next().rank() < q.ticket || l.hasEarlier(q, 2*i+1) || l.hasEarlier(q, 2*i+2)
}

// rank orders claims: by ticket, or by the last reservation of the source if that is later.
func (q *waitQueue) rank() uint64 { return max(q.ticket, q.source.lastReserved) }

// nextClaim is the queue that gt will be reserved for next, or nil.
func (gt *gate) nextClaim() *waitQueue {
	claims := &gt.reserved.claims
	for len(*claims) > 0 {
		first := (*claims)[0]
		if claim := first.queue.rank(); first.rank < claim { // its source has had a reservation since
			first.rank = claim
			claims.Fix(first)
			continue
		}
		return first.queue
	}
	return nil
}

// reserve begins the next reservation at gt, if possible.
func (a *admission) reserve(gt *gate, now leaky.Time) {
	q := gt.nextClaim()
	if q == nil || slices.ContainsFunc(q.gates, func(gt *gate) bool {
		r, priority := &gt.reserved, q.precedence.priority
		reserved := r.queue != nil && r.queue.precedence.priority >= priority
		return gt.reservable() && (reserved || now < r.restUntil && r.restsFor >= priority || gt.nextClaim() != q)
	}) {
		return
	}
	q.withdrawClaim()
	for _, gt := range q.gates {
		if r := gt.reserved.queue; r != nil {
			a.endReservation(r, now)
		}
	}
	for i := range q.waits {
		q.waits[i].reservedTicket = q.ticketAt(i)
	}
	q.reservedAt = now
	q.lapse.Fire = func(now leaky.Time) { a.endReservation(q, now); a.run(now) }
	a.wheel.Schedule(&q.lapse, now+now.Sub(q.firstFailure))
	for _, gt := range q.gates {
		if gt.reservable() {
			gt.reserved.queue = q
		}
	}
}

func (q *waitQueue) withdrawClaim() {
	if q.claimTicket == 0 {
		return
	}
	q.claimTicket = 0
	for i, gt := range q.gates {
		if gt.reservable() {
			gt.reserved.claims.Remove(&q.waits[i])
		}
	}
}

// endReservation ends the reservation of q. The next run dispatches its gates.
func (a *admission) endReservation(q *waitQueue, now leaky.Time) {
	q.source.lastReserved = a.nextTicket(q.precedence.priority)
	for _, gt := range q.gates {
		if r := &gt.reserved; r.queue == q {
			r.queue, r.restUntil, r.restsFor = nil, now+3*now.Sub(q.reservedAt), q.precedence.priority
			a.freed = append(a.freed, gt)
		}
	}
	q.reservedAt = 0
	a.wheel.Cancel(&q.lapse)
}

// resetClaims forgets the failed attempts of q, with its claim and its reservation.
func (a *admission) resetClaims(q *waitQueue, now leaky.Time) {
	q.firstFailure = 0
	for i := range q.waits {
		q.waits[i].failed = false
	}
	q.withdrawClaim()
	if q.reservedAt != 0 {
		a.endReservation(q, now)
	}
}

// reservedAgainst reports whether the free slot or rate of gt is reserved for a queue with an earlier
// ticket than q, or than a new connection if q is nil. A reservation keeps one slot of a cap, and all
// of a rate.
func (gt *gate) reservedAgainst(q *waitQueue, st precedence, paid bool) bool {
	r := gt.reserved.queue
	if r == nil || r == q || r.gates[r.pos] == gt {
		return false
	}
	ticket := lastTicket(st.priority)
	if q != nil {
		ticket = q.ticketAt(slices.Index(q.gates, gt))
	}
	if gt.before(st.class, ticket, r.precedence.class, r.ticketAt(slices.Index(r.gates, gt))) {
		return false
	}
	return gt.inFlight+1 >= gt.slots ||
		!paid && !r.paid && !gt.shape.Packets.Unlimited()
}

// nextQueue is the queue whose turn it is at gt: the first that waits here, or the one with the
// reservation. It is nil if none waits here.
func (gt *gate) nextQueue() *waitQueue {
	first := gt.first()
	if first == nil {
		return nil
	}
	top, r := first.next(), gt.reserved.queue
	if r != nil && r.gates[r.pos] == gt && !gt.before(top.precedence.class, top.ticketAt(top.pos), r.precedence.class, r.ticketAt(r.pos)) {
		return r
	}
	return top
}

// ticketAt is the ticket of q at its i-th gate: that of its source. During a reservation it stays as
// it was, though the source may be served meanwhile.
func (q *waitQueue) ticketAt(i int) uint64 {
	if q.reservedAt != 0 {
		return q.waits[i].reservedTicket
	}
	return max(q.ticket, q.gateSources[i].top().lastServed)
}

// byClaim orders claims by rank, those of one source by when they were made.
type byClaim struct{}

func (byClaim) Less(a, b *gateWait) bool {
	if a.rank != b.rank {
		return a.rank < b.rank
	}
	return a.queue.claimTicket < b.queue.claimTicket
}

func (byClaim) Index(s *gateWait) *int { return &s.heapIndex }
