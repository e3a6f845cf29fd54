package conn

import (
	"cmp"
	"fmt"
	"slices"

	"shaperd/leaky"
	"shaperd/shaper"
)

// pool is a gate's: those downstreams of a listener that some of its connections may go to.
// The gate is shut while all of them are full. So a connection that waits for a downstream
// holds no slot of a limit, and takes turns like one that waits for a slot.
type pool struct {
	site   *site
	key    poolKey
	to     target
	failed []*downstream
}

// poolKey tells who may go to the same downstreams.
type poolKey struct {
	v6     bool   // of a transparent listener
	port   uint16 // where each may be out at another one
	failed string // dials
}

const (
	// maxAwaiting is how many connections of a listener may wait for a downstream.
	maxAwaiting = 1000

	// poolName is what holds them, for those who ask.
	poolName = "downstream"
)

// pool returns the gate of the downstreams that s may go to, if there is one.
func (s *session) pool() *gate { return s.site.pool(s.target(), s.failed) }

// pool returns the gate of the downstreams for to, without those that failed, or nil when there is
// none, as they take any number of connections.
func (s *site) pool(to target, failed []*downstream) *gate {
	if !slices.ContainsFunc(s.downstreams, func(d *downstream) bool { return d.Connections > 0 || d.drained }) {
		return nil
	}
	config, gates := s.config.Load(), s.proxy.gates
	key := poolKey{v6: config.Transparent && to.source.Is6()}
	if len(s.downstreams) > 1 && (to.samePort || slices.ContainsFunc(s.downstreams, func(d *downstream) bool { return d.Port == 0 })) {
		key.port = to.port
	}
	if len(failed) > 0 {
		key.failed = fmt.Sprintf("%p", failed)
	}
	gt := s.pools[key]
	if gt == nil {
		gates.gate++
		gt = &gate{
			id: gates.gate, state: s.awaiting, room: &s.waiting, shape: &leaky.Shape{},
			rule: &shaper.Limit{Name: poolName, MaxWait: config.Connect, MaxWaiting: maxAwaiting},
			pool: &pool{s, key, to, slices.Clone(failed)},
		}
		s.pools[key] = gt
	}
	return gt
}

// full reports whether a connection would have to wait for one of p.
func (p *pool) full(now leaky.Time) bool {
	_, full := p.site.eligible(p.to, p.failed, now)
	return full
}

// place gives s, which has come past the gate of its pool, its place at a downstream.
func (s *session) place(now leaky.Time) {
	if s.to, _ = s.pick(s.target(), s.failed, now); s.to != nil {
		s.to.inFlight++
	}
}

// wake lets those go on that wait for a downstream and can.
func (s *site) wake(now leaky.Time) {
	var list []*gate
	for _, gt := range s.pools {
		list = append(list, gt)
	}
	slices.SortFunc(list, func(a, b *gate) int { return cmp.Compare(a.id, b.id) })
	s.proxy.gates.dispatch(list, now)
	s.proxy.gates.run(now)
}

// wakeSoon is wake, in the next round.
func (s *site) wakeSoon() {
	if s.awaited() {
		s.proxy.loop.later(s.wake)
	}
}

// serves reports whether a downstream that somebody waits for has room.
func (s *site) serves(now leaky.Time) bool {
	for _, gt := range s.pools {
		if len(gt.turns) > 0 && !gt.pool.full(now) {
			return true
		}
	}
	return false
}

// awaited reports whether somebody waits for a downstream.
func (s *site) awaited() bool {
	for _, gt := range s.pools {
		if len(gt.turns) > 0 {
			return true
		}
	}
	return false
}
