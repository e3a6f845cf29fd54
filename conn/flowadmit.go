package conn

import (
	"cmp"
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/topk"
)

// udpSource is a source with UDP flows at a listener.
type udpSource struct {
	flows flowLRU
	count int
}

// sourceOf returns the source with that address at s, or a new one.
func (s *listener) sourceOf(source netip.Addr) *udpSource {
	source = sourceKey(source)
	if s.sources[source] == nil {
		return &udpSource{}
	}
	return s.sources[source]
}

// removeFlow removes a flow from the count of its source.
func (s *listener) removeFlow(src *udpSource, source netip.Addr) {
	if src.count--; src.count == 0 {
		delete(s.sources, sourceKey(source))
	}
}

// evictions is the flows to evict for a new one. None is evicted unless the new flow then has all that
// it needs: a flow that is refused costs the others nothing.
type evictions []*udpFlow

// include reports whether a flow of r can be evicted for one of source, or already is included.
func (ev *evictions) include(lru *flowLRU, source *udpSource, now leaky.Time) bool {
	if ev.frees(lru) {
		return true
	}
	f := lru.victim(source, now)
	if f == nil {
		return false
	}
	*ev = append(*ev, f)
	return true
}

// frees reports whether evictions already include a flow of r.
func (ev *evictions) frees(lru *flowLRU) bool {
	return slices.ContainsFunc(*ev, func(f *udpFlow) bool {
		return slices.ContainsFunc(f.lruEntries, func(at lruEntry) bool { return at.lru == lru })
	})
}

// evict closes the flows of p.evictions. What is admitted meanwhile has a list of its own.
func (p *Proxy) evict(counts *shaper.ListenerState, now leaky.Time) {
	list := p.evictions
	p.evictions = nil
	for _, f := range list {
		counts.FlowsEvicted.Add(1)
		f.close(now)
	}
	p.evictions = list[:0]
}

// admit gives f, a new flow that m began, its slots, its table entries and a socket. It returns false
// if one of them is not available, or not yet.
func (f *udpFlow) admit(b binding, m message, now leaky.Time) bool {
	p := f.proxy
	p.evictions = p.evictions[:0]
	makeRoom := func(lru *flowLRU) bool { return p.evictions.include(lru, f.source, now) }
	f.source = b.sourceOf(f.flow.Source)
	to := target{f.flow.Source, f.flow.Port, b.samePort}
	if b.atSourceCap(f.source) {
		makeRoom(&f.source.flows) // first, since that may be all that is needed
	}
	limit, mayWait := p.admission.precheck(&f.flow, b.name, now, makeRoom)
	switch {
	case limit != nil && !mayWait:
	case !b.hasRoom(f, makeRoom, now):
		return false
	case limit != nil:
		f.waitForAdmission(m, now)
		return false
	case !b.hasDownstream(to, makeRoom, now):
		if list, full := b.eligible(to, nil, now); full || len(list) > 0 {
			f.waitForAdmission(m, now)
		} else {
			f.dialFailed(errNoAddress)
		}
		return false
	default:
		p.evict(b.counts, now)
		f.source = b.sourceOf(f.flow.Source)
		if !b.hasRoom(f, func(*flowLRU) bool { return false }, now) { // others may have been admitted meanwhile
			return false
		}
		f.slots, limit = p.admission.tryAcquire(&f.flow, b.name, now)
	}
	if limit != nil {
		if limit.RefuseWith == shaper.RefuseReject && !m.broadcast {
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

// open counts f, which has all that it needs, and applies its limits.
func (f *udpFlow) open(now leaky.Time) {
	p, s := f.proxy, f.listener
	s.sources[sourceKey(f.flow.Source)] = f.source // the source may have been deleted meanwhile
	f.source.count++
	s.counts.Flows.Add(1)
	s.counts.FlowsOpened.Add(1)
	f.insertLRU(now)
	p.flows[f.key] = f
	p.flowList.add(f, f.flow.Connection)
	f.prefix = f.proxyHeader()
	f.updateSlots(now)
	f.reroute(p.shaper.Policy(), now)
	f.expiry.Fire = f.expire
	p.loop.pacer.ScheduleCoarse(&f.expiry, now+f.idleTimeout())
}

func (f *udpFlow) dialFailed(err error) {
	f.listener.counts.DialErrors.Add(1)
	f.proxy.trafficLog.warn("opening UDP flow failed", "listener", f.listener.name, "err", err)
}

// hasRoom reports whether the flow table has room for f. If not, it counts and logs the refusal.
func (s *listener) hasRoom(f *udpFlow, makeRoom func(*flowLRU) bool, now leaky.Time) bool {
	key, why := s.fullReason(f.source, makeRoom)
	if key == "" {
		return true
	}
	s.counts.FlowsRefused.Add(1)
	s.proxy.shaper.Record(f.flow.Source, topk.Usage{Dropped: 1}, now)
	s.proxy.stateLog.warn("UDP flow refused: "+why, "listener", s.name, "source", f.flow.Source,
		"flows_of_source", f.source.count, "flows", s.counts.Flows.Load(), "raise", key)
	return false
}

// atSourceCap reports whether a source has its maximum of flows.
func (s *listener) atSourceCap(source *udpSource) bool {
	maxFlows := s.config.Load().MaxFlowsPerSource
	return maxFlows > 0 && source.count >= maxFlows
}

// fullReason returns the key of the maximum that keeps source from another flow, and the reason, or ""
// if there is room.
func (s *listener) fullReason(source *udpSource, makeRoom func(*flowLRU) bool) (key, why string) {
	config := s.config.Load()
	switch {
	case s.atSourceCap(source) && !makeRoom(&source.flows):
		return "max_flows_per_source", "source has the maximum, none of them idle"
	case s.counts.Flows.Load() >= int64(config.MaxFlows) && !makeRoom(&s.flows):
		return "max_flows", "listener has the maximum, none of them idle"
	case s.proxy.loop.overloaded(acceptWatermark) && !makeRoom(&s.flows):
		return "max_flows", "low on descriptors or memory"
	}
	return "", ""
}

// FlowQuota returns the number of UDP flows that a source has at a listener, the maximum, and
// whether it may have another one.
func (p *Proxy) FlowQuota(listener string, source netip.Addr) (quota shaper.FlowQuota) {
	p.loop.call(func(now leaky.Time) {
		s := p.listeners[listener]
		if s == nil {
			return
		}
		src := s.sources[sourceKey(source)]
		if src == nil {
			src = &udpSource{}
		}
		config := s.config.Load()
		quota = shaper.FlowQuota{
			SourceFlows: src.count, MaxSourceFlows: config.MaxFlowsPerSource,
			Flows: int(s.counts.Flows.Load()), MaxFlows: config.MaxFlows,
		}
		var ends evictions
		quota.Full, _ = s.fullReason(src, func(lru *flowLRU) bool { return ends.include(lru, src, now) })
	})
	return quota
}

// hasDownstream reports whether a downstream has room for a flow, or can evict one of its flows.
func (s *listener) hasDownstream(to target, makeRoom func(*flowLRU) bool, now leaky.Time) bool {
	list, _ := s.eligible(to, nil, now)
	if s.hasWaiters() { // waiters go first, but may wait for other downstreams
		return len(list) > 0 && !s.hasServableWaiter(now)
	}
	if len(list) > 0 {
		return true
	}
	full := s.fullDownstreams(to, nil, now)
	return slices.ContainsFunc(full, func(d *downstream) bool { return s.proxy.evictions.frees(&d.flows) }) ||
		slices.ContainsFunc(full, func(d *downstream) bool { return makeRoom(&d.flows) })
}

// precheck reports whether all gates would admit f, a flow of the listener named listen, if makeRoom
// evicts flows that hold slots. Otherwise it returns the limit that would not, and whether f may wait
// for it; if f may not, the refusal is counted. It takes no slot, and charges no rate.
func (a *admission) precheck(f *shaper.Flow, listen string, now leaky.Time, makeRoom func(*flowLRU) bool) (_ *shaper.Limit, mayWait bool) {
	f.Origin = a.policy.ListenerIndex(listen)
	r := a.policy.Route(f)
	if l := a.checkBlocks(f, r, now); l != nil {
		return l, false
	}
	list := a.gatesFor(f, r)
	defer a.dropUnused(list, now)
	for _, gt := range list {
		why := gt.exhausted(now)
		switch {
		case gt.limit.Observe:
			why = shaper.None
		case len(gt.queued) > 0 || gt.reservedAgainst(nil, false): // waiters go first
			why = cmp.Or(why, shaper.ByConnections)
		case why == shaper.ByConnections && gt.inFlight == gt.limit.MaxConnections && makeRoom(&gt.flows):
			why = shaper.None
			if gt.atRate(now) {
				why = shaper.ByNewConnections
			}
		}
		if why != shaper.None {
			if mayWait = gt.limit.QueueTimeout > 0 && gt.limit.MaxQueue > 0; !mayWait {
				gt.state.Connections.Add(shaper.Refuse, why, 1)
				recordRefusal(a.shaper, gt.state, gt.limitKey(), f.Source, now)
			}
			return gt.limit, mayWait
		}
	}
	return nil, false
}
