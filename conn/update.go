package conn

import (
	"cmp"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// A change reaches existing connections in three steps: rebind moves them to the listener
// that now has their port, updateSlots to the gates of the new policy, and applyPolicy to its
// queues. The first two, where they are needed, happen for all connections at one instant.

// rebind moves s to the listener that its port belongs to now. If its listener and port have
// both been removed, s is refused unless it has reached a downstream.
func (s *session) rebind(now leaky.Time) {
	from, to := s.listener, s.port.binding
	if to.removed && s.stage != stageRelaying && s.stage != stageRefusing {
		s.kill(shaper.Refused, now)
	}
	if s.stage == stageEnded || from == to.listener {
		return
	}
	s.binding, s.listen, s.failedDownstreams = to, to.name, nil
	if s.stage == stageRelaying {
		from.counts.Open.Add(-1)
		to.counts.Open.Add(1)
		s.up.bytes, s.down.bytes = &to.counts.ToDownstream, &to.counts.FromDownstream
	}
	if s.downstream != nil {
		s.downstream = to.adoptDownstream(s.downstream)
	}
}

// adoptDownstream moves one connection from the count of d, which belongs to another listener
// or was removed, to the same downstream of s, if s has it. It returns the downstream that
// counts the connection.
func (s *listener) adoptDownstream(d *downstream) *downstream {
	for _, own := range s.downstreams {
		if own.Host == d.Host && own.Port == d.Port {
			d.inFlight--
			own.inFlight++
			return own
		}
	}
	return d
}

// updateSlots makes s hold the slots that the current policy requires.
func (s *session) updateSlots(now leaky.Time) {
	if s.stage == stageDialing || s.stage == stageRelaying {
		s.waiter.flow.Origin = s.admission.policy.ListenerIndex(s.name)
		s.route = s.admission.policy.Route(&s.flow)
		s.slots.update(&s.flow, s.route, s.removed, now)
	}
}

// update is retake, except that a connection whose listener was removed keeps the slots of
// limits that matched by listener.
func (s *slots) update(f *shaper.Flow, r shaper.Route, removed bool, now leaky.Time) {
	if s.policy == s.admission.policy {
		return
	}
	var kept []*gate
	if removed {
		oldPolicy, held := s.policy, s.held
		s.held = nil
		for _, gt := range held {
			if isListenerLimit(oldPolicy, gt.state) {
				s.admission.refresh(gt)
				kept = append(kept, gt)
			} else {
				s.held = append(s.held, gt)
			}
		}
	}
	s.retake(f, r, now)
	for _, gt := range kept {
		if slices.Contains(s.held, gt) { // the limit applies to all listeners now
			gt.inFlight--
			gt.state.InFlight.Add(-1)
		} else {
			s.held = append(s.held, gt)
		}
	}
}

// isListenerLimit reports whether a limit matched certain listeners in oldPolicy, or had been
// removed even before it. Connections of removed listeners keep such limits.
func isListenerLimit(oldPolicy *shaper.Policy, state *shaper.LimitState) bool {
	i := oldPolicy.IndexOf(state)
	return i < 0 || len(oldPolicy.Limit(i).Match.Listen) > 0
}

// applyPolicy brings s to policy, which is the current one.
func (s *session) applyPolicy(policy *shaper.Policy, now leaky.Time) {
	if s.stage != stageDialing && s.stage != stageRelaying {
		return
	}
	s.updateSlots(now)
	if policy.EnforcedBlock(s.route.Limits()) >= 0 {
		s.abort(shaper.Refused, now)
		return
	}
	if s.downstream != nil && s.downstream.removed {
		s.downstream = s.adoptDownstream(s.downstream)
	}
	if s.stage == stageRelaying {
		s.reroute(policy, now)
	}
	if s.stage == stageRelaying { // reroute may have ended it
		s.armTimeouts(now) // the timeouts may have changed
	}
}

// reroute moves the units of s to the queues of policy. A direction whose queues stay the same
// keeps its position in them.
func (s *session) reroute(policy *shaper.Policy, now leaky.Time) {
	oldPolicy := s.pathPolicy
	s.pathPolicy = policy
	s.reportUsage(now)
	for _, d := range []*direction{&s.up, &s.down} {
		set := s.route.ToDownstream
		if d == &s.down {
			set = s.route.FromDownstream
		}
		if d.reroute(oldPolicy, policy, set, now); s.stage != stageRelaying {
			return // s has ended: leaving a queue let another unit go
		}
	}
	s.finish(now)
}

func (d *direction) reroute(oldPolicy, policy *shaper.Policy, set shaper.Set, now leaky.Time) {
	s, sched := d.session, d.session.proxy.loop.scheduler
	d.observed = policy.Observed(set)
	if !s.removed && sched.keepsPath(d.unit.path, policy, &s.flow, s.route, set, false, now) {
		d.setGrant()
		return
	}
	waits := d.unit.queued
	sched.withdraw(now, &d.unit)
	if s.stage != stageRelaying {
		return
	}
	path := sched.newPath(policy, &s.flow, s.route, set, false)
	d.unit.path = sched.replacePath(&s.account, d.unit.path, path, s.removed, oldPolicy, now)
	d.setGrant()
	if waits {
		d.resume(now)
	}
}

// rebind moves f to the listener that its port belongs to now. Flows of a removed port end
// with it.
func (f *udpFlow) rebind(now leaky.Time) {
	from, to := f.listener, f.key.port.binding.listener
	if from == to {
		return
	}
	f.listener = to
	from.counts.Flows.Add(-1)
	to.counts.Flows.Add(1)
	from.removeFlow(f.source, f.flow.Source)
	f.source = to.sourceOf(f.flow.Source)
	f.source.count++
	to.sources[sourceKey(f.flow.Source)] = f.source
	f.downstream = to.adoptDownstream(f.downstream)
	f.prefix = f.proxyHeader()
	f.insertLRU(now)
}

func (f *udpFlow) updateSlots(now leaky.Time) {
	policy := f.slots.admission.policy
	f.flow.Origin = policy.ListenerIndex(f.listener.name)
	f.route = policy.Route(&f.flow)
	held := f.slots.held
	f.slots.update(&f.flow, f.route, f.listener.removed, now)
	if !slices.Equal(held, f.slots.held) {
		f.insertLRU(now)
	}
}

func (f *udpFlow) applyPolicy(policy *shaper.Policy, now leaky.Time) {
	f.updateSlots(now)
	if policy.EnforcedBlock(f.route.Limits()) >= 0 {
		f.close(now)
		return
	}
	if f.downstream.removed {
		f.downstream = f.listener.adoptDownstream(f.downstream)
		f.insertLRU(now)
	}
	if (f.downstream.removed || f.transparent != f.listener.config.Load().Transparent) && !f.redial(now) {
		f.close(now)
		return
	}
	f.reroute(policy, now)
}

// redial connects f to a downstream of its listener's new configuration. Its queued datagrams
// go there.
func (f *udpFlow) redial(now leaky.Time) bool {
	fd, d := f.fd, f.downstream
	d.inFlight--
	if err := f.dial(target{f.flow.Source, f.flow.Port, f.key.port.binding.samePort}, nil, now); err != nil {
		f.dialFailed(err)
		d.inFlight++
		return false
	}
	f.proxy.loop.close(fd)
	d.listener.wakeLater()
	f.insertLRU(now)
	return true
}

// reroute moves the datagrams of f to the queues of policy. A direction whose queues stay the
// same keeps its position in them.
func (f *udpFlow) reroute(policy *shaper.Policy, now leaky.Time) {
	sched := f.proxy.loop.scheduler
	oldPolicy := f.policy
	f.policy = policy
	f.reportUsage(now)
	for _, d := range []*udpDirection{&f.up, &f.down} {
		if f.closed { // withdrawing from queues can end flows
			return
		}
		set := f.route.ToDownstream
		if d == &f.down {
			set = f.route.FromDownstream
		}
		d.observed = policy.Observed(set)
		if !f.listener.removed && sched.keepsPath(d.path, policy, &f.flow, f.route, set, f.unanswered, now) {
			continue
		}
		var queued []*unit
		for dg := f.queued; dg != nil; dg = dg.next {
			if dg.down == (d == &f.down) {
				queued = append(queued, &dg.unit)
			}
		}
		if sched.withdraw(now, queued...); f.closed {
			return
		}
		path := sched.newPath(policy, &f.flow, f.route, set, f.unanswered)
		if f.repeated {
			giveOwnQueues(path)
		}
		d.path = sched.replacePath(&f.account, d.path, path, f.listener.removed, oldPolicy, now)
		for _, u := range slices.Backward(queued) { // oldest first
			u.owner.resubmit(now)
		}
	}
}

// keepsPath reports whether scheduler.newPath would return path again, and then updates its queues
// to policy.
func (sc *scheduler) keepsPath(path []hop, policy *shaper.Policy, f *shaper.Flow, r shaper.Route, set shaper.Set, unverified bool, now leaky.Time) bool {
	n := 0
	for i := range set.All {
		if !hasQueue(policy, i) {
			continue
		}
		if n == len(path) || path[n].key != policy.Key(i, f, r) {
			return false
		}
		fifo := policy.Limit(i).Scheduling == shaper.ScheduleFIFO
		if path[n].fifo != fifo || path[n].source.source != queueSource(f, fifo, unverified) {
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

// refresh updates q to the current policy. Its bucket keeps its backlog.
func (sc *scheduler) refresh(q *queue, now leaky.Time) {
	policy := sc.shaper.Policy()
	if q.policy == policy {
		return
	}
	q.policy = policy
	i := policy.IndexOf(q.state)
	if i < 0 {
		return // the limit was removed; connections of removed listeners keep it
	}
	next := policy.Shape(i)
	changed := *next != *q.shape
	if changed {
		q.bucket.Rescale(q.shape, next, now)
		q.meter = leaky.Meter{} // the old rate no longer applies
		sc.markRunnable(q)
	}
	q.shape, q.sendReject = next, policy.Limit(i).RefuseWith == shaper.RefuseReject
	if changed {
		sc.rebook(q, now)
	}
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
