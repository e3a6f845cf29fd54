package conn

import (
	"cmp"
	"slices"

	"shaperd/leaky"
	"shaperd/shaper"
)

// A change takes effect in three steps for the connections that are there: rebind puts them
// with the listener that has their port now, recount with the gates of the new policy, and
// follow with its lines. The first two are at one instant for all, where they are needed.

// rebind puts s with the listener that its port belongs to now. Where its own has gone, and
// the port with it, one that has not got through to a downstream is turned away.
func (s *session) rebind(now leaky.Time) {
	from, to := s.site, s.port.service
	if to.gone && s.stage != flowing && s.stage != leaving {
		s.cut(shaper.Refused, now)
	}
	if s.stage == ended || from == to.site {
		return
	}
	s.service, s.listen, s.failed = to, to.name, nil
	if s.stage == flowing {
		from.counts.Open.Add(-1)
		to.counts.Open.Add(1)
		s.up.bytes, s.down.bytes = &to.counts.ToDownstream, &to.counts.FromDownstream
	}
	if s.to != nil {
		s.to = to.takeOver(s.to)
	}
}

// takeOver has a connection at d, which is another listener's or was, count at the same
// downstream of s, if s has it. It returns the one where it counts.
func (s *site) takeOver(d *downstream) *downstream {
	for _, own := range s.downstreams {
		if own.Host == d.Host && own.Port == d.Port {
			d.inFlight--
			own.inFlight++
			return own
		}
	}
	return d
}

// recount has s hold the slots that the policy in effect wants.
func (s *session) recount(now leaky.Time) {
	if s.stage == dialing || s.stage == flowing {
		s.entrant.flow.Listen = s.gates.policy.ListenIndex(s.name)
		s.route = s.gates.policy.Route(&s.flow)
		s.slots.recount(&s.flow, s.route, s.gone, now)
	}
}

// recount is move, but a connection whose listener has gone keeps the slots of limits that
// were that listener's own.
func (s *slots) recount(f *shaper.Flow, r shaper.Route, gone bool, now leaky.Time) {
	if s.policy == s.gates.policy {
		return
	}
	var own []*gate
	if gone {
		was, held := s.policy, s.held
		s.held = nil
		for _, gt := range held {
			if ownLimit(was, gt.state) {
				s.gates.follow(gt)
				own = append(own, gt)
			} else {
				s.held = append(s.held, gt)
			}
		}
	}
	s.move(f, r, now)
	for _, gt := range own {
		if slices.Contains(s.held, gt) { // it is of all listeners now
			gt.inFlight--
			gt.state.InFlight.Add(-1)
		} else {
			s.held = append(s.held, gt)
		}
	}
}

// ownLimit reports whether a limit was one of certain listeners in policy, or had gone
// already: then it is kept by a connection of one that has gone.
func ownLimit(was *shaper.Policy, state *shaper.State) bool {
	i := was.Index(state)
	return i < 0 || len(was.Limit(i).Match.Listen) > 0
}

// follow puts s under policy, which is in effect.
func (s *session) follow(policy *shaper.Policy, now leaky.Time) {
	if s.stage != dialing && s.stage != flowing {
		return
	}
	s.recount(now)
	if policy.Blocked(s.route.Limits()) >= 0 {
		s.abort(shaper.Refused, now)
		return
	}
	if s.to != nil && s.to.gone {
		s.to = s.takeOver(s.to)
	}
	if s.stage == flowing {
		s.reroute(policy, now)
	}
	if s.stage == flowing { // still
		s.watchOver(now) // under other timeouts, maybe
	}
}

// reroute puts the units of s into the lines of policy. Those whose lines are the same keep
// their turn.
func (s *session) reroute(policy *shaper.Policy, now leaky.Time) {
	was := s.routed
	s.routed = policy
	s.settle(now)
	for _, d := range []*direction{&s.up, &s.down} {
		set := s.route.ToDownstream
		if d == &s.down {
			set = s.route.FromDownstream
		}
		if d.reroute(was, policy, set, now); s.stage != flowing {
			return // what waited for it has gone on, and it has ended
		}
	}
	s.finish(now)
}

func (d *direction) reroute(was, policy *shaper.Policy, set shaper.Set, now leaky.Time) {
	s, lines := d.session, d.session.proxy.loop.lines
	d.observed = policy.Observed(set)
	if !s.gone && lines.same(d.unit.path, policy, &s.flow, s.route, set, false, now) {
		d.bound()
		return
	}
	waits := d.unit.queued
	lines.withdraw(now, &d.unit)
	if s.stage != flowing {
		return
	}
	path := lines.path(policy, &s.flow, s.route, set, false)
	d.unit.path = lines.replace(&s.account, d.unit.path, path, s.gone, was, now)
	d.bound()
	if waits {
		d.resume(now)
	}
}

// rebind puts f with the listener that its port belongs to now. One whose port goes ends
// with it.
func (f *udpFlow) rebind(now leaky.Time) {
	from, to := f.site, f.key.port.service.site
	if from == to {
		return
	}
	f.site = to
	from.counts.Flows.Add(-1)
	to.counts.Flows.Add(1)
	from.forget(f.source, f.flow.Source)
	f.source = to.sourceOf(f.flow.Source)
	f.source.count++
	to.sources[turnAddr(f.flow.Source)] = f.source
	f.downstream = to.takeOver(f.downstream)
	f.prefix = f.announcement()
	f.enlist(now)
}

func (f *udpFlow) recount(now leaky.Time) {
	policy := f.slots.gates.policy
	f.flow.Listen = policy.ListenIndex(f.site.name)
	f.route = policy.Route(&f.flow)
	held := f.slots.held
	f.slots.recount(&f.flow, f.route, f.site.gone, now)
	if !slices.Equal(held, f.slots.held) {
		f.enlist(now)
	}
}

func (f *udpFlow) follow(policy *shaper.Policy, now leaky.Time) {
	f.recount(now)
	if policy.Blocked(f.route.Limits()) >= 0 {
		f.close(now)
		return
	}
	if f.downstream.gone {
		f.downstream = f.site.takeOver(f.downstream)
		f.enlist(now)
	}
	if (f.downstream.gone || f.transparent != f.site.config.Load().Transparent) && !f.redial(now) {
		f.close(now)
		return
	}
	f.reroute(policy, now)
}

// redial connects f to a downstream of its listener's as it is now. What f has queued
// goes there.
func (f *udpFlow) redial(now leaky.Time) bool {
	fd, d := f.fd, f.downstream
	d.inFlight--
	if err := f.dial(target{f.flow.Source, f.flow.Port, f.key.port.service.samePort}, nil, now); err != nil {
		f.dialFailed(err)
		d.inFlight++
		return false
	}
	f.proxy.loop.close(fd)
	d.site.wakeSoon()
	f.enlist(now)
	return true
}

// reroute puts the datagrams of f into the lines of policy. Those whose lines are the same
// keep their turn.
func (f *udpFlow) reroute(policy *shaper.Policy, now leaky.Time) {
	lines := f.proxy.loop.lines
	was := f.routed
	f.routed = policy
	f.settle(now)
	for _, d := range []*udpDirection{&f.up, &f.down} {
		if f.closed { // by what went on meanwhile
			return
		}
		set := f.route.ToDownstream
		if d == &f.down {
			set = f.route.FromDownstream
		}
		d.observed = policy.Observed(set)
		if !f.site.gone && lines.same(d.path, policy, &f.flow, f.route, set, f.mute, now) {
			continue
		}
		var queued []*unit
		for dg := f.queued; dg != nil; dg = dg.next {
			if dg.down == (d == &f.down) {
				queued = append(queued, &dg.unit)
			}
		}
		if lines.withdraw(now, queued...); f.closed {
			return
		}
		path := lines.path(policy, &f.flow, f.route, set, f.mute)
		if f.regular {
			apart(path)
		}
		d.path = lines.replace(&f.account, d.path, path, f.site.gone, was, now)
		for _, u := range slices.Backward(queued) { // the oldest is the last one
			u.owner.resubmit(now)
		}
	}
}

// same reports whether path is what lines.path would return, and brings its lines to
// policy.
func (ls *lines) same(path []stop, policy *shaper.Policy, f *shaper.Flow, r shaper.Route, set shaper.Set, stranger bool, now leaky.Time) bool {
	n := 0
	for i := range set.All {
		if !paces(policy, i) {
			continue
		}
		if n == len(path) || path[n].key != policy.Key(i, f, r) {
			return false
		}
		fifo := policy.Limit(i).Share == shaper.ShareFIFO
		if path[n].fifo != fifo || path[n].share.source != shareOf(f, fifo, stranger) {
			return false
		}
		n++
	}
	if n < len(path) {
		return false
	}
	for _, at := range path {
		ls.refresh(at.line, now)
	}
	ls.run(now)
	return true
}

// refresh brings l to the policy in effect. Its bucket keeps its backlog.
func (ls *lines) refresh(l *line, now leaky.Time) {
	policy := ls.shaper.Policy()
	if l.policy == policy {
		return
	}
	l.policy = policy
	i := policy.Index(l.state)
	if i < 0 {
		return // it is kept by those whose listener has gone
	}
	next := policy.Shape(i)
	changed := *next != *l.shape
	if changed {
		l.bucket.Rescale(l.shape, next, now)
		l.meter = leaky.Meter{} // what was allowed is over
		ls.consider(l)
	}
	l.shape, l.reject = next, policy.Limit(i).Excess == shaper.ExcessReject
	if changed {
		ls.rebook(l, now)
	}
}

// replace gives back the old path of a flow, with nothing of it queued, and returns what
// replaces it: path, and where the flow's listener has gone also those lines of the old one
// that were of limits of its own.
//
// All paths are in one order, so that those to the same lines share lanes: limits that have
// gone come first, by their ID, then the others in the order of the policy.
func (ls *lines) replace(a *account, old, path []stop, gone bool, was *shaper.Policy, now leaky.Time) []stop {
	a.fold(old)
	if !gone {
		ls.release(old, now)
		return path
	}
	for i := range old {
		at := old[i]
		if ownLimit(was, at.state) && !slices.ContainsFunc(path, func(s stop) bool { return s.line == at.line }) {
			at.waited = 0 // the account has it
			ls.refresh(at.line, now)
			path = append(path, at)
		} else {
			ls.release(old[i:i+1], now)
		}
	}
	policy := ls.shaper.Policy()
	slices.SortStableFunc(path, func(a, b stop) int {
		i, j := policy.Index(a.state), policy.Index(b.state)
		if i < 0 && j < 0 {
			return cmp.Compare(a.state.ID, b.state.ID)
		}
		return cmp.Compare(i, j)
	})
	return path
}
