package conn

import (
	"net/netip"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// gates are the semaphores in front of downstreams: one for each limit and key
// that caps connections in flight, or paces new ones. They belong to the loop's
// thread.
//
// A connection under several limits passes their gates one after the other, in
// the same order as all others, and holds each slot until it ends. Those that
// pace come last, so that what they let through is under way at once.
type gates struct {
	shaper *shaper.Shaper
	wheel  *leaky.Wheel
	clock  func() leaky.Time

	policy  *shaper.Policy // that the gates are set to
	byKey   map[shaper.Key]*gate
	rooms   map[*shaper.State]*room
	limits  []int      // of gated, to be used again
	granted []*entrant // that go on in run
	busy    bool       // run is at work
}

// gate is the semaphore of one key. Free slots go to the waiting sources in
// turn, and to a source's connections in the order they came: however many
// connections one source has waiting, another waits for one turn.
type gate struct {
	key      shaper.Key
	state    *shaper.State
	room     *room
	limit    int          // connections in flight; 0 is no cap
	shape    *leaky.Shape // of new connections
	bucket   leaky.Bucket // likewise
	inFlight int
	waiting  int
	turn     *source // of a ring of those with waiters; nil when nobody waits
	sources  map[netip.Addr]*source
	flows    roster      // that hold a slot
	timer    leaky.Event // set when the bucket, not a slot, is waited for
	observe  bool        // count, and let everybody pass
}

// slots are what one connection holds. They are released once.
type slots struct {
	gates  *gates
	policy *shaper.Policy // under which they were taken
	held   []*gate
}

// entrant is a connection on its way past the gates, and the slots it has got.
type entrant struct {
	slots
	account
	flow   shaper.Flow
	route  shaper.Route // under slots.policy
	listen string
	since  leaky.Time // when it came

	owner interface {
		admitted(now leaky.Time)
		refused(why refusal, now leaky.Time)
	}

	source     *source       // in whose queue it waits; nil when it does not
	next, prev *entrant      // in that queue
	limit      *shaper.Limit // at whose gate it waits
	blocked    shaper.Reason // what kept it
	joined     leaky.Time    // when it began to wait there
	timeout    leaky.Event
}

// refusal is why a connection was not let through.
type refusal struct {
	limit  *shaper.Limit
	reason shaper.Reason
	retry  time.Duration // after which a new connection has a chance
}

func newGates(s *shaper.Shaper, w *leaky.Wheel, clock func() leaky.Time) *gates {
	return &gates{
		shaper: s, wheel: w, clock: clock, policy: s.Policy(),
		byKey: map[shaper.Key]*gate{}, rooms: map[*shaper.State]*room{},
	}
}

// enter brings e past the gates, now or when its turn comes. Its owner is told once
// that it was admitted or refused, which may be before enter returns.
//
// It is routed anew when a reload comes while it waits: the slots it has got are
// kept where the new policy asks for the same ones, and else given up.
func (g *gates) enter(e *entrant, now leaky.Time) {
	e.gates, e.since = g, now
	g.advance(e, now)
	g.run(now)
}

// leave ends the wait of e, if it waits.
func (g *gates) leave(e *entrant, why shaper.Reason, now leaky.Time) {
	if e.source == nil {
		return
	}
	gt := e.source.gate
	g.unqueue(e)
	g.refuse(e, gt, why, now)
	g.run(now)
}

// withdraw takes e out of the queue it waits in, if it does.
func (g *gates) withdraw(e *entrant, now leaky.Time) {
	if e.source == nil {
		return
	}
	gt := e.source.gate
	g.unqueue(e)
	g.drop(gt, now)
}

// take takes the slots that f, a flow of the listener named listen, needs, if all are
// free. Else it returns the limit that has none.
func (g *gates) take(f *shaper.Flow, listen string, now leaky.Time) (slots, *shaper.Limit) {
	got := slots{gates: g, policy: g.policy}
	f.Listen = g.policy.ListenIndex(listen)
	r := g.policy.Route(f)
	if l := g.block(f, r, now); l != nil {
		return slots{}, l
	}
	for _, i := range g.gated(r) {
		gt := g.gate(i, f, r)
		if blocked := gt.try(now); blocked != shaper.None {
			gt.state.Connections.Add(shaper.Refuse, blocked, 1)
			noteRefused(g.shaper, gt.state, gt.ranked(), f.Source, 0, now)
			g.drop(gt, now)
			got.release(now)
			return slots{}, g.policy.Limit(i)
		}
		got.held = append(got.held, gt)
	}
	return got, nil
}

// block counts a connection under the limits that block it, and returns one of them that is
// enforced, or nil.
func (g *gates) block(f *shaper.Flow, r shaper.Route, now leaky.Time) *shaper.Limit {
	for i := range (r.Limits() & g.policy.Blocks()).All {
		state := g.policy.State(i)
		state.Connections.Add(shaper.Refuse, shaper.Blocked, 1)
		if l := g.policy.Limit(i); !l.Observe {
			noteRefused(g.shaper, state, g.policy.Key(i, f, r), f.Source, 0, now)
			return l
		}
	}
	return nil
}

// run lets those go on that have got a slot.
func (g *gates) run(now leaky.Time) {
	if g.busy {
		return
	}
	g.busy = true
	for i := 0; i < len(g.granted); i++ {
		e := g.granted[i]
		g.granted[i] = nil
		g.advance(e, now)
	}
	g.granted = g.granted[:0]
	g.busy = false
}

// advance brings e as far as it can come at now.
func (g *gates) advance(e *entrant, now leaky.Time) {
	if e.policy != g.policy {
		e.policy = g.policy
		e.flow.Listen = e.policy.ListenIndex(e.listen)
		e.route = e.policy.Route(&e.flow)
		if !e.prefix(g.gated(e.route)) {
			e.free(now)
		}
		if l := g.block(&e.flow, e.route, now); l != nil {
			e.free(now)
			e.owner.refused(refusal{l, shaper.Blocked, l.MaxWait}, now)
			return
		}
	}
	limits := g.gated(e.route)
	for len(e.held) < len(limits) {
		i := limits[len(e.held)]
		gt := g.gate(i, &e.flow, e.route)
		e.limit, e.blocked = g.policy.Limit(i), gt.try(now)
		if e.blocked != shaper.None {
			g.wait(e, gt, now)
			return
		}
		e.held = append(e.held, gt)
	}
	e.owner.admitted(now)
}

// wait has e wait for its turn at gt, if there is room.
func (g *gates) wait(e *entrant, gt *gate, now leaky.Time) {
	e.joined = now
	if !g.enqueue(gt, e, now) {
		g.refuse(e, gt, shaper.WaitingFull, now)
		return
	}
	e.timeout.Fire = func(now leaky.Time) { g.leave(e, shaper.WaitTimeout, now) }
	g.wheel.Schedule(&e.timeout, e.since+leaky.FromDuration(e.limit.MaxWait))
	g.dispatch(gt, now)
}

func (g *gates) refuse(e *entrant, gt *gate, why shaper.Reason, now leaky.Time) {
	gt.state.Connections.Add(shaper.Refuse, why, 1)
	waited := now.Sub(e.joined)
	e.wait(gt.state, waited)
	noteRefused(g.shaper, gt.state, gt.ranked(), e.flow.Source, waited, now)
	retry := e.limit.MaxWait
	if e.limit.Connections == 0 {
		retry = gt.retry(now)
	}
	e.free(now)
	g.drop(gt, now)
	e.owner.refused(refusal{e.limit, why, retry}, now)
}

// retry is when a new connection would have its turn, behind those that wait.
func (gt *gate) retry(now leaky.Time) time.Duration {
	b := gt.bucket
	b.Charge(gt.shape, 0, uint64(gt.waiting), now)
	return (b.Depart(gt.shape, now) - now).Duration()
}

// gated returns the limits of r that have gates, in the order of passing them. It is
// valid until the next call.
func (g *gates) gated(r shaper.Route) []int {
	g.limits = g.limits[:0]
	for _, paced := range [...]bool{false, true} {
		for i := range r.Limits().All {
			if l := g.policy.Limit(i); (l.NewConnections.N != 0) == paced && (paced || l.Connections != 0) {
				g.limits = append(g.limits, i)
			}
		}
	}
	return g.limits
}

// release frees the slots.
func (s *slots) release(now leaky.Time) {
	s.free(now)
	s.gates.run(now)
}

// free is release, but who gets the slots goes on only in the next run. The slot
// taken last goes first.
func (s *slots) free(now leaky.Time) {
	for i := len(s.held) - 1; i >= 0; i-- {
		gt := s.held[i]
		gt.inFlight--
		gt.state.InFlight.Add(-1)
		s.gates.dispatch(gt, now)
		s.gates.drop(gt, now)
	}
	s.held = nil
}

// prefix reports whether what e holds is where it begins to pass limits.
func (e *entrant) prefix(limits []int) bool {
	if len(e.held) > len(limits) {
		return false
	}
	for n, gt := range e.held {
		if gt.key != gateKey(e.policy, limits[n], &e.flow, e.route) {
			return false
		}
	}
	return true
}

// move brings the slots in line with a new policy: those of limits that f is no
// longer under are freed, those of new ones taken, over the cap if need be, as
// the connection is in flight whether they allow it or not.
func (s *slots) move(f *shaper.Flow, r shaper.Route, now leaky.Time) {
	g := s.gates
	if s.policy == g.policy {
		return
	}
	old := slots{gates: g, held: s.held}
	s.policy, s.held = g.policy, nil
	for _, i := range g.gated(r) {
		gt := g.gate(i, f, r)
		gt.inFlight++
		gt.state.InFlight.Add(1)
		s.held = append(s.held, gt)
	}
	old.free(now)
}

// swap sets the gates to a new policy, which publish puts in force everywhere
// else. Waiters keep their turns; in front of a limit that is gone they need not wait
// any more. Who has got a slot goes on in the next run.
func (g *gates) swap(p *shaper.Policy, publish func(), now leaky.Time) {
	publish()
	g.policy = p
	for _, gt := range g.byKey {
		if i := p.Index(gt.state); i >= 0 {
			shape := p.NewConnections(i)
			gt.bucket.Rescale(gt.shape, shape, now)
			gt.limit, gt.shape, gt.observe = p.Limit(i).Connections, shape, p.Limit(i).Observe
		} else {
			gt.observe = true
		}
		g.dispatch(gt, now)
	}
	for state := range g.rooms {
		if p.Index(state) < 0 && g.rooms[state].waiting == 0 {
			delete(g.rooms, state)
		}
	}
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

// gate returns the gate of f under limit i of the policy in force, made if need
// be.
func (g *gates) gate(i int, f *shaper.Flow, r shaper.Route) *gate {
	key := gateKey(g.policy, i, f, r)
	gt := g.byKey[key]
	if gt == nil {
		state := g.policy.State(i)
		rm := g.rooms[state]
		if rm == nil {
			rm = &room{}
			g.rooms[state] = rm
		}
		l := g.policy.Limit(i)
		gt = &gate{
			key: key, state: state, room: rm,
			limit: l.Connections, shape: g.policy.NewConnections(i), observe: l.Observe,
			bucket: g.shaper.CheckOut(key),
		}
		gt.timer.Fire = func(now leaky.Time) { g.dispatch(gt, now); g.run(now) }
		g.byKey[key] = gt
	}
	return gt
}

// drop forgets gt when nobody holds a slot of it or waits for one.
func (g *gates) drop(gt *gate, now leaky.Time) {
	if gt.inFlight > 0 || gt.turn != nil || g.byKey[gt.key] != gt {
		return
	}
	g.wheel.Cancel(&gt.timer)
	delete(g.byKey, gt.key)
	g.shaper.CheckIn(gt.key, gt.bucket, now)
}

// try takes a slot for one who does not wait, or returns why there is none.
func (gt *gate) try(now leaky.Time) shaper.Reason {
	blocked := gt.blocked(now)
	if blocked == shaper.None && gt.turn != nil {
		blocked = shaper.ByConnections // others wait already
	}
	switch {
	case blocked == shaper.None:
		gt.grant(now, now)
		gt.state.Connections.Add(shaper.Pass, shaper.None, 1)
		gt.state.Wait.Observe(0)
	case gt.observe:
		gt.inFlight++
		gt.state.InFlight.Add(1)
		gt.state.Connections.Add(shaper.Delay, blocked, 1)
		blocked = shaper.None
	}
	return blocked
}

// blocked returns what keeps gt shut at now.
func (gt *gate) blocked(now leaky.Time) shaper.Reason {
	switch {
	case gt.limit > 0 && gt.inFlight >= gt.limit:
		return shaper.ByConnections
	case gt.bucket.Depart(gt.shape, now) > now:
		return shaper.ByNew
	}
	return shaper.None
}

// grant gives a slot to a connection that has waited since since. A timer that
// fired late gives back what one connection costs.
func (gt *gate) grant(since, now leaky.Time) {
	gt.bucket.Charge(gt.shape, 0, 1, leaky.Late(since, now, gt.shape.Packets.Cost(1)))
	gt.inFlight++
	gt.state.InFlight.Add(1)
}

// dispatch gives what gt has to those who wait, and sees to it that it is called
// again when there will be more.
func (g *gates) dispatch(gt *gate, now leaky.Time) {
	for gt.turn != nil {
		if !gt.observe {
			switch gt.blocked(now) {
			case shaper.ByConnections:
				return // until a slot is released
			case shaper.ByNew:
				g.wheel.Schedule(&gt.timer, gt.bucket.Depart(gt.shape, now))
				return
			}
		}
		e := gt.turn.head
		gt.turn = gt.turn.next
		g.unqueue(e)
		if !gt.shape.Packets.Unlimited() {
			now = g.clock() // what leaves later than it is charged for is followed too soon
		}
		gt.grant(e.since, now)
		gt.state.Connections.Add(shaper.Delay, e.blocked, 1)
		gt.state.Wait.Observe((now - e.since).Duration())
		waited := now.Sub(e.joined)
		e.wait(gt.state, waited)
		gt.state.Keys.TryAdd(gt.ranked(), shaper.Tally{Waited: waited.Duration()}, now)
		e.held = append(e.held, gt)
		g.granted = append(g.granted, e)
	}
}

// unqueue takes e out of the queue it waits in.
func (g *gates) unqueue(e *entrant) {
	g.wheel.Cancel(&e.timeout)
	e.source.remove(e)
	e.source = nil
}
