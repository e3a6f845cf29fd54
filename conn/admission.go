// Owner: the loop's thread.

package conn

import (
	"cmp"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/conn/penalty"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// admission decides when connections and UDP flows get their slots. It has one gate for each limit and
// key that caps connections in flight or the rate of new ones.
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
	sharing     *sharing
	budgets     *quotas
	byKey       map[shaper.Key]*gate
	quotas      map[*shaper.LimitState]*waitQuota
	adapters    map[*shaper.LimitState]*adapter
	penalties   []*sourcePenalty // of the limits of policy that have one

	restored       []shaper.PenaltyStatus                // for the next policy
	penaltyChanges atomic.Uint64                         // see PenaltyChanges
	onPenalty      func(*sourcePenalty, *penalty.Source) // logs it
	queues         map[string]*waitQueue                 // by queueKey
	sources        map[memberKey]*admissionSource        // that have queues
	keyBuf         []byte                                // of a queue, reused
	yieldIdle      func(gt *gate, now leaky.Time)        // ends idle connections for those that wait at gt
	lastGateID     uint64                                // of the newest gate
	lastTicket     *atomic.Uint64                        // counter of the last one issued, by any worker: waiters may move to another
	retries        []*waiter                             // waiters that run tries at the gates of a new policy
	outcomes       []outcome                             // not yet reported to the owners
	returns        returns                               // of refused clients
	freed          []*gate                               // gates that run dispatches after a reservation
	running        bool                                  // run is on the stack
	decisions      decisionTimes
}

// waiter is a connection in admission, with the slots it gets.
type waiter struct {
	slots
	account
	flow    shaper.Flow
	route   shaper.Route // under slots.policy
	listen  string
	since   leaky.Time // when acquire was first called
	arrived leaky.Time // when acquire was last called
	paid    bool       // admitted before: not charged again to rates of new connections

	owner interface {
		pool() *gate                     // the last gate to pass, or nil
		assignDownstream(now leaky.Time) // called when the pool's gate was passed
		admitted(now leaky.Time)
		refused(why refusal, now leaky.Time)
	}

	queue        *waitQueue         // nil when it does not wait
	link         fairq.Link[waiter] // in queue
	waitedBefore []leaky.Time       // how long queue had waited at each gate when the waiter joined
}

// refusal is the reason why a connection was not admitted.
type refusal struct {
	limit      *shaper.Limit
	reason     shaper.Reason
	retryAfter time.Duration // what a client is told: when it has a chance; 0 if that is not known
	rateUsedUp bool          // no new connection may pass now, whatever is in flight
	poolFull   bool          // all downstreams are full; limit is the pool's
	byOthers   bool          // if there were no others it might have been admitted
}

func newAdmission(sg *sharing) *admission {
	return &admission{
		shaper: sg.shaper, wheel: sg.wheel, clock: sg.clock, sharing: sg, policy: sg.shaper.Policy(), yieldIdle: func(*gate, leaky.Time) {}, onPenalty: func(*sourcePenalty, *penalty.Source) {},
		byKey: map[shaper.Key]*gate{}, quotas: map[*shaper.LimitState]*waitQuota{}, adapters: map[*shaper.LimitState]*adapter{},
		queues: map[string]*waitQueue{}, sources: map[memberKey]*admissionSource{}, lastTicket: new(atomic.Uint64),
	}
}

// acquire admits w now or when its turn comes. Its owner is called once, with admitted or refused,
// possibly before acquire returns. After a reload w waits at the gates of the new policy.
func (a *admission) acquire(w *waiter, now leaky.Time) {
	w.admission, w.arrived = a, now
	first := w.since == 0
	if first {
		w.since = now
	}
	if first && !w.inTurns && a.policy.Sheds() != 0 {
		w.flow.Origin = a.policy.ListenerIndex(w.listen)
		r := a.policy.Route(&w.flow)
		if l := a.checkShed(&w.flow, r, rand.Float64(), now); l != nil {
			w.policy = a.policy
			a.outcomes = append(a.outcomes, outcome{w, refusal{limit: l, reason: shaper.ShedLoad, retryAfter: spread(shaper.ShedRetryAfter)}})
			a.run(now)
			return
		}
	}
	a.decisions.time(a.clock, func() { a.admitOrQueue(w, false, now) })
	a.run(now)
}

// admitOrQueue passes w through all gates of the current policy or queues it. If it comes with others it waits, too, for a dispatch in
// the next run, unless it may not.
func (a *admission) admitOrQueue(w *waiter, withOthers bool, now leaky.Time) {
	w.policy = a.policy
	w.flow.Origin = w.policy.ListenerIndex(w.listen)
	w.route = w.policy.Route(&w.flow)
	w.precedence = a.precedenceOf(&w.flow, w.route, w.unverified)
	if !w.inTurns {
		if l := a.checkBlocks(&w.flow, w.route, now); l != nil {
			a.outcomes = append(a.outcomes, outcome{w, refusal{limit: l, reason: shaper.Blocked}})
			return
		}
		if l, left := a.checkPenalties(&w.flow, w.route, now); l != nil {
			a.outcomes = append(a.outcomes, outcome{w, refusal{limit: l, reason: shaper.Blocked, retryAfter: left}})
			return
		}
		if !w.paid {
			if l, ends := a.checkQuotas(&w.flow, w.route, now); l != nil {
				a.outcomes = append(a.outcomes, outcome{w, refusal{limit: l, reason: shaper.QuotaUsed, retryAfter: ends}})
				return
			}
		}
	}
	list := a.gatesFor(&w.flow, w.route, w.inTurns)
	if pool := w.owner.pool(); pool != nil {
		list = append(list, pool)
	}
	if i, why := findShutOnArrival(list, w.precedence, w.paid, now); why != shaper.None {
		a.enqueue(w, list, i, why, now)
		return
	}
	if withOthers && len(list) > 0 {
		gt := list[0]
		if l := gt.limit; gt.pool == nil && gt.quota.waiting < l.MaxQueue && now < w.arrived+leaky.FromDuration(l.QueueTimeout) {
			a.enqueue(w, list, 0, shaper.ByConnections, now)
			a.freed = append(a.freed, gt)
			return
		}
	}
	for _, gt := range list {
		a.take(gt, w.precedence.class, w.paid, shaper.None, 0, now, now)
	}
	a.grant(w, list, now)
}

// cancel refuses w if it waits.
func (a *admission) cancel(w *waiter, why shaper.Reason, now leaky.Time) {
	if w.queue != nil {
		a.refuse(w, why, now)
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
func (a *admission) tryAcquire(f *shaper.Flow, listen string, unverified bool, now leaky.Time) (slots, *shaper.Limit) {
	f.Origin = a.policy.ListenerIndex(listen)
	r := a.policy.Route(f)
	if l := a.checkBlocks(f, r, now); l != nil {
		return slots{}, l
	}
	if l, _ := a.checkPenalties(f, r, now); l != nil {
		return slots{}, l
	}
	if l, _ := a.checkQuotas(f, r, now); l != nil {
		return slots{}, l
	}
	list, st := a.gatesFor(f, r, false), a.precedenceOf(f, r, unverified)
	if i, why := findShutOnArrival(list, st, false, now); why != shaper.None {
		gt := list[i]
		a.countRefusal(gt, st.class, why, f.Source, now)
		a.dropUnused(list, now)
		return slots{}, gt.limit
	}
	for _, gt := range list {
		a.take(gt, st.class, false, shaper.None, 0, now, now)
	}
	st.class.Admitted.Add(1)
	return slots{admission: a, policy: a.policy, held: list, precedence: st, unverified: unverified}, nil
}

// precheck reports whether all gates would admit f, a flow of the listener named listen, if makeRoom
// evicts flows that hold slots. Otherwise it returns the limit that would not, and whether f may wait
// for it; if f may not, the refusal is counted. It takes no slot, and charges no rate.
func (a *admission) precheck(f *shaper.Flow, listen string, unverified bool, draw float64, now leaky.Time, makeRoom func(*flowLRU) bool) (_ *shaper.Limit, mayWait bool) {
	f.Origin = a.policy.ListenerIndex(listen)
	r := a.policy.Route(f)
	if l := a.checkBlocks(f, r, now); l != nil {
		return l, false
	}
	if l, _ := a.checkPenalties(f, r, now); l != nil {
		return l, false
	}
	if l := a.checkShed(f, r, draw, now); l != nil {
		return l, false
	}
	if l, _ := a.checkQuotas(f, r, now); l != nil {
		return l, false
	}
	list, st := a.gatesFor(f, r, false), a.precedenceOf(f, r, unverified)
	defer a.dropUnused(list, now)
	for _, gt := range list {
		why := gt.exhausted(now)
		switch {
		case gt.limit.Observe:
			why = shaper.None
		case gt.waitersFirst(st) || gt.reservedAgainst(nil, st, false):
			why = cmp.Or(why, shaper.ByConnections)
		case why == shaper.ByConnections && gt.inFlight == gt.slots && makeRoom(&gt.flows):
			why = shaper.None
			if gt.atRate(now) {
				why = shaper.ByNewConnections
			} else if gt.awaitsClaim(now) { // it could not be admitted at once: nobody is evicted for it yet
				why = shaper.QuotaUsed
			}
		}
		if why != shaper.None {
			if mayWait = gt.limit.QueueTimeout > 0 && gt.limit.MaxQueue > 0; !mayWait {
				a.countRefusal(gt, st.class, why, f.Source, now)
			}
			return gt.limit, mayWait
		}
	}
	return nil, false
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

// checkShed counts a connection under the limits that shed it, and returns an enforced one of them, or nil. draw, from 0
// to 1, decides: a limit sheds those below its share. One that is blocked is not shed.
func (a *admission) checkShed(f *shaper.Flow, r shaper.Route, draw float64, now leaky.Time) *shaper.Limit {
	set := r.Limits() & a.policy.Sheds()
	if set == 0 || a.policy.EnforcedBlock(r.Limits()) >= 0 {
		return nil
	}
	for i := range set.All {
		state := a.policy.State(i)
		if st := state.Shed.Load(); st == nil || draw >= st.Share {
			continue
		}
		state.Connections.Add(shaper.Refuse, shaper.ShedLoad, 1)
		if l := a.policy.Limit(i); !l.Observe {
			recordRefusal(a.shaper, state, a.policy.Key(i, f, r), f.Source, now)
			return l
		}
	}
	return nil
}

// refuse refuses w at the gate where it waits.
func (a *admission) refuse(w *waiter, why shaper.Reason, now leaky.Time) {
	a.refuseAs(w, w.queue.current(), why, now)
	a.dequeue(w, now)
}

// refuseAs refuses w at a gate where it is of src.
func (a *admission) refuseAs(w *waiter, src *gateSource, why shaper.Reason, now leaky.Time) {
	gt := src.gate
	a.countRefusal(gt, w.precedence.class, why, w.flow.Source, now)
	a.outcomes = append(a.outcomes, outcome{w, refusal{gt.limit, why, a.retryAfter(w, gt, why, now), gt.atRate(now), gt.pool != nil, w.crowdedOut(src, why, now)}})
}

// crowdedOut reports whether w is refused as src because of a quota, or of other sources: they fill the queue of the limit, or w has waited
// for a limit that others use up, and those of its source that waited with it were let in at once.
func (w *waiter) crowdedOut(src *gateSource, why shaper.Reason, now leaky.Time) bool {
	if src.gate.exhausted(now) == shaper.QuotaUsed { // or no disk has written that it may use some
		return true
	}
	if why == shaper.WaitingFull && src.waiting <= src.gate.limit.MaxQueue/2 && src.gate.limit.MaxQueue > 0 {
		return true
	}
	for i := range w.waitedBefore {
		if i != w.queue.pos && w.queue.waitedAt(i, now) > w.waitedBefore[i] {
			return true
		}
	}
	return false
}

// countRefusal counts a connection of source that was refused at gt.
func (a *admission) countRefusal(gt *gate, class *shaper.ClassState, why shaper.Reason, source netip.Addr, now leaky.Time) {
	if !gt.limit.SlotFor.InTurns() {
		class.Refused.Add(1)
	}
	gt.state.Connections.Add(shaper.Refuse, why, 1)
	recordRefusal(a.shaper, gt.state, gt.limitKey(), source, now)
	a.sharing.lending.miss(gt)
	a.sharing.miss(gt, now)
}

// swapPolicy changes to a new policy in all of admissions, and publish makes it current everywhere else. Waiters keep their
// tickets and move to the gates of the new policy in the next run, when the connections in flight have
// been counted there.
func swapPolicy(p *shaper.Policy, publish func(), now leaky.Time, all ...*admission) {
	for _, a := range all {
		a.suspend(now)
	}
	publish()
	for _, a := range all {
		a.policy, a.policySince = p, now
		a.updateAdapters(now)
		a.updatePenalties(now)
		clear(a.quotas) // those of gates at which nothing waits
	}
}

// suspend dequeues all waiters until the next run.
func (a *admission) suspend(now leaky.Time) {
	a.retries = append(a.retries, waitersOf(a.dequeueAll(now))...)
}

// requeue makes all waiters try the gates that they need now. They keep their turns.
func (a *admission) requeue(now leaky.Time) {
	a.suspend(now)
	a.run(now)
}

// suspended is a waiter that was dequeued, and the turn that it had: in which round, and by which ticket.
type suspended struct {
	*waiter
	round  int
	ticket uint64
}

func compareTurns(x, y suspended) int {
	return cmp.Or(cmp.Compare(priorityOf(y.ticket), priorityOf(x.ticket)), cmp.Compare(x.round, y.round), cmp.Compare(x.ticket, y.ticket))
}

func waitersOf(turns []suspended) (list []*waiter) {
	for _, t := range turns {
		list = append(list, t.waiter)
	}
	return list
}

// dequeueAll dequeues all waiters, and returns them in the order of their turns.
func (a *admission) dequeueAll(now leaky.Time) (waiting []suspended) {
	for _, q := range a.queues {
		round := 0
		for w := range q.waiters.All() {
			waiting = append(waiting, suspended{w, round, max(q.ticket, q.current().top().lastServed)})
			round++
		}
	}
	for _, e := range waiting {
		a.dequeue(e.waiter, now)
	}
	slices.SortFunc(waiting, compareTurns)
	return waiting
}
