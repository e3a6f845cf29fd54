package conn

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// gates are the semaphores in front of downstreams: one for each limit and key
// that caps connections in flight, or paces new ones. They belong to the loop's
// thread.
//
// A connection under several limits passes all their gates at one instant, or none: it
// takes a slot of each, and a turn of each pace, only when it goes on to a downstream.
// While it waits it holds nothing but, for a bounded time, what is reserved for it: so limits
// that cross cannot block each other. It waits at one gate that was shut, and tries all of
// them when its turn comes there; if another one is shut by then, it waits there, and
// keeps its seniority. See queue, and reservation.
type gates struct {
	shaper *shaper.Shaper
	wheel  *leaky.Wheel
	clock  func() leaky.Time

	policy  *shaper.Policy // in effect; see follow
	since   leaky.Time     // when it came into effect
	byKey   map[shaper.Key]*gate
	rooms   map[*shaper.State]*room
	queues  map[string]*queue     // by queueKey
	parties map[netip.Addr]*party // with queues
	name    []byte                // of a queue, to be used again
	gate    uint64                // ID of the last gate
	turn    uint64                // last one given
	again   []*entrant            // that are to try the gates of a new policy in run
	told    []outcome             // that owners are yet to be told
	freed   []*gate               // of reservations, that run is to try
	busy    bool                  // run is at work
}

// gate is the semaphore of one key. Sources that wait at it take turns.
type gate struct {
	id       uint64
	key      shaper.Key
	state    *shaper.State
	room     *room
	policy   *shaper.Policy // that it has followed
	rule     *shaper.Limit
	pool     *pool        // of downstreams, or nil: then it is that of a limit
	shape    *leaky.Shape // of new connections
	bucket   leaky.Bucket // likewise
	inFlight int
	waiting  int
	sources  map[netip.Addr]*source  // that need it, wherever they wait
	turns    ranking[source, byTurn] // those that wait here
	flows    roster                  // that hold a slot
	reserved reservation
	timer    leaky.Event // set when the bucket, not a slot, is waited for
	due      leaky.Time  // when it is to fire; 0 when nobody waits for it
	relief   leaky.Event // set while somebody waits whom idle flows may make room for
}

// entrant is a connection on its way past the gates, and the slots it has got.
type entrant struct {
	slots
	account
	flow   shaper.Flow
	route  shaper.Route // under slots.policy
	listen string
	since  leaky.Time // when it came
	paid   bool       // it has passed before, and pays no pace again

	stranger bool // it may be forged: all that are take turns as one source

	owner interface {
		pool() *gate          // the last one to pass, or nil
		place(now leaky.Time) // has it passed that
		admitted(now leaky.Time)
		refused(why refusal, now leaky.Time)
	}

	waitsIn    *queue       // nil when it does not wait
	next, prev *entrant     // there
	before     []leaky.Time // for how long the queue had waited at each gate when it joined
}

// refusal is why a connection was not let through.
type refusal struct {
	limit  *shaper.Limit
	reason shaper.Reason
	retry  time.Duration // after which a new connection has a chance
	full   bool          // it is no limit, but all downstreams are full
}

// outcome is what becomes of an entrant. It is admitted when no limit refuses it.
type outcome struct {
	*entrant
	refusal
}

func newGates(s *shaper.Shaper, w *leaky.Wheel, clock func() leaky.Time) *gates {
	return &gates{
		shaper: s, wheel: w, clock: clock, policy: s.Policy(),
		byKey: map[shaper.Key]*gate{}, rooms: map[*shaper.State]*room{}, queues: map[string]*queue{}, parties: map[netip.Addr]*party{},
	}
}

// enter brings e past the gates, now or when its turn comes. Its owner is told once
// that it was admitted or refused, which may be before enter returns. When a reload comes
// while it waits, it waits for the gates of the new policy.
func (g *gates) enter(e *entrant, now leaky.Time) {
	e.gates, e.since = g, now
	g.try(e, now)
	g.run(now)
}

// try lets e through all gates of the policy in effect, or has it wait.
func (g *gates) try(e *entrant, now leaky.Time) {
	e.policy = g.policy
	e.flow.Listen = e.policy.ListenIndex(e.listen)
	e.route = e.policy.Route(&e.flow)
	if l := g.block(&e.flow, e.route, now); l != nil {
		g.told = append(g.told, outcome{e, refusal{limit: l, reason: shaper.Blocked, retry: l.MaxWait}})
		return
	}
	list := g.list(&e.flow, e.route)
	if pool := e.owner.pool(); pool != nil {
		list = append(list, pool)
	}
	if i, why := entry(list, e.paid, now); why != shaper.None {
		g.enqueue(e, list, i, why, now)
		return
	}
	for _, gt := range list {
		gt.take(e.paid, shaper.None, 0, now, now)
	}
	g.pass(e, list, now)
}

// pass has e hold the slots of list, which it has taken.
func (g *gates) pass(e *entrant, list []*gate, now leaky.Time) {
	if last := len(list) - 1; last >= 0 && list[last].pool != nil {
		e.owner.place(now)
		g.drop(list[last:], now)
		list = list[:last:last]
	}
	e.held = list
	g.told = append(g.told, outcome{entrant: e})
}

// leave ends the wait of e, if it waits.
func (g *gates) leave(e *entrant, why shaper.Reason, now leaky.Time) {
	if e.waitsIn != nil {
		g.refuse(e, e.waitsIn.at().gate, why, now)
		g.run(now)
	}
}

// withdraw takes e out of the queue it waits in, if it does.
func (g *gates) withdraw(e *entrant, now leaky.Time) {
	if e.waitsIn != nil {
		g.dequeue(e, now)
		g.run(now)
	}
}

// take takes the slots that f, a flow of the listener named listen, needs, if all are
// free. Else it returns the limit that has none.
func (g *gates) take(f *shaper.Flow, listen string, now leaky.Time) (slots, *shaper.Limit) {
	f.Listen = g.policy.ListenIndex(listen)
	r := g.policy.Route(f)
	if l := g.block(f, r, now); l != nil {
		return slots{}, l
	}
	list := g.list(f, r)
	if i, why := entry(list, false, now); why != shaper.None {
		gt := list[i]
		gt.state.Connections.Add(shaper.Refuse, why, 1)
		noteRefused(g.shaper, gt.state, gt.ranked(), f.Source, now)
		g.drop(list, now)
		return slots{}, gt.rule
	}
	for _, gt := range list {
		gt.take(false, shaper.None, 0, now, now)
	}
	return slots{gates: g, policy: g.policy, held: list}, nil
}

// block counts a connection under the limits that block it, and returns one of them that is
// enforced, or nil.
func (g *gates) block(f *shaper.Flow, r shaper.Route, now leaky.Time) *shaper.Limit {
	for i := range (r.Limits() & g.policy.Blocks()).All {
		state := g.policy.State(i)
		state.Connections.Add(shaper.Refuse, shaper.Blocked, 1)
		if l := g.policy.Limit(i); !l.Observe {
			noteRefused(g.shaper, state, g.policy.Key(i, f, r), f.Source, now)
			return l
		}
	}
	return nil
}

// run tells owners what has become of their entrants.
func (g *gates) run(now leaky.Time) {
	if g.busy {
		return
	}
	g.busy = true
	for _, e := range g.again {
		g.try(e, now)
	}
	g.again = nil
	for i := 0; ; i++ {
		g.dispatchFreed(now)
		if i == len(g.told) {
			break
		}
		o := g.told[i]
		g.told[i] = outcome{}
		if o.limit == nil {
			o.owner.admitted(now)
		} else {
			o.owner.refused(o.refusal, now)
		}
	}
	g.told = g.told[:0]
	g.busy = false
}

// refuse sends e away from gt, where it waits or would have to.
func (g *gates) refuse(e *entrant, gt *gate, why shaper.Reason, now leaky.Time) {
	gt.state.Connections.Add(shaper.Refuse, why, 1)
	noteRefused(g.shaper, gt.state, gt.ranked(), e.flow.Source, now)
	retry := gt.rule.MaxWait
	if gt.rule.Connections == 0 {
		retry = gt.retry(now)
	}
	g.told = append(g.told, outcome{e, refusal{gt.rule, why, retry, gt.pool != nil}})
	if e.waitsIn != nil {
		g.dequeue(e, now)
	}
}

// retry is when a new connection would have its turn, behind those that wait.
func (gt *gate) retry(now leaky.Time) time.Duration {
	b := gt.bucket
	b.Charge(gt.shape, 0, uint64(gt.waiting), now)
	return (b.Depart(gt.shape, now) - now).Duration()
}

// swap sets the gates to a new policy, which publish puts into effect everywhere
// else. Those who wait keep their turns, at the gates of the new policy: they come to them
// in the next run, when those in flight have been counted there.
func (g *gates) swap(p *shaper.Policy, publish func(), now leaky.Time) {
	type turn struct {
		*entrant
		round int
		turn  uint64
	}
	var waiting []turn
	for _, q := range g.queues {
		round := 0
		for e := q.head; e != nil; e = e.next {
			waiting = append(waiting, turn{e, round, max(q.turn, q.at().served)})
			round++
		}
	}
	for _, e := range waiting {
		g.dequeue(e.entrant, now)
	}
	publish()
	g.policy, g.since = p, now
	clear(g.rooms) // of gates where nobody waits any more
	slices.SortFunc(waiting, func(a, b turn) int { return cmp.Or(cmp.Compare(a.round, b.round), cmp.Compare(a.turn, b.turn)) })
	for _, e := range waiting {
		g.again = append(g.again, e.entrant)
	}
}

// list returns the gates of f, made if need be, the most specific first.
func (g *gates) list(f *shaper.Flow, r shaper.Route) (list []*gate) {
	for i := range r.Limits().All {
		if l := g.policy.Limit(i); l.Connections != 0 || l.NewConnections.N != 0 {
			list = append(list, g.at(i, l, gateKey(g.policy, i, f, r)))
		}
	}
	return list
}

func gateKey(p *shaper.Policy, i int, f *shaper.Flow, r shaper.Route) shaper.Key {
	key := p.Key(i, f, r)
	key.Limit++ // the bucket of new connections, see shaper.State
	return key
}

// ranked is the key under which gt's limit ranks what it holds back.
func (gt *gate) ranked() shaper.Key {
	key := gt.key
	key.Limit--
	return key
}

// at returns the gate of key, which is one of limit i of the policy in effect.
func (g *gates) at(i int, l *shaper.Limit, key shaper.Key) *gate {
	gt := g.byKey[key]
	if gt == nil {
		state := g.policy.State(i)
		g.gate++
		gt = &gate{
			id: g.gate, key: key, state: state, policy: g.policy, room: g.room(state), rule: l,
			shape: g.policy.NewConnections(i), bucket: g.shaper.CheckOut(key, g.clock()),
		}
		gt.timer.Fire = func(now leaky.Time) { g.dispatch([]*gate{gt}, now); g.run(now) }
		g.byKey[key] = gt
	}
	g.follow(gt)
	return gt
}

// follow brings gt to the policy in effect. Nobody has passed it since that came: it is as if
// it followed then. A gate whose limit has gone stays as it is.
func (g *gates) follow(gt *gate) {
	if gt.policy == g.policy {
		return
	}
	gt.policy = g.policy
	if i := g.policy.Index(gt.state); i >= 0 {
		shape := g.policy.NewConnections(i)
		gt.bucket.Rescale(gt.shape, shape, g.since)
		gt.rule, gt.shape, gt.room = g.policy.Limit(i), shape, g.room(gt.state)
	}
}

// room returns the room of a limit, made if need be.
func (g *gates) room(state *shaper.State) *room {
	rm := g.rooms[state]
	if rm == nil {
		rm = &room{}
		g.rooms[state] = rm
	}
	return rm
}

// drop forgets those of list that nobody holds a slot of or waits for.
func (g *gates) drop(list []*gate, now leaky.Time) {
	for _, gt := range list {
		switch {
		case gt.inFlight > 0 || len(gt.sources) > 0:
		case gt.pool != nil:
			delete(gt.pool.site.pools, gt.pool.key)
		case g.byKey[gt.key] == gt:
			delete(g.byKey, gt.key)
			g.follow(gt)
			g.shaper.CheckIn(gt.key, gt.bucket, now)
		}
	}
}

// full returns what is used up of gt at now.
func (gt *gate) full(now leaky.Time) shaper.Reason {
	switch {
	case gt.capped(now):
		return shaper.ByConnections
	case gt.paced(now):
		return shaper.ByNew
	}
	return shaper.None
}

func (gt *gate) capped(now leaky.Time) bool {
	if gt.pool != nil {
		return gt.pool.full(now)
	}
	return gt.rule.Connections > 0 && gt.inFlight >= gt.rule.Connections
}

func (gt *gate) paced(now leaky.Time) bool { return gt.bucket.Depart(gt.shape, now) > now }

// shut returns which of list keeps a connection of q waiting at now, and why, or None. A cap
// comes before a pace, which is over sooner, and holds back nobody who has paid.
func shut(list []*gate, q *queue, paid bool, now leaky.Time) (int, shaper.Reason) {
	for i, gt := range list {
		if !gt.rule.Observe && (gt.capped(now) || gt.keeps(q, paid)) {
			return i, shaper.ByConnections
		}
	}
	for i, gt := range list {
		if !paid && !gt.rule.Observe && gt.paced(now) {
			return i, shaper.ByNew
		}
	}
	return 0, shaper.None
}

// entry is shut for one who has just come: nobody overtakes those who wait.
func entry(list []*gate, paid bool, now leaky.Time) (int, shaper.Reason) {
	i, why := shut(list, nil, paid, now)
	if why == shaper.None {
		if i = slices.IndexFunc(list, func(gt *gate) bool { return len(gt.turns) > 0 }); i >= 0 {
			why = shaper.ByConnections
		}
	}
	return i, why
}

// take takes a slot for a connection that was kept waiting here for why, since ready at
// the latest. A timer that fired late gives back what one connection costs. One that has
// paid is neither charged nor counted again.
func (gt *gate) take(paid bool, why shaper.Reason, waited, ready, now leaky.Time) {
	if gt.pool != nil {
		return // see pass
	}
	verdict, full := shaper.Delay, gt.full(now)
	gt.inFlight++
	gt.state.InFlight.Add(1)
	switch {
	case paid:
		return
	case full != shaper.None: // and only observed, or it would not be here
		gt.state.Connections.Add(verdict, full, 1)
		return
	case why == shaper.None:
		verdict = shaper.Pass
	}
	gt.bucket.Charge(gt.shape, 0, 1, leaky.Late(ready, now, gt.shape.Packets.Cost(1)))
	gt.state.Connections.Add(verdict, why, 1)
	gt.state.Wait.Observe(waited.Duration())
}
