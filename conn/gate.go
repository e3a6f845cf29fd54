package conn

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// gates are the semaphores in front of downstreams: one for each limit and key
// that caps connections in flight, or paces new ones. They are safe for
// concurrent use.
//
// A connection under several limits passes their gates one after the other, in
// the same order as all others, and holds each slot until it ends. Those that
// pace come last, so that what they let through is under way at once.
type gates struct {
	shaper  *shaper.Shaper
	clock   *leaky.Clock
	closing <-chan struct{} // ends all waits

	mu     sync.Mutex
	policy *shaper.Policy // that the gates are set to
	byKey  map[shaper.Key]*gate
	rooms  map[*shaper.State]*room
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
	turns    []*source // that have waiters, the next one first
	sources  map[netip.Addr]*source
	timer    *time.Timer // runs when the bucket, not a slot, is waited for
	observe  bool        // count, and let everybody pass
}

// slots are what one connection holds. They are released once.
type slots struct {
	gates  *gates
	policy *shaper.Policy // under which they were taken
	held   []*gate
}

// watch tells a connection that waits when its client has left. stop ends the
// watch, and returns when it has.
type watch func() (gone <-chan struct{}, stop func())

// refusal is why a connection was not let through.
type refusal struct {
	limit  string
	reason shaper.Reason
	excess shaper.Excess
}

func newGates(s *shaper.Shaper, clock *leaky.Clock, closing <-chan struct{}) *gates {
	return &gates{
		shaper: s, clock: clock, closing: closing, policy: s.Policy(),
		byKey: map[shaper.Key]*gate{}, rooms: map[*shaper.State]*room{},
	}
}

// acquire takes a slot at every gate that f, a flow of the listener named listen,
// has to pass, and waits for them. It gives up when the client leaves. With a nil
// watch it takes only slots that are free.
//
// It routes f anew when a reload comes while it waits: the slots it has got are
// kept where the new policy asks for the same ones, and else given up.
func (g *gates) acquire(f *shaper.Flow, listen string, client watch) (*slots, *refusal) {
	g.mu.Lock()
	defer g.mu.Unlock()
	since := g.clock.Now()
	got := &slots{gates: g}
	for {
		policy := g.policy
		got.policy = policy
		f.Listen = policy.ListenIndex(listen)
		r := policy.Route(f)
		limits := gated(policy, r)
		if !got.prefix(policy, limits, f, r) {
			got.free()
		}
		for len(got.held) < len(limits) && g.policy == policy {
			i := limits[len(got.held)]
			gt := g.gate(policy, i, f, r)
			if reason := g.pass(gt, policy.Limit(i), f, since, client); reason != shaper.None {
				got.free()
				return nil, &refusal{limit: policy.Limit(i).Name, reason: reason, excess: policy.Limit(i).Excess}
			}
			got.held = append(got.held, gt)
		}
		if g.policy == policy {
			return got, nil
		}
	}
}

// gated returns the limits of r that have gates, in the order of passing them.
func gated(p *shaper.Policy, r shaper.Route) []int {
	var capped, paced []int
	for i := range r.Limits().All {
		switch l := p.Limit(i); {
		case l.NewConnections.N != 0:
			paced = append(paced, i)
		case l.Connections != 0:
			capped = append(capped, i)
		}
	}
	return append(capped, paced...)
}

// pass takes a slot of gt, at once or after a wait.
func (g *gates) pass(gt *gate, l *shaper.Limit, f *shaper.Flow, since leaky.Time, client watch) shaper.Reason {
	now := g.clock.Now()
	blocked := gt.blocked(now)
	if blocked == shaper.None && len(gt.turns) > 0 {
		blocked = shaper.ByConnections // others wait already
	}
	switch {
	case blocked == shaper.None:
		gt.grant(now, now)
		gt.state.Connections.Add(shaper.Pass, shaper.None, 1)
		gt.state.Wait.Observe(0)
		return shaper.None
	case gt.observe:
		gt.inFlight++
		gt.state.InFlight.Add(1)
		gt.state.Connections.Add(shaper.Delay, blocked, 1)
		return shaper.None
	case client == nil:
		gt.state.Connections.Add(shaper.Refuse, blocked, 1)
		g.drop(gt, now)
		return blocked
	}
	w := &waiter{since: now, decided: make(chan struct{})}
	if !gt.enqueue(w, f.Source, l.MaxWaiting) {
		gt.state.Connections.Add(shaper.Refuse, shaper.WaitingFull, 1)
		g.drop(gt, now)
		return shaper.WaitingFull
	}
	g.dispatch(gt, now)
	return g.wait(gt, w, blocked, l.MaxWait-(now-since).Duration(), client)
}

// wait waits for w's turn at gt, where blocked keeps it. It lets go of g.mu
// meanwhile.
func (g *gates) wait(gt *gate, w *waiter, blocked shaper.Reason, most time.Duration, client watch) shaper.Reason {
	g.mu.Unlock()
	gone, stop := client()
	timeout := time.NewTimer(most)
	var gaveUp shaper.Reason
	select {
	case <-w.decided:
	case <-timeout.C:
		gaveUp = shaper.WaitTimeout
	case <-gone:
		gaveUp = shaper.ClientGone
	case <-g.closing:
		gaveUp = shaper.ClientGone
	}
	timeout.Stop()
	stop()
	g.mu.Lock()
	now := g.clock.Now()
	switch {
	case w.granted && gaveUp != shaper.ClientGone:
		gt.state.Connections.Add(shaper.Delay, blocked, 1)
		gt.state.Wait.Observe((now - w.since).Duration())
		return shaper.None
	case w.granted:
		gt.inFlight--
		gt.state.InFlight.Add(-1)
	case w.refused != shaper.None:
		gaveUp = w.refused
	default:
		w.source.remove(w)
	}
	gt.state.Connections.Add(shaper.Refuse, gaveUp, 1)
	g.dispatch(gt, now)
	g.drop(gt, now)
	return gaveUp
}

// release frees the slots.
func (s *slots) release() {
	s.gates.mu.Lock()
	defer s.gates.mu.Unlock()
	s.free()
}

// free is release with the lock held. The slot taken last goes first.
func (s *slots) free() {
	now := s.gates.clock.Now()
	for _, gt := range slices.Backward(s.held) {
		gt.inFlight--
		gt.state.InFlight.Add(-1)
		s.gates.dispatch(gt, now)
		s.gates.drop(gt, now)
	}
	s.held = nil
}

// prefix reports whether what s holds is where f begins to pass limits.
func (s *slots) prefix(p *shaper.Policy, limits []int, f *shaper.Flow, r shaper.Route) bool {
	if len(s.held) > len(limits) {
		return false
	}
	for n, gt := range s.held {
		if gt.key != gateKey(p, limits[n], f, r) {
			return false
		}
	}
	return true
}

// move brings the slots in line with a new policy: those of limits that f is no
// longer under are freed, those of new ones taken, over the cap if need be, as
// the connection is in flight whether they allow it or not.
func (s *slots) move(p *shaper.Policy, f *shaper.Flow, r shaper.Route) {
	g := s.gates
	g.mu.Lock()
	defer g.mu.Unlock()
	old := slots{gates: g, held: s.held}
	s.policy, s.held = p, nil
	for _, i := range gated(p, r) {
		gt := g.gate(p, i, f, r)
		gt.inFlight++
		gt.state.InFlight.Add(1)
		s.held = append(s.held, gt)
	}
	old.free()
}

// swap sets the gates to a new policy, which publish puts in force everywhere
// else: no connection sees the one without the other. Waiters keep their turns; in
// front of a limit that has gone nothing holds them back, and acquire goes on
// with the new policy.
func (g *gates) swap(p *shaper.Policy, publish func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	publish()
	g.policy = p
	now := g.clock.Now()
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
}

func gateKey(p *shaper.Policy, i int, f *shaper.Flow, r shaper.Route) shaper.Key {
	key := p.Key(i, f, r)
	key.Limit++ // the bucket of new connections, see shaper.State
	return key
}

// gate returns the gate of f under limit i of the policy in force, made if need
// be.
func (g *gates) gate(p *shaper.Policy, i int, f *shaper.Flow, r shaper.Route) *gate {
	key := gateKey(p, i, f, r)
	gt := g.byKey[key]
	if gt == nil {
		state := p.State(i)
		rm := g.rooms[state]
		if rm == nil {
			rm = &room{}
			g.rooms[state] = rm
		}
		gt = &gate{
			key: key, state: state, room: rm, sources: map[netip.Addr]*source{},
			limit: p.Limit(i).Connections, shape: p.NewConnections(i), observe: p.Limit(i).Observe,
			bucket: g.shaper.CheckOut(key),
		}
		g.byKey[key] = gt
	}
	return gt
}

// drop forgets gt when nobody holds a slot of it or waits for one.
func (g *gates) drop(gt *gate, now leaky.Time) {
	if gt.inFlight > 0 || len(gt.turns) > 0 || g.byKey[gt.key] != gt {
		return
	}
	if gt.timer != nil {
		gt.timer.Stop()
	}
	delete(g.byKey, gt.key)
	g.shaper.CheckIn(gt.key, gt.bucket, now)
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
	for len(gt.turns) > 0 {
		blocked := gt.blocked(now)
		if gt.observe {
			blocked = shaper.None
		}
		switch blocked {
		case shaper.ByConnections:
			return // until a slot is released
		case shaper.ByNew:
			g.arm(gt, (gt.bucket.Depart(gt.shape, now) - now).Duration())
			return
		}
		w := gt.pop()
		gt.grant(w.since, now)
		w.granted = true
		close(w.decided)
	}
}

func (g *gates) arm(gt *gate, d time.Duration) {
	if gt.timer == nil {
		gt.timer = time.AfterFunc(d, func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			if g.byKey[gt.key] == gt {
				g.dispatch(gt, g.clock.Now())
			}
		})
		return
	}
	gt.timer.Reset(d)
}
