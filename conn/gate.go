package conn

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// gates are the semaphores in front of downstreams: one for each limit and key
// that caps connections in flight, or paces new ones. They are safe for
// concurrent use.
//
// A connection under several limits passes their gates in the policy's order,
// and holds each slot until it ends.
type gates struct {
	shaper *shaper.Shaper
	clock  *leaky.Clock

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
	gates *gates
	held  []*gate
}

func newGates(s *shaper.Shaper, clock *leaky.Clock) *gates {
	return &gates{
		shaper: s, clock: clock, policy: s.Policy(),
		byKey: map[shaper.Key]*gate{}, rooms: map[*shaper.State]*room{},
	}
}

// refusal is why a connection was not let through.
type refusal struct {
	limit  string
	reason shaper.Reason
	excess shaper.Excess
}

// acquire takes a slot at every gate that f, routed as r, has to pass, and waits
// for them. It gives up when ctx ends, as the client has gone then. Without wait
// it takes only slots that are free.
func (g *gates) acquire(ctx context.Context, p *shaper.Policy, f *shaper.Flow, r shaper.Route, wait bool) (*slots, *refusal) {
	got := &slots{gates: g}
	for i := range r.Limits().All {
		l := p.Limit(i)
		if l.Connections == 0 && l.NewConnections.N == 0 {
			continue
		}
		reason := g.pass(ctx, p, i, f, r, wait, got)
		if reason != shaper.None {
			got.release()
			return nil, &refusal{limit: l.Name, reason: reason, excess: l.Excess}
		}
	}
	return got, nil
}

// pass takes a slot at the gate of limit i and notes it in got.
func (g *gates) pass(ctx context.Context, p *shaper.Policy, i int, f *shaper.Flow, r shaper.Route, wait bool, got *slots) shaper.Reason {
	l, state := p.Limit(i), p.State(i)
	now := g.clock.Now()
	g.mu.Lock()
	gt := g.gate(p, i, f, r)
	blocked := gt.blocked(now)
	switch {
	case blocked == shaper.None && len(gt.turns) == 0:
		gt.grant(now, now)
	case gt.observe:
		gt.inFlight++
		state.InFlight.Add(1)
	case !wait:
		g.drop(gt, now)
		g.mu.Unlock()
		state.Connections.Add(shaper.Refuse, blocked, 1)
		return blocked
	default:
		return g.wait(ctx, gt, l, f, got, now)
	}
	got.held = append(got.held, gt)
	g.mu.Unlock()
	if blocked == shaper.None {
		state.Connections.Add(shaper.Pass, shaper.None, 1)
		state.Wait.Observe(0)
	} else {
		state.Connections.Add(shaper.Delay, blocked, 1)
	}
	return shaper.None
}

// wait queues at gt, with g.mu held, and unlocks it.
func (g *gates) wait(ctx context.Context, gt *gate, l *shaper.Limit, f *shaper.Flow, got *slots, now leaky.Time) shaper.Reason {
	state := gt.state
	blocked := gt.blocked(now)
	if blocked == shaper.None {
		blocked = shaper.ByConnections // others wait already
	}
	w := &waiter{since: now, decided: make(chan struct{})}
	if !gt.enqueue(w, f.Source, l.MaxWaiting) {
		g.drop(gt, now)
		g.mu.Unlock()
		state.Connections.Add(shaper.Refuse, shaper.WaitingFull, 1)
		return shaper.WaitingFull
	}
	g.dispatch(gt, now)
	g.mu.Unlock()

	timeout := time.NewTimer(l.MaxWait)
	defer timeout.Stop()
	var gaveUp shaper.Reason
	select {
	case <-w.decided:
	case <-timeout.C:
		gaveUp = shaper.WaitTimeout
	case <-ctx.Done():
		gaveUp = shaper.ClientGone
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now = g.clock.Now()
	switch {
	case w.granted && gaveUp != shaper.ClientGone:
		got.held = append(got.held, gt)
		state.Connections.Add(shaper.Delay, blocked, 1)
		state.Wait.Observe((now - w.since).Duration())
		return shaper.None
	case w.granted:
		gt.inFlight--
		state.InFlight.Add(-1)
	case w.refused != shaper.None:
		gaveUp = w.refused
	default:
		w.source.remove(w)
	}
	state.Connections.Add(shaper.Refuse, gaveUp, 1)
	g.dispatch(gt, now)
	g.drop(gt, now)
	return gaveUp
}

// release frees the slots, the last taken first.
func (s *slots) release() {
	g := s.gates
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.clock.Now()
	for i := len(s.held) - 1; i >= 0; i-- {
		gt := s.held[i]
		gt.inFlight--
		gt.state.InFlight.Add(-1)
		g.dispatch(gt, now)
		g.drop(gt, now)
	}
	s.held = nil
}

// move brings the slots in line with a new policy: those of limits that f is no
// longer under are freed, those of new ones taken, over the cap if need be, as
// the connection is in flight whether they allow it or not.
func (s *slots) move(p *shaper.Policy, f *shaper.Flow, r shaper.Route) {
	g := s.gates
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.clock.Now()
	old := s.held
	s.held = nil
	for i := range r.Limits().All {
		if l := p.Limit(i); l.Connections != 0 || l.NewConnections.N != 0 {
			gt := g.gate(p, i, f, r)
			gt.inFlight++
			gt.state.InFlight.Add(1)
			s.held = append(s.held, gt)
		}
	}
	for _, gt := range old {
		gt.inFlight--
		gt.state.InFlight.Add(-1)
		g.dispatch(gt, now)
		g.drop(gt, now)
	}
}

// swap sets the gates to a new policy. Waiters stay where they are.
func (g *gates) swap(p *shaper.Policy) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.policy = p
	now := g.clock.Now()
	for _, gt := range g.byKey {
		g.set(gt, now)
		g.dispatch(gt, now)
	}
}

// set makes gt what the policy says of its limit. A connection may come here by
// way of an older policy; when its limit has gone, nothing holds it back.
func (g *gates) set(gt *gate, now leaky.Time) {
	i := g.policy.Index(gt.state)
	if i < 0 {
		gt.observe = true
		return
	}
	shape := g.policy.NewConnections(i)
	gt.bucket.Rescale(gt.shape, shape, now)
	gt.limit, gt.shape, gt.observe = g.policy.Limit(i).Connections, shape, g.policy.Limit(i).Observe
}

// gate returns the gate of f under limit i, made if need be.
func (g *gates) gate(p *shaper.Policy, i int, f *shaper.Flow, r shaper.Route) *gate {
	key := p.Key(i, f, r)
	key.Limit++ // the bucket of new connections, see shaper.State
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
			limit: p.Limit(i).Connections, shape: p.NewConnections(i), bucket: g.shaper.CheckOut(key),
		}
		g.set(gt, g.clock.Now())
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
