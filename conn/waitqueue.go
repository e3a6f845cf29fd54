// Owner: the loop's thread.

package conn

import (
	"encoding/binary"
	"net/netip"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/topk"
)

// waitQueue holds the connections of one source that need the same gates, in order of arrival. A gate
// that is shut for one of them is shut for all. So they wait at one gate and move to another one
// together, in constant time.
//
// Order is by ticket, and tickets of a higher priority are earlier. A queue gets a ticket when it begins to wait and a new one when it is served;
// the lowest goes first. So a gate serves the source that it served longest ago, or that has waited
// longest if it served none since: of two that wait, neither is served twice while the other could be.
// Tickets are numbered over all gates, so a queue that moves keeps its place in the order.
//
// The cost of a release: dispatch tries the queues at the freed gates in the order of their tickets,
// until the gates are full or have no waiters. A queue that is tried is served or moves to the gate
// that was shut. Each move is to a gate where it has a later ticket, so a queue moves at most as often
// as it has gates, and a later release finds it where it waits then.
type waitQueue struct {
	key          string
	member       memberKey        // of admissionSource
	precedence   precedence       // of its connections
	paid         bool             // readmitted connections, see waiter
	gates        []*gate          // that its connections need
	source       *admissionSource // of its connections
	gateSources  []*gateSource    // source at each of gates, at the last level
	waits        []gateWait       // state at each of gates
	pos          int              // the queue waits at gates[pos]
	posSince     leaky.Time
	ticket       uint64 // issued when it began to wait, or was last served
	waiters      fairq.List[waiter]
	len          int
	heapIndex    int         // in gateSources[pos].queues
	timeout      pacer.Event // of the first waiter
	firstFailure leaky.Time  // time of the first failed attempt since it was served last, or 0
	claimTicket  uint64      // at which it claimed a reservation, or 0
	reservedAt   leaky.Time  // when its reservation began, or 0
	lapse        pacer.Event // of the reservation
}

// gateWait is the state of a queue at one of its gates.
type gateWait struct {
	queue          *waitQueue
	waited         leaky.Time    // total time here
	reason         shaper.Reason // of the last wait here
	failed         bool          // an attempt here failed since it was last served
	rank           uint64        // waitQueue.rank when last compared; never later than that
	heapIndex      int           // in gate.reserved.claims
	reservedTicket uint64        // the queue's ticket here when its reservation began
}

// enqueue makes w wait for the gates of list, of which list[i] is shut. When the wait quota is used up
// it displaces the newest waiter of the source that has the most, unless that is its own source.
func (a *admission) enqueue(w *waiter, list []*gate, i int, why shaper.Reason, now leaky.Time) {
	q := a.queueFor(w, list)
	if q.len > 0 {
		i = q.pos
	}
	if gt := list[i]; gt.quota.waiting >= gt.limit.MaxQueue {
		if !gt.quota.displaces(gt.limit, q.gateSources[i].top().key, w.precedence) {
			a.refuseAs(w, q.gateSources[i], shaper.WaitingFull, now)
			if q.len == 0 {
				a.deleteQueue(q, now)
			}
			return
		}
		a.evictNewest(gt.quota, gt.limit, now)
	}
	if q.len == 0 {
		a.link(q, i, why, now)
	}
	w.queue = q
	w.waitedBefore = make([]leaky.Time, len(list))
	for i := range w.waitedBefore {
		w.waitedBefore[i] = q.waitedAt(i, now)
	}
	q.waiters.PushBefore(&w.link, w, func(o *waiter) bool { return q.paid && o.since > w.since })
	if q.len++; w == q.waiters.First() {
		a.armTimeout(q)
	}
	q.current().addWaiting(1, now)
	a.sharing.lending.wait(q.current().gate)
}

// queueFor returns the queue of w and the other connections of its source and class that need list. A missing one is created.
// Readmitted connections have a queue of their own.
func (a *admission) queueFor(w *waiter, list []*gate) *waitQueue {
	member := memberKey{class: w.precedence.class, addr: w.sourceKey()}
	a.keyBuf = queueKey(a.keyBuf[:0], member, list, w.paid)
	q := a.queues[string(a.keyBuf)]
	if q != nil {
		return q
	}
	q = &waitQueue{
		key: string(a.keyBuf), member: member, precedence: w.precedence, paid: w.paid, gates: list, source: a.sources[member],
		waits: make([]gateWait, len(list)), ticket: a.nextTicket(w.precedence.priority),
	}
	if q.source == nil {
		q.source = &admissionSource{}
		a.sources[member] = q.source
	}
	q.source.queues++
	q.timeout.Fire = func(now leaky.Time) { a.expire(q, now) }
	a.queues[q.key] = q
	for i, gt := range list {
		q.waits[i].queue = q
		var src *gateSource
		m := w.membersAt(gt)
		for _, key := range m.all() {
			src = gt.source(src, key)
		}
		src.refs++
		q.gateSources = append(q.gateSources, src)
	}
	return q
}

// deleteQueue deletes q, which is empty.
func (a *admission) deleteQueue(q *waitQueue, now leaky.Time) {
	a.resetClaims(q, now)
	delete(a.queues, q.key)
	if q.source.queues--; q.source.queues == 0 {
		delete(a.sources, q.member)
	}
	for _, src := range q.gateSources {
		src.release()
	}
	a.dropUnused(q.gates, now)
}

// current is the source of q at the gate where it waits.
func (q *waitQueue) current() *gateSource { return q.gateSources[q.pos] }

// queueKey appends the key of a source's queue for list to b.
func queueKey(b []byte, m memberKey, list []*gate, paid bool) []byte {
	a := m.addr.As16()
	b = append(b, a[:]...)
	b = binary.LittleEndian.AppendUint32(b, m.class.ID)
	if paid {
		b = append(b, 'p') // no other key has an odd length
	}
	for _, gt := range list {
		b = binary.LittleEndian.AppendUint64(b, gt.id)
	}
	return b
}

// expire refuses the connections of q that have reached their deadline.
func (a *admission) expire(q *waitQueue, now leaky.Time) {
	for q.len > 0 && q.deadline() <= now {
		a.refuse(q.waiters.First(), shaper.WaitTimeout, now)
	}
	if q.len > 0 && !q.timeout.Scheduled() { // a hold has begun meanwhile
		a.armTimeout(q)
	}
	a.run(now)
}

// deadline is when the first waiter of q is refused. At limits its time is counted from arrival, at whatever
// gates it waited; at a pool only the wait there counts, but from when it was accepted on if that is held.
func (q *waitQueue) deadline() leaky.Time {
	first := q.waiters.First()
	from, gt := first.arrived, q.gates[q.pos]
	switch {
	case gt.pool == nil:
		if last := len(q.gates) - 1; q.gates[last].pool != nil {
			from += q.waits[last].waited - first.waitedBefore[last] // in the hold
		}
	case gt.pool.listener.holds():
		return first.since + leaky.FromDuration(gt.pool.listener.config.Load().HoldTimeout)
	default:
		from = max(q.posSince-q.waits[q.pos].waited+first.waitedBefore[q.pos], gt.pool.listener.hold.endedAt)
	}
	return from + q.current().patience()
}

func (a *admission) armTimeout(q *waitQueue) { a.wheel.Schedule(&q.timeout, q.deadline()) }

// waitedAt is how long q has waited at its i-th gate.
func (q *waitQueue) waitedAt(i int, now leaky.Time) leaky.Time {
	w := q.waits[i].waited
	if i == q.pos {
		w += now.Sub(q.posSince)
	}
	return w
}

// waitTime is how long w has waited in its queue.
func (w *waiter) waitTime(now leaky.Time) (sum leaky.Time) {
	for i, before := range w.waitedBefore {
		sum += w.queue.waitedAt(i, now) - before
	}
	return sum
}

// link makes q wait at its i-th gate.
func (a *admission) link(q *waitQueue, i int, why shaper.Reason, now leaky.Time) {
	gt, src := q.gates[i], q.gateSources[i]
	q.pos, q.posSince, q.waits[i].reason = i, now, why
	src.add(q)
	src.addWaiting(q.len, now)
	if gt.exhausted(now) == shaper.ByNewConnections {
		a.armPacer(gt, now)
	}
	if !gt.relief.Scheduled() && (gt.pool != nil || gt.flows != flowLRU{} || gt.limit.YieldAfter > 0) {
		gt.relief.Fire = func(now leaky.Time) { a.relieve(gt, now) }
		a.wheel.Schedule(&gt.relief, now)
	}
}

// unlink ends the wait of q at its current gate.
func (a *admission) unlink(q *waitQueue, now leaky.Time) {
	gt, src := q.gates[q.pos], q.current()
	q.waits[q.pos].waited = q.waitedAt(q.pos, now)
	q.posSince = now
	src.addWaiting(-q.len, now)
	if src.remove(q); gt.first() == nil {
		a.wheel.Cancel(&gt.timer)
		a.wheel.Cancel(&gt.relief)
		gt.dueAt = 0
		if gt.share != nil {
			gt.share.waitsSince = 0
		}
	}
}

// dequeue removes w from its queue, and records how long it waited at each gate.
func (a *admission) dequeue(w *waiter, now leaky.Time) {
	q := w.queue
	if d := w.waitTime(now); d > 0 {
		a.shaper.Record(w.flow.Source, topk.Usage{Waited: d.Duration()}, now)
	}
	for i, gt := range q.gates {
		if d := q.waitedAt(i, now) - w.waitedBefore[i]; d > 0 {
			w.addWait(gt.state, d)
			gt.state.Keys.TryAdd(gt.limitKey(), topk.Usage{Waited: d.Duration()}, now)
		}
	}
	first := w == q.waiters.First()
	q.waiters.Remove(&w.link)
	w.queue, w.waitedBefore = nil, nil
	if q.len--; first && q.len > 0 {
		a.armTimeout(q)
	}
	q.current().addWaiting(-1, now)
	if q.len > 0 {
		return
	}
	a.unlink(q, now)
	a.wheel.Cancel(&q.timeout)
	a.deleteQueue(q, now)
}

// armPacer schedules a dispatch at gt for when its rate allows the next connection.
func (a *admission) armPacer(gt *gate, now leaky.Time) {
	gt.dueAt = gt.depart(now)
	if gt.share != nil {
		a.sharing.wait(gt.share, gt.dueAt, now)
	}
	a.wheel.Schedule(&gt.timer, gt.dueAt)
}

// rearm is armPacer after a change of the share of gt, if something waits for its rate.
func (a *admission) rearm(gt *gate, now leaky.Time) {
	if gt.dueAt > 0 {
		a.armPacer(gt, now)
	}
}

// sourceKey is the source that w counts as.
func (w *waiter) sourceKey() netip.Addr {
	if w.unverified {
		return unverifiedSource
	}
	return sourceKey(w.flow.Source)
}

// membersAt is what w takes turns as at gt.
func (w *waiter) membersAt(gt *gate) members {
	return membersOf(gt.limit, w.precedence.class, w.flow.Source, w.route.ASN, w.unverified)
}

// byQueueTicket orders the queues of a source.
type byQueueTicket struct{}

func (byQueueTicket) Less(a, b *waitQueue) bool { return a.ticket < b.ticket }

func (byQueueTicket) Index(q *waitQueue) *int { return &q.heapIndex }
