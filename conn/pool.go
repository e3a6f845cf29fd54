// Owner: the loop's thread.

package conn

import (
	"cmp"
	"fmt"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// pool is the downstreams of a listener that some of its connections may go to. Its gate is shut while
// all of them are full, or the listener is held. So a connection that waits for a downstream holds no slot of a limit, and
// takes turns like one that waits for a slot.
type pool struct {
	listener *listener
	key      poolKey
	target   target
	failed   []*downstream
}

// poolKey identifies the connections that may go to the same downstreams.
type poolKey struct {
	v6     bool   // the client of a transparent listener has an IPv6 address
	port   uint16 // destination port, if downstreams are used or ejected by port
	failed string // identity of the list of failed downstreams
}

// poolName is the limit that the API names for their wait.
const poolName = "downstream"

// poolLimit is what holds for those who wait for a downstream.
func poolLimit(c *listenerConfig) *shaper.Limit {
	return &shaper.Limit{Name: poolName, QueueTimeout: c.ConnectTimeout, MaxQueue: c.MaxQueue}
}

// pool returns the gate of the downstreams for to, except those that failed. It returns nil if they
// take any number of connections.
func (ln *listener) pool(to target, failed []*downstream) *gate {
	if !ln.mayHold() && !slices.ContainsFunc(ln.downstreams, func(d *downstream) bool { return d.MaxConnections > 0 || d.drained }) {
		return nil
	}
	config, gates := ln.config.Load(), ln.proxy.admission
	key := poolKey{v6: config.Transparent && to.source.Is6()}
	if len(ln.downstreams) > 1 && (to.samePort || slices.ContainsFunc(ln.downstreams, func(d *downstream) bool { return d.Port == 0 })) {
		key.port = to.port
	}
	if len(failed) > 0 {
		key.failed = fmt.Sprintf("%p", failed)
	}
	gt := ln.pools[key]
	if gt == nil {
		gates.lastGateID++
		gt = &gate{
			pacing: pacing{shape: &leaky.Shape{}},
			id:     gates.lastGateID, state: ln.poolState, quota: &ln.poolQuota, slots: noCap,
			limit: poolLimit(config), pool: &pool{ln, key, to, slices.Clone(failed)},
		}
		ln.pools[key] = gt
	}
	return gt
}

// full reports whether a connection has to wait for a downstream of p.
func (p *pool) full(now leaky.Time) bool {
	if p.listener.held(now) {
		return true
	}
	_, full := p.listener.eligible(p.target, p.failed, now)
	return full
}

// wakeWaiters serves the connections that wait for a downstream and can proceed.
func (ln *listener) wakeWaiters(now leaky.Time) {
	var list []*gate
	for _, gt := range ln.pools {
		list = append(list, gt)
	}
	slices.SortFunc(list, func(a, b *gate) int { return cmp.Compare(a.id, b.id) })
	ln.proxy.admission.dispatch(list, now)
	ln.proxy.admission.run(now)
}

// wakeLater calls wakeWaiters in the next round.
func (ln *listener) wakeLater() {
	if ln.hasWaiters() {
		ln.proxy.loop.runLater(ln.wakeWaiters)
	}
}

// hasServableWaiter reports whether a pool with waiters has a free downstream.
func (ln *listener) hasServableWaiter(now leaky.Time) bool {
	for _, gt := range ln.pools {
		if gt.first() != nil && !gt.pool.full(now) {
			return true
		}
	}
	return false
}

// hasWaiters reports whether connections wait for a downstream.
func (ln *listener) hasWaiters() bool {
	for _, gt := range ln.pools {
		if gt.first() != nil {
			return true
		}
	}
	return false
}
