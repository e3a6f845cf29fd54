package conn

import (
	"cmp"
	"net/netip"
	"slices"

	"shaperd/leaky"
	"shaperd/shaper"
)

// udpSource is a source with UDP flows at a site.
type udpSource struct {
	flows roster
	count int
}

// sourceOf returns what s knows of a source, new if need be.
func (s *site) sourceOf(source netip.Addr) *udpSource {
	source = turnAddr(source)
	if s.sources[source] == nil {
		return &udpSource{}
	}
	return s.sources[source]
}

// forget takes a flow off the count of its source.
func (s *site) forget(of *udpSource, source netip.Addr) {
	if of.count--; of.count == 0 {
		delete(s.sources, turnAddr(source))
	}
}

// clearing is the flows that end to make room for a new one. None does unless the new one
// then has all that it lacks: what is refused all the same costs nobody anything.
type clearing []*udpFlow

// of reports whether one of r's flows makes room for one of source, or does so already.
func (c *clearing) of(r *roster, source *udpSource, now leaky.Time) bool {
	if c.frees(r) {
		return true
	}
	f := r.candidate(source, now)
	if f == nil {
		return false
	}
	*c = append(*c, f)
	return true
}

// frees reports whether one of r's flows makes room already.
func (c *clearing) frees(r *roster) bool {
	return slices.ContainsFunc(*c, func(f *udpFlow) bool {
		return slices.ContainsFunc(f.places, func(at place) bool { return at.roster == r })
	})
}

// clear ends those of p.clearing. Who is let in in their place has a list of his own.
func (p *Proxy) clear(counts *shaper.ListenerState, now leaky.Time) {
	list := p.clearing
	p.clearing = nil
	for _, gone := range list {
		counts.FlowsEvicted.Add(1)
		gone.close(now)
	}
	p.clearing = list[:0]
}

// admit gives f, a new flow that m began, its slots, its places and a socket. It reports
// false when one of them is not to be had, or not yet.
func (f *udpFlow) admit(s service, m message, now leaky.Time) bool {
	p := f.proxy
	p.clearing = p.clearing[:0]
	makeRoom := func(r *roster) bool { return p.clearing.of(r, f.source, now) }
	f.source = s.sourceOf(f.flow.Source)
	to := target{f.flow.Source, f.flow.Port, s.samePort}
	if s.crowdedBy(f.source) {
		makeRoom(&f.source.flows) // first: what its own flow frees need not be another's
	}
	limit, waits := p.gates.check(&f.flow, s.name, now, makeRoom)
	switch {
	case limit != nil && !waits:
	case !s.room(f, makeRoom, now):
		return false
	case limit != nil:
		f.arrive(m, now)
		return false
	case !s.placeFor(to, makeRoom, now):
		if list, full := s.eligible(to, nil, now); full || len(list) > 0 {
			f.arrive(m, now)
		} else {
			f.dialFailed(errNoAddress)
		}
		return false
	default:
		p.clear(s.counts, now)
		f.source = s.sourceOf(f.flow.Source)
		if !s.room(f, func(*roster) bool { return false }, now) { // others were let in meanwhile
			return false
		}
		f.slots, limit = p.gates.take(&f.flow, s.name, now)
	}
	if limit != nil {
		if limit.Excess == shaper.ExcessReject && !m.many {
			p.reject(&f.key, f.flow.Port, m.size)
		}
		return false
	}
	if err := f.dial(to, nil, now); err != nil {
		f.slots.release(now)
		f.dialFailed(err)
		return false
	}
	f.open(now)
	return true
}

// open counts f, which has all that it needs, and puts it under its limits.
func (f *udpFlow) open(now leaky.Time) {
	p, s := f.proxy, f.site
	s.sources[turnAddr(f.flow.Source)] = f.source // it may have ended meanwhile
	f.source.count++
	s.counts.Flows.Add(1)
	s.counts.FlowsOpened.Add(1)
	f.enlist(now)
	p.flows[f.key] = f
	p.flowList.add(f, f.flow.Connection)
	f.prefix = f.announcement()
	f.recount(now)
	f.reroute(p.shaper.Policy(), now)
	f.expiry.Fire = f.expire
	p.loop.pacer.ScheduleCoarse(&f.expiry, now+f.idleTimeout())
}

func (f *udpFlow) dialFailed(err error) {
	f.site.counts.DialErrors.Add(1)
	f.proxy.refused.note("open UDP flow", "listener", f.site.name, "err", err)
}

// room reports whether there is room for f in the table, and counts and tells it when there
// is none.
func (s *site) room(f *udpFlow, makeRoom func(*roster) bool, now leaky.Time) bool {
	key, why := s.full(f.source, makeRoom)
	if key == "" {
		return true
	}
	s.counts.FlowsRefused.Add(1)
	s.proxy.shaper.Note(f.flow.Source, shaper.Tally{Dropped: 1}, now)
	s.proxy.changes.note("UDP flow refused: "+why, "listener", s.name, "source", f.flow.Source,
		"flows_of_source", f.source.count, "flows", s.counts.Flows.Load(), "raise", key)
	return false
}

// crowdedBy reports whether a source has as many flows as it may have.
func (s *site) crowdedBy(source *udpSource) bool {
	most := s.config.Load().MaxFlowsPerSource
	return most > 0 && source.count >= most
}

// full returns the key of the bound on flows that keeps source from another one, and what
// it is in words, or "" when there is room.
func (s *site) full(source *udpSource, makeRoom func(*roster) bool) (key, why string) {
	config := s.config.Load()
	switch {
	case s.crowdedBy(source) && !makeRoom(&source.flows):
		return "max_flows_per_source", "its source has as many as it may have, none of them idle"
	case s.counts.Flows.Load() >= int64(config.MaxFlows) && !makeRoom(&s.flows):
		return "max_flows", "the listener has as many as it may have, none of them idle"
	case s.proxy.loop.short(enough) && !makeRoom(&s.flows):
		return "max_flows", "descriptors or memory run short"
	}
	return "", ""
}

// FlowRoom returns how many UDP flows a source has at a listener, of how many, and whether
// it could have another one.
func (p *Proxy) FlowRoom(listener string, source netip.Addr) (room shaper.FlowRoom) {
	p.loop.call(func(now leaky.Time) {
		s := p.sites[listener]
		if s == nil {
			return
		}
		src := s.sources[turnAddr(source)]
		if src == nil {
			src = &udpSource{}
		}
		config := s.config.Load()
		room = shaper.FlowRoom{OfSource: src.count, MostOfSource: config.MaxFlowsPerSource, Open: int(s.counts.Flows.Load()), Most: config.MaxFlows}
		var ends clearing
		room.Full, _ = s.full(src, func(r *roster) bool { return ends.of(r, src, now) })
	})
	return room
}

// placeFor reports whether a downstream has room for a flow, or a flow at one that is full
// makes some.
func (s *site) placeFor(to target, makeRoom func(*roster) bool, now leaky.Time) bool {
	list, _ := s.eligible(to, nil, now)
	if s.awaited() { // others have waited for longer, but maybe for other downstreams
		return len(list) > 0 && !s.serves(now)
	}
	if len(list) > 0 {
		return true
	}
	full := s.crowded(to, nil, now)
	return slices.ContainsFunc(full, func(d *downstream) bool { return s.proxy.clearing.frees(&d.flows) }) ||
		slices.ContainsFunc(full, func(d *downstream) bool { return makeRoom(&d.flows) })
}

// check reports whether the gates would let f through, a flow of the listener named listen,
// where makeRoom may find who would give up a slot. Else it returns the limit that does not, and
// whether f may wait for that; if not the refusal is counted. No slot is taken, and no pace charged.
func (g *gates) check(f *shaper.Flow, listen string, now leaky.Time, makeRoom func(*roster) bool) (_ *shaper.Limit, waits bool) {
	f.Listen = g.policy.ListenIndex(listen)
	r := g.policy.Route(f)
	if l := g.block(f, r, now); l != nil {
		return l, false
	}
	list := g.list(f, r)
	defer g.drop(list, now)
	for _, gt := range list {
		why := gt.full(now)
		switch {
		case gt.rule.Observe:
			why = shaper.None
		case len(gt.turns) > 0 || gt.keeps(nil, false): // others wait already
			why = cmp.Or(why, shaper.ByConnections)
		case why == shaper.ByConnections && gt.inFlight == gt.rule.Connections && makeRoom(&gt.flows):
			why = shaper.None
			if gt.paced(now) {
				why = shaper.ByNew
			}
		}
		if why != shaper.None {
			if waits = gt.rule.MaxWait > 0 && gt.rule.MaxWaiting > 0; !waits {
				gt.state.Connections.Add(shaper.Refuse, why, 1)
				noteRefused(g.shaper, gt.state, gt.ranked(), f.Source, now)
			}
			return gt.rule, waits
		}
	}
	return nil, false
}
