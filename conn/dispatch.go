// Owner: the loop's thread.

package conn

import (
	"cmp"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// dispatchFreed dispatches the gates whose reservations ended.
func (a *admission) dispatchFreed(now leaky.Time) {
	for len(a.freed) > 0 {
		freed := a.freed
		a.freed = nil
		a.dispatch(freed, now)
	}
}

// dispatch serves the queues that wait at the gates of list and can proceed, in the order of their
// tickets.
func (a *admission) dispatch(list []*gate, now leaky.Time) {
	for {
		for _, gt := range list {
			a.reserve(gt, now)
		}
		var next *waitQueue
		for _, gt := range list {
			first, why := gt.nextQueue(), gt.exhausted(now)
			if first == nil {
				continue
			}
			if gt.limit.Observe || (why == shaper.ByNewConnections || why == shaper.QuotaUsed) && first.paid {
				why = shaper.None
			}
			switch {
			case why == shaper.QuotaUsed && gt.budget.Left() == 0:
				a.refuseUsedUp(gt, now)
			case why == shaper.ByNewConnections:
				a.armPacer(gt, now)
			case why != shaper.None || gt.reservedAgainst(first, first.precedence, first.paid):
				gt.dueAt = 0 // a waiter for a slot is not late
				if gt.share != nil {
					gt.share.waitsSince = 0
				}
			case next == nil || first.ticketAt(first.pos) < next.ticketAt(next.pos):
				next = first
			}
		}
		if next == nil {
			return
		}
		if i, why := next.findShut(now); why != shaper.None {
			a.recordFailure(next, now)
			a.moveTo(next, i, why, now)
		} else {
			now = a.serveHead(next, now)
		}
	}
}

// findShut returns the gate that keeps q waiting, and the reason, or None. A gate with waiters that
// go before q is also shut: they are tried first.
func (q *waitQueue) findShut(now leaky.Time) (int, shaper.Reason) {
	i, why := findShut(q.gates, q, q.precedence, q.paid, now)
	if why != shaper.None {
		return i, why
	}
	for i, src := range q.gateSources {
		gt := src.gate
		if first := gt.first(); i != q.pos && first != nil && gt.before(first.key.class, first.ticket(), src.key.class, q.ticketAt(i)) {
			return i, shaper.ByConnections
		}
	}
	return 0, shaper.None
}

// moveTo makes q, whose turn it is, wait at its i-th gate.
func (a *admission) moveTo(q *waitQueue, i int, why shaper.Reason, now leaky.Time) {
	a.unlink(q, now)
	a.link(q, i, why, now)
	a.sharing.lending.wait(q.gates[i])
	a.armTimeout(q)
	gt := q.gates[i]
	for gt.quota.waiting > gt.limit.MaxQueue {
		a.evictNewest(gt.quota, gt.limit, now)
	}
}

// serveHead passes the first connection of q through all its gates, and returns the time of that.
func (a *admission) serveHead(q *waitQueue, now leaky.Time) leaky.Time {
	if slices.ContainsFunc(q.gates, func(gt *gate) bool { return !gt.shape.Packets.Unlimited() }) {
		now = a.clock() // a connection charged to an earlier instant would be followed too soon
		a.sharing.follow(now)
	}
	w := q.waiters.First()
	if q.deadline() <= now { // its timer is late
		a.refuse(w, shaper.WaitTimeout, now)
		return now
	}
	q.current().serve(w.waitTime(now), now)
	for i, gt := range q.gates {
		why, ready, waited := shaper.None, now, q.waitedAt(i, now)-w.waitedBefore[i]
		if i == q.pos || waited > 0 {
			why = q.waits[i].reason
		}
		if gt.dueAt > 0 {
			ready = gt.dueAt
		}
		a.take(gt, w.precedence.class, w.paid, why, waited, ready, now)
	}
	q.ticket = a.nextTicket(q.precedence.priority)
	q.current().queues.Fix(q)
	for _, src := range q.gateSources {
		src.passed(q.ticket)
	}
	list := q.gates
	a.resetClaims(q, now)
	a.dequeue(w, now)
	a.grant(w, list, now)
	return now
}

// grant gives w the slots of list, which are already taken.
func (a *admission) grant(w *waiter, list []*gate, now leaky.Time) {
	if last := len(list) - 1; last >= 0 && list[last].pool != nil {
		w.owner.assignDownstream(now)
		a.dropUnused(list[last:], now)
		list = list[:last:last]
	}
	if w.held = list; !w.inTurns && !w.paid {
		w.precedence.class.Admitted.Add(1)
	}
	a.outcomes = append(a.outcomes, outcome{waiter: w})
}

// outcome is the result of admission for a waiter: admitted, unless a limit refused it.
type outcome struct {
	*waiter
	refusal
}

// run reports outcomes to the owners of the waiters.
func (a *admission) run(now leaky.Time) {
	if a.running {
		return
	}
	a.running = true
	a.retry(now)
	for i := 0; ; i++ {
		a.dispatchFreed(now)
		if i == len(a.outcomes) {
			break
		}
		o := a.outcomes[i]
		a.outcomes[i] = outcome{}
		if o.limit == nil {
			o.owner.admitted(now)
		} else {
			o.owner.refused(o.refusal, now)
			a.penalize(o.waiter, &o.refusal, now)
		}
	}
	a.outcomes = a.outcomes[:0]
	a.running = false
}

// retry makes the waiters of an earlier policy try the gates of the current one, those of the highest priority first. Several wait in
// line, so that a dispatch gives them what is free by turns, and those first that are owed.
func (a *admission) retry(now leaky.Time) {
	list := a.retries
	a.retries = nil
	if a.policy.Classes() > 1 {
		priority := map[*waiter]int{}
		for _, w := range list {
			w.flow.Origin = a.policy.ListenerIndex(w.listen)
			priority[w] = a.precedenceOf(&w.flow, a.policy.Route(&w.flow), w.unverified).priority
		}
		slices.SortStableFunc(list, func(x, y *waiter) int { return cmp.Compare(priority[y], priority[x]) })
	}
	for _, w := range list {
		a.admitOrQueue(w, len(list) > 1, now)
	}
}
