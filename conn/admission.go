package conn

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// admission decides when connections and UDP flows get their slots. It has one gate for each limit and
// key that caps connections in flight or the rate of new ones. It belongs to the loop's thread.
//
// A connection under several limits passes all their gates at one instant or none: it takes a slot of
// each, and is charged to each rate of new connections, only when it proceeds to a downstream. While
// it waits it holds nothing except, for a bounded time, a reservation. So limits that cross cannot
// deadlock. It waits at one gate that was shut. When its turn comes there it tries all its gates; if
// another one is shut by then, it moves there and keeps its ticket. See waitQueue and reservation.
type admission struct {
	shaper *shaper.Shaper
	wheel  *pacer.Wheel
	clock  func() leaky.Time

	policy      *shaper.Policy // current; see refresh
	policySince leaky.Time     // when policy became current
	byKey       map[shaper.Key]*gate
	quotas      map[*shaper.LimitState]*waitQuota
	queues      map[string]*waitQueue           // by queueKey
	sources     map[netip.Addr]*admissionSource // that have queues
	keyBuf      []byte                          // of a queue, reused
	lastGateID  uint64                          // of the newest gate
	lastTicket  uint64                          // the last one issued
	retries     []*waiter                       // waiters that run tries at the gates of a new policy
	outcomes    []outcome                       // not yet reported to the owners
	freed       []*gate                         // gates that run dispatches after a reservation
	running     bool                            // run is on the stack
}

// gate is the semaphore of one bucket key, and limits its rate of new connections. Sources take turns
// at it.
type gate struct {
	id       uint64
	key      shaper.Key
	state    *shaper.LimitState
	quota    *waitQuota
	policy   *shaper.Policy // of limit and shape
	limit    *shaper.Limit
	pool     *pool        // of downstreams; nil at the gate of a limit
	shape    *leaky.Shape // rate of new connections
	bucket   leaky.Bucket // of new connections
	inFlight int
	waiting  int
	sources  map[netip.Addr]*gateSource        // that need the gate, wherever they wait
	queued   indexedHeap[gateSource, byTicket] // sources that wait here
	flows    flowLRU                           // UDP flows that hold a slot
	reserved reservation
	timer    pacer.Event // scheduled while a connection waits for the bucket, and not for a slot
	dueAt    leaky.Time  // when timer fires; 0 when nothing waits for the bucket
	relief   pacer.Event // scheduled while connections wait that could replace idle flows
}

// waiter is a connection in admission, with the slots it gets.
type waiter struct {
	slots
	account
	flow    shaper.Flow
	route   shaper.Route // under slots.policy
	listen  string
	arrived leaky.Time // when acquire was called
	paid    bool       // admitted before: not charged again to rates of new connections

	unverified bool // the source may be forged; all unverified waiters count as one source

	owner interface {
		pool() *gate                     // the last gate to pass, or nil
		assignDownstream(now leaky.Time) // called when the pool's gate was passed
		admitted(now leaky.Time)
		refused(why refusal, now leaky.Time)
	}

	queue        *waitQueue   // nil when it does not wait
	next, prev   *waiter      // in queue
	waitedBefore []leaky.Time // how long queue had waited at each gate when the waiter joined
}

// refusal is the reason why a connection was not admitted.
type refusal struct {
	limit      *shaper.Limit
	reason     shaper.Reason
	retryAfter time.Duration // when a new connection has a chance
	poolFull   bool          // all downstreams are full; limit is the pool's
}

// outcome is the result of admission for a waiter: admitted, unless a limit refused it.
type outcome struct {
	*waiter
	refusal
}

func newAdmission(s *shaper.Shaper, w *pacer.Wheel, clock func() leaky.Time) *admission {
	return &admission{
		shaper: s, wheel: w, clock: clock, policy: s.Policy(),
		byKey: map[shaper.Key]*gate{}, quotas: map[*shaper.LimitState]*waitQuota{}, queues: map[string]*waitQueue{}, sources: map[netip.Addr]*admissionSource{},
	}
}

// acquire admits w now or when its turn comes. Its owner is called once, with admitted or refused,
// possibly before acquire returns. After a reload w waits at the gates of the new policy.
func (a *admission) acquire(w *waiter, now leaky.Time) {
	w.admission, w.arrived = a, now
	a.admitOrQueue(w, now)
	a.run(now)
}

// admitOrQueue passes w through all gates of the current policy or queues it.
func (a *admission) admitOrQueue(w *waiter, now leaky.Time) {
	w.policy = a.policy
	w.flow.Origin = w.policy.ListenerIndex(w.listen)
	w.route = w.policy.Route(&w.flow)
	if l := a.checkBlocks(&w.flow, w.route, now); l != nil {
		a.outcomes = append(a.outcomes, outcome{w, refusal{limit: l, reason: shaper.Blocked, retryAfter: l.QueueTimeout}})
		return
	}
	list := a.gatesFor(&w.flow, w.route)
	if pool := w.owner.pool(); pool != nil {
		list = append(list, pool)
	}
	if i, why := findShutOnArrival(list, w.paid, now); why != shaper.None {
		a.enqueue(w, list, i, why, now)
		return
	}
	for _, gt := range list {
		gt.take(w.paid, shaper.None, 0, now, now)
	}
	a.grant(w, list, now)
}

// grant gives w the slots of list, which are already taken.
func (a *admission) grant(w *waiter, list []*gate, now leaky.Time) {
	if last := len(list) - 1; last >= 0 && list[last].pool != nil {
		w.owner.assignDownstream(now)
		a.dropUnused(list[last:], now)
		list = list[:last:last]
	}
	w.held = list
	a.outcomes = append(a.outcomes, outcome{waiter: w})
}

// cancel refuses w if it waits.
func (a *admission) cancel(w *waiter, why shaper.Reason, now leaky.Time) {
	if w.queue != nil {
		a.refuse(w, w.queue.current().gate, why, now)
		a.run(now)
	}
}

// withdraw dequeues w if it waits.
func (a *admission) withdraw(w *waiter, now leaky.Time) {
	if w.queue != nil {
		a.dequeue(w, now)
		a.run(now)
	}
}

// tryAcquire takes the slots for f, a flow of the listener named listen, if all are free. Otherwise it
// returns a limit that has none.
func (a *admission) tryAcquire(f *shaper.Flow, listen string, now leaky.Time) (slots, *shaper.Limit) {
	f.Origin = a.policy.ListenerIndex(listen)
	r := a.policy.Route(f)
	if l := a.checkBlocks(f, r, now); l != nil {
		return slots{}, l
	}
	list := a.gatesFor(f, r)
	if i, why := findShutOnArrival(list, false, now); why != shaper.None {
		gt := list[i]
		gt.state.Connections.Add(shaper.Refuse, why, 1)
		recordRefusal(a.shaper, gt.state, gt.limitKey(), f.Source, now)
		a.dropUnused(list, now)
		return slots{}, gt.limit
	}
	for _, gt := range list {
		gt.take(false, shaper.None, 0, now, now)
	}
	return slots{admission: a, policy: a.policy, held: list}, nil
}

// checkBlocks counts a connection under the limits that block it, and returns an enforced one of them,
// or nil.
func (a *admission) checkBlocks(f *shaper.Flow, r shaper.Route, now leaky.Time) *shaper.Limit {
	for i := range (r.Limits() & a.policy.Blocks()).All {
		state := a.policy.State(i)
		state.Connections.Add(shaper.Refuse, shaper.Blocked, 1)
		if l := a.policy.Limit(i); !l.Observe {
			recordRefusal(a.shaper, state, a.policy.Key(i, f, r), f.Source, now)
			return l
		}
	}
	return nil
}

// run reports outcomes to the owners of the waiters.
func (a *admission) run(now leaky.Time) {
	if a.running {
		return
	}
	a.running = true
	for _, w := range a.retries {
		a.admitOrQueue(w, now)
	}
	a.retries = nil
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
		}
	}
	a.outcomes = a.outcomes[:0]
	a.running = false
}

// refuse refuses w at gt, where it waits or would have to.
func (a *admission) refuse(w *waiter, gt *gate, why shaper.Reason, now leaky.Time) {
	gt.state.Connections.Add(shaper.Refuse, why, 1)
	recordRefusal(a.shaper, gt.state, gt.limitKey(), w.flow.Source, now)
	retry := gt.limit.QueueTimeout
	if gt.limit.MaxConnections == 0 {
		retry = gt.retryAfter(now)
	}
	a.outcomes = append(a.outcomes, outcome{w, refusal{gt.limit, why, retry, gt.pool != nil}})
	if w.queue != nil {
		a.dequeue(w, now)
	}
}

// retryAfter is when a new connection would be admitted, after those that wait.
func (gt *gate) retryAfter(now leaky.Time) time.Duration {
	b := gt.bucket
	b.Charge(gt.shape, 0, uint64(gt.waiting), now)
	return (b.Depart(gt.shape, now) - now).Duration()
}

// swap changes to a new policy, which publish makes current everywhere else. Waiters keep their
// tickets and move to the gates of the new policy in the next run, when the connections in flight have
// been counted there.
func (a *admission) swap(p *shaper.Policy, publish func(), now leaky.Time) {
	type turn struct {
		*waiter
		round int
		turn  uint64
	}
	var waiting []turn
	for _, q := range a.queues {
		round := 0
		for w := q.head; w != nil; w = w.next {
			waiting = append(waiting, turn{w, round, max(q.ticket, q.current().lastServed)})
			round++
		}
	}
	for _, e := range waiting {
		a.dequeue(e.waiter, now)
	}
	publish()
	a.policy, a.policySince = p, now
	clear(a.quotas) // those of gates at which nothing waits
	slices.SortFunc(waiting, func(x, y turn) int { return cmp.Or(cmp.Compare(x.round, y.round), cmp.Compare(x.turn, y.turn)) })
	for _, e := range waiting {
		a.retries = append(a.retries, e.waiter)
	}
}

// gatesFor returns the gates of f, most specific first. Missing ones are created.
func (a *admission) gatesFor(f *shaper.Flow, r shaper.Route) (list []*gate) {
	for i := range r.Limits().All {
		if l := a.policy.Limit(i); l.MaxConnections != 0 || l.NewConnections.N != 0 {
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
		gt = &gate{
			id: a.lastGateID, key: key, state: state, policy: a.policy, quota: a.quotaFor(state), limit: l,
			shape: a.policy.NewConnections(i), bucket: a.shaper.CheckOut(key, a.clock()),
		}
		gt.timer.Fire = func(now leaky.Time) { a.dispatch([]*gate{gt}, now); a.run(now) }
		a.byKey[key] = gt
	}
	a.refresh(gt)
	return gt
}

// refresh updates gt to the current policy. Nothing has passed it since that became current, so the
// result is the same as if it had been updated then. A gate whose limit was removed stays as it is.
func (a *admission) refresh(gt *gate) {
	if gt.policy == a.policy {
		return
	}
	gt.policy = a.policy
	if i := a.policy.IndexOf(gt.state); i >= 0 {
		shape := a.policy.NewConnections(i)
		gt.bucket.Rescale(gt.shape, shape, a.policySince)
		gt.limit, gt.shape, gt.quota = a.policy.Limit(i), shape, a.quotaFor(gt.state)
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
		case gt.inFlight > 0 || len(gt.sources) > 0:
		case gt.pool != nil:
			delete(gt.pool.listener.pools, gt.pool.key)
		case a.byKey[gt.key] == gt:
			delete(a.byKey, gt.key)
			a.refresh(gt)
			a.shaper.CheckIn(gt.key, gt.bucket, now)
		}
	}
}

// exhausted returns which resource of gt is used up at now, or None.
func (gt *gate) exhausted(now leaky.Time) shaper.Reason {
	switch {
	case gt.atCap(now):
		return shaper.ByConnections
	case gt.atRate(now):
		return shaper.ByNewConnections
	}
	return shaper.None
}

func (gt *gate) atCap(now leaky.Time) bool {
	if gt.pool != nil {
		return gt.pool.full(now)
	}
	return gt.limit.MaxConnections > 0 && gt.inFlight >= gt.limit.MaxConnections
}

func (gt *gate) atRate(now leaky.Time) bool { return gt.bucket.Depart(gt.shape, now) > now }

// findShut returns the gate of list that keeps a connection of q waiting at now, and the reason, or
// None. A cap takes precedence over a rate, which recovers sooner and does not apply to the
// readmitted.
func findShut(list []*gate, q *waitQueue, paid bool, now leaky.Time) (int, shaper.Reason) {
	for i, gt := range list {
		if !gt.limit.Observe && (gt.atCap(now) || gt.reservedAgainst(q, paid)) {
			return i, shaper.ByConnections
		}
	}
	for i, gt := range list {
		if !paid && !gt.limit.Observe && gt.atRate(now) {
			return i, shaper.ByNewConnections
		}
	}
	return 0, shaper.None
}

// findShutOnArrival is findShut for a new connection, which does not overtake waiters.
func findShutOnArrival(list []*gate, paid bool, now leaky.Time) (int, shaper.Reason) {
	i, why := findShut(list, nil, paid, now)
	if why == shaper.None {
		if i = slices.IndexFunc(list, func(gt *gate) bool { return len(gt.queued) > 0 }); i >= 0 {
			why = shaper.ByConnections
		}
	}
	return i, why
}

// take takes a slot for a connection that waited here for reason why, and could pass from ready on.
// A timer that fired late refunds the cost of up to one connection. A readmitted connection is neither
// charged nor counted again.
func (gt *gate) take(paid bool, why shaper.Reason, waited, ready, now leaky.Time) {
	if gt.pool != nil {
		return // see grant
	}
	verdict, full := shaper.Delay, gt.exhausted(now)
	gt.inFlight++
	gt.state.InFlight.Add(1)
	switch {
	case paid:
		return
	case full != shaper.None: // and the limit observes, or the gate would be shut
		gt.state.Connections.Add(verdict, full, 1)
		return
	case why == shaper.None:
		verdict = shaper.Pass
	}
	gt.bucket.Charge(gt.shape, 0, 1, leaky.CatchUp(ready, now, gt.shape.Packets.Cost(1)))
	gt.state.Connections.Add(verdict, why, 1)
	gt.state.SlotWait.Observe(waited.Duration())
}
