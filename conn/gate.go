// Owner: the loop's thread.

package conn

import (
	"math"
	"slices"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// gate is the semaphore of one bucket key, and limits its rate of new connections. Sources take turns
// at it.
type gate struct {
	pacing   // new connections
	tickets  tickets
	id       uint64
	state    *shaper.LimitState
	quota    *waitQuota
	budget   *budget        // of the limit's quota of connections; nil without one
	policy   *shaper.Policy // of limit and whole
	limit    *shaper.Limit
	pool     *pool // of downstreams; nil at the gate of a limit
	slots    int   // maximum of inFlight; noCap at the gate of a pool
	inFlight int
	lent     *poolShare // nil unless hosts share the cap
	adapter  *adapter   // nil unless the cap is adaptive
	waiting  int
	sources  map[memberKey]*gateSource // that need the gate, wherever they wait
	lines    []classLine               // by class
	flows    flowLRU                   // UDP flows that hold a slot
	reserved reservation
	timer    pacer.Event // scheduled while a connection waits for the bucket, and not for a slot
	dueAt    leaky.Time  // when timer fires; 0 when nothing waits for the bucket
	relief   pacer.Event // scheduled while connections wait that could replace idle flows
}

// gatesFor returns the gates that f passes, at limits whose slots are for turns or at the others, most specific first.
// Missing ones are created.
func (a *admission) gatesFor(f *shaper.Flow, r shaper.Route, inTurns bool) (list []*gate) {
	for i := range r.Limits().All {
		if l := a.policy.Limit(i); l.CountsConnections() && l.SlotFor.InTurns() == inTurns {
			if l.Shared {
				a.sharing.follow(a.clock())
			}
			list = append(list, a.gateFor(i, l, gateKey(a.policy, i, f, r)))
		}
	}
	return list
}

func gateKey(p *shaper.Policy, i int, f *shaper.Flow, r shaper.Route) shaper.Key {
	key := p.Key(i, f, r)
	key.Limit++ // the bucket of new connections, see shaper.LimitState
	return key
}

// limitKey is the key under which gt's limit ranks waits and refusals.
func (gt *gate) limitKey() shaper.Key {
	key := gt.key
	key.Limit--
	return key
}

// gateFor returns the gate of key, a key of limit i of the current policy. A missing one is created.
func (a *admission) gateFor(i int, l *shaper.Limit, key shaper.Key) *gate {
	gt := a.byKey[key]
	if gt == nil {
		state := a.policy.State(i)
		a.lastGateID++
		shape := a.policy.NewConnectionsOf(i, &key)
		gt = &gate{
			pacing: pacing{key: key, whole: shape, shape: shape},
			id:     a.lastGateID, state: state, policy: a.policy, quota: a.quotaFor(state), limit: a.policy.LimitFor(i, &key),
		}
		a.own(gt)
		a.setCap(gt)
		if l.Shared {
			a.sharing.checkOut(&gt.pacing, nil, gt, a.clock())
		} else {
			gt.bucket = a.shaper.CheckOut(key, a.clock())
		}
		gt.history = a.shaper.CheckOutHistory(a.policy, i, key, &gt.bucket, gt.shape, a.clock())
		a.followQuota(gt, i, a.clock())
	}
	a.refresh(gt)
	return gt
}

// own adds gt to those of a.
func (a *admission) own(gt *gate) {
	a.byKey[gt.key] = gt
	gt.timer.Fire = func(now leaky.Time) { a.dispatch([]*gate{gt}, now); a.run(now) }
}

// refresh updates gt to the current policy. Nothing has passed it since that became current, so the
// result is the same as if it had been updated then. A gate whose limit was removed stays as it is.
func (a *admission) refresh(gt *gate) {
	if gt.policy == a.policy {
		return
	}
	was := gt.policy
	gt.policy = a.policy
	if i := a.policy.IndexOf(gt.state); i >= 0 {
		gt.limit, gt.quota = a.policy.LimitFor(i, &gt.key), a.quotaFor(gt.state)
		a.followQuota(gt, i, a.policySince)
		for n := range gt.lines {
			gt.lines[n].reserved = gt.limit.ReservedFor(gt.lines[n].class.Name)
		}
		a.setCap(gt)
		if gt.lent != nil {
			gt.lent.rename(was, a.policy)
			a.sharing.lending.list(gt.lent)
		}
		if !gt.limit.Algorithm.HasHistory() {
			gt.history = gt.limit.ContinueHistory(gt.history, &gt.bucket, gt.shape, a.policySince)
		}
		a.sharing.reshape(&gt.pacing, nil, gt, a.policy.NewConnectionsOf(i, &gt.key), gt.limit.Shared, a.policySince)
		gt.history = gt.limit.ContinueHistory(gt.history, &gt.bucket, gt.shape, a.policySince)
	}
}

// noCap is the maximum in flight without a cap.
const noCap = math.MaxInt

// setCap sets how many connections may be in flight at gt under its current limit.
func (a *admission) setCap(gt *gate) {
	lending := a.sharing.lending
	lending.attach(gt)
	a.adapt(gt)
	switch {
	case gt.lent != nil:
		gt.slots = lending.slotsOf(gt.limit, gt.state, gt.key)
		lending.list(gt.lent)
	case gt.adapter != nil && gt.adapter.controller != nil:
		gt.slots = gt.adapter.controller.Limit()
	case gt.limit.MaxConnections > 0:
		gt.slots = gt.limit.MaxConnections
	default:
		gt.slots = noCap
	}
}

// quotaFor returns the quota of a limit. A missing one is created.
func (a *admission) quotaFor(state *shaper.LimitState) *waitQuota {
	wq := a.quotas[state]
	if wq == nil {
		wq = &waitQuota{}
		a.quotas[state] = wq
	}
	return wq
}

// dropUnused removes the gates of list that no connection holds or needs.
func (a *admission) dropUnused(list []*gate, now leaky.Time) {
	for _, gt := range list {
		switch {
		case gt.inFlight > 0 || len(gt.sources) > 0 || gt.share.held() || gt.lent.held():
		case gt.pool != nil:
			delete(gt.pool.listener.pools, gt.pool.key)
		case a.byKey[gt.key] == gt:
			gt.unadapt(now)
			delete(a.byKey, gt.key)
			a.refresh(gt)
			a.leaveQuota(gt)
			a.sharing.checkIn(&gt.pacing, now)
			if gt.history != nil {
				a.shaper.CheckInHistory(gt.state, gt.limit, gt.key, gt.history, now)
			}
		}
	}
}

// findShut returns the gate of list that keeps a connection of q, or a new one if that is nil, waiting at now, and the reason, or
// None. A cap takes precedence over a rate, which recovers sooner and does not apply to the
// readmitted.
func findShut(list []*gate, q *waitQueue, st precedence, paid bool, now leaky.Time) (int, shaper.Reason) {
	for i, gt := range list {
		if !gt.limit.Observe && (gt.atCap(now) || gt.reservedAgainst(q, st, paid)) {
			return i, shaper.ByConnections
		}
	}
	for i, gt := range list {
		if !paid && !gt.limit.Observe && gt.atRate(now) {
			return i, shaper.ByNewConnections
		}
	}
	for i, gt := range list {
		if !paid && !gt.limit.Observe && gt.awaitsClaim(now) {
			return i, shaper.QuotaUsed
		}
	}
	return 0, shaper.None
}

// findShutOnArrival is findShut for a new connection, which does not overtake waiters.
func findShutOnArrival(list []*gate, st precedence, paid bool, now leaky.Time) (int, shaper.Reason) {
	i, why := findShut(list, nil, st, paid, now)
	if why == shaper.None {
		if i = slices.IndexFunc(list, func(gt *gate) bool { return gt.waitersFirst(st) }); i >= 0 {
			why = shaper.ByConnections
		}
	}
	return i, why
}

// waitersFirst reports whether some that wait at gt go before a new connection.
func (gt *gate) waitersFirst(st precedence) bool {
	first := gt.first()
	return first != nil && !gt.before(st.class, lastTicket(st.priority), first.key.class, first.ticket())
}

// exhausted returns which resource of gt is used up at now, or None.
func (gt *gate) exhausted(now leaky.Time) shaper.Reason {
	switch {
	case gt.atCap(now):
		return shaper.ByConnections
	case gt.atRate(now):
		return shaper.ByNewConnections
	case gt.awaitsClaim(now):
		return shaper.QuotaUsed
	}
	return shaper.None
}

func (gt *gate) atCap(now leaky.Time) bool {
	if gt.pool != nil {
		return gt.pool.full(now)
	}
	return gt.inFlight >= gt.slots
}

func (gt *gate) atRate(now leaky.Time) bool {
	return gt.limit.NewConnections.N > 0 && gt.depart(now) > now
}

// take takes a slot for a connection that waited here for reason why, and could pass from ready on.
// A timer that fired late refunds the cost of up to one connection. A readmitted connection is neither
// charged nor counted again.
func (a *admission) take(gt *gate, class *shaper.ClassState, paid bool, why shaper.Reason, waited, ready, now leaky.Time) {
	if gt.pool != nil {
		return // see grant
	}
	if gt.reserved.queue != nil { // others may wait though it has a free slot, and now for another reason
		a.freed = append(a.freed, gt)
	}
	verdict, full := shaper.Delay, gt.exhausted(now)
	gt.count(class, 1, now)
	a.sharing.lending.use(gt, now)
	if gt.budget != nil && !paid {
		gt.budget.Use(1)
	}
	switch {
	case paid:
		return
	case full != shaper.None: // and the limit observes, or the gate would be shut
		if gt.share != nil && full == shaper.ByNewConnections {
			a.sharing.wait(gt.share, gt.depart(now), now)
		}
		gt.state.Connections.Add(verdict, full, 1)
		return
	case why == shaper.None:
		verdict = shaper.Pass
	}
	a.returns.admitted(gt.key)
	switch {
	case gt.history != nil:
		gt.history.Charge(1, now)
	case gt.shape.Window > 0:
		gt.bucket.Charge(gt.shape, 0, 1, now)
	case !gt.useTicket(now):
		gt.bucket.Charge(gt.shape, 0, 1, leaky.CatchUp(ready, now, gt.shape.Packets.Cost(1)))
	}
	if gt.share != nil {
		a.sharing.use(gt.share, 0, 1)
		if gt.limit.Observe {
			gt.share.waitsSince = 0
		}
	}
	gt.state.Connections.Add(verdict, why, 1)
	gt.state.SlotWait.Observe(waited.Duration())
}

// count adds n to the connections of a class in flight.
func (gt *gate) count(class *shaper.ClassState, n int, now leaky.Time) {
	gt.inFlight += n
	l := gt.line(class)
	if l.inFlight += n; l.inFlight == 0 {
		gt.dropLine(class)
	}
	gt.state.InFlight.Add(int64(n))
	if gt.adapter != nil {
		gt.adapter.measure(now)
	}
}

// retryAfter is when the client of w, which is refused at gt, is told to come back. If it is told, that takes a place in the
// line of those who do. Of datagrams nobody knows whether their clients understand it, and their sources may be forged: they take none.
func (a *admission) retryAfter(w *waiter, gt *gate, why shaper.Reason, now leaky.Time) time.Duration {
	l := gt.limit
	if l.NewConnections.N == 0 || gt.shut() {
		return spread(l.QueueTimeout)
	}
	before := gt.waiting
	if w.queue != nil {
		before-- // it waits here still
	}
	first := gt.nextAdmission(before, now)
	if gt.atCap(now) {
		first = max(first, now.Add(leaky.FromDuration(l.QueueTimeout)))
	}
	if why == shaper.ClientGone || w.flow.Protocol != shaper.TCP || l.RefuseWith != shaper.RefuseReply || !tellsTime(l.Reply) {
		return first.Sub(now).Duration()
	}
	_, share := gt.current(now)
	return a.returns.next(gt.key, first, share.Packets.Cost(1), now)
}

// nextAdmission is when new_connections would admit a connection, after those that wait before it.
func (gt *gate) nextAdmission(before int, now leaky.Time) leaky.Time {
	if gt.history != nil {
		return gt.history.Depart(now).Add(gt.shape.Packets.Cost(uint64(before)))
	}
	bucket, share := gt.current(now)
	bucket.Charge(&share.Shape, 0, uint64(before), now)
	return share.Depart(&bucket, now)
}
