// Owner: the loop's thread.

package conn

import (
	"cmp"
	"slices"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// hop is where the units of one flow wait in one queue.
type hop struct {
	*queue
	source    *sourceQueue
	lane      *lane
	flowQueue *fairq.Node[unit]
	fifo      bool       // all flows share one sub-queue
	usage     usage      // here, since the last report
	waited    leaky.Time // here, in total
}

// pathSpec is what the path of a flow's units, in one direction, depends on.
type pathSpec struct {
	policy     *shaper.Policy
	flow       *shaper.Flow
	route      shaper.Route
	set        shaper.Set // limits of the direction
	unverified bool       // the downstream has not replied to the flow yet
}

// newPath returns the hops of a path, in order. Limits that have no rate, or only observe, have no hop.
func (sc *scheduler) newPath(spec pathSpec) []hop {
	p := spec.policy
	var list []*queue
	var limits [shaper.MaxLimits]int // by position in list
	for i := range spec.set.All {
		if !hasQueue(p, i) {
			continue
		}
		q := sc.queueFor(p, i, p.Key(i, spec.flow, spec.route), sc.clock())
		limits[len(list)] = i
		list = append(list, q)
	}
	path := make([]hop, len(list))
	class := spec.class()
	for i, q := range list {
		fifo := p.Limit(limits[i]).Scheduling == shaper.ScheduleFIFO
		path[i] = q.addFlow(spec.queueMembers(limits[i], class), fifo, spec.unverified, list[i+1:])
	}
	return path
}

// queueFor returns the queue of key, a key of limit i of p. A missing one is created.
func (sc *scheduler) queueFor(p *shaper.Policy, i int, key shaper.Key, now leaky.Time) *queue {
	q := sc.byKey[key]
	if q == nil {
		q = &queue{pacing: pacing{key: key, whole: p.ShapeOf(i, &key), shape: p.ShapeOf(i, &key)}, state: p.State(i), ofLimit: p.Shape(i)}
		if p.Limit(i).Shared {
			sc.sharing.checkOut(&q.pacing, q, nil, now)
		} else {
			q.bucket = sc.shaper.CheckOut(key, now)
		}
		if p.Limit(i).HasUnitQuota() {
			q.budget = sc.quotas.open(p, i, key, now)
		}
		sc.own(q)
		sc.refresh(q, now)
		if l := p.Limit(i); q.budget != nil && l.QuotaSlow > 0 && q.budget.Left() == 0 { // the bucket is as a slow queue has left it
			slow := l.SlowShape(q.whole)
			q.shape, q.slow = &slow, &slow
		}
		return q
	}
	sc.refresh(q, now)
	return q
}

// own adds q to those of sc.
func (sc *scheduler) own(q *queue) {
	sc.byKey[q.key] = q
	q.timer.Fire = func(now leaky.Time) { sc.markRunnable(q); sc.run(now) }
}

// dropUnused removes q if no flow needs it, and it is not held.
func (sc *scheduler) dropUnused(q *queue, now leaky.Time) {
	if q.refs > 0 || q.share.held() {
		return
	}
	sc.wheel.Cancel(&q.timer)
	delete(sc.byKey, q.key)
	sc.refresh(q, now)
	if q.budget != nil {
		sc.quotas.leave(q)
	}
	sc.sharing.checkIn(&q.pacing, now)
}

// hasQueue reports whether limit i of p queues units.
func hasQueue(p *shaper.Policy, i int) bool {
	shape := p.Shape(i)
	return !p.Limit(i).Observe && !(shape.Bytes.Unlimited() && shape.Packets.Unlimited())
}

// keepsPath reports whether newPath would return path again, and then updates its queues to the policy.
func (sc *scheduler) keepsPath(path []hop, spec pathSpec, now leaky.Time) bool {
	p, n, class := spec.policy, 0, spec.class()
	for i := range spec.set.All {
		if !hasQueue(p, i) {
			continue
		}
		if n == len(path) || path[n].key != p.Key(i, spec.flow, spec.route) {
			return false
		}
		fifo := p.Limit(i).Scheduling == shaper.ScheduleFIFO
		if m := spec.queueMembers(i, class); path[n].fifo != fifo || path[n].source.key != m.last() {
			return false
		}
		n++
	}
	if n < len(path) {
		return false
	}
	for _, h := range path {
		sc.refresh(h.queue, now)
	}
	sc.run(now)
	return true
}

// replacePath releases the old path of a flow that has no queued units, and returns its new one:
// path, and if the flow's listener was removed also the queues of limits that matched by
// listener.
//
// All paths are in one order, so that equal ones share lanes: removed limits come first, by
// ID, then the others in the order of the policy.
func (sc *scheduler) replacePath(a *account, old, path []hop, removed bool, oldPolicy *shaper.Policy, now leaky.Time) []hop {
	a.merge(old)
	if !removed {
		sc.releasePath(old, now)
		return path
	}
	for i := range old {
		h := old[i]
		if isListenerLimit(oldPolicy, h.state) && !slices.ContainsFunc(path, func(s hop) bool { return s.queue == h.queue }) {
			h.waited = 0 // the account includes it already
			sc.refresh(h.queue, now)
			path = append(path, h)
		} else {
			sc.releasePath(old[i:i+1], now)
		}
	}
	policy := sc.shaper.Policy()
	slices.SortStableFunc(path, func(a, b hop) int {
		i, j := policy.IndexOf(a.state), policy.IndexOf(b.state)
		if i < 0 && j < 0 {
			return cmp.Compare(a.state.ID, b.state.ID)
		}
		return cmp.Compare(i, j)
	})
	return path
}

// releasePath releases the hops of a path.
func (sc *scheduler) releasePath(path []hop, now leaky.Time) {
	for i := range path {
		q := path[i].queue
		path[i].removeFlow()
		q.refs--
		sc.dropUnused(q, now)
	}
}

// release ends the count of u at a hop that it had moved on from or leaves from.
func (h *hop) release(u *unit) {
	h.subBacklog(u)
	if h.forwarding == u {
		h.forwarding = nil
		return
	}
	if u.path[u.pos].queue == h.queue {
		return
	}
	ln := h.lane
	ln.laterBytes -= u.weight
	if ln.Suspended() && ln.laterBytes+u.weight <= max(laneLimit, u.weight) {
		ln.Resume()
	}
}
