// Owner: the loop's thread.

package conn

import (
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/topk"
)

// udpSource is a source with UDP flows at a listener.
type udpSource struct {
	flows flowLRU
	count int
}

// sourceOf returns the source with that address at ln, or a new one.
func (ln *listener) sourceOf(source netip.Addr) *udpSource {
	source = sourceKey(source)
	if ln.sources[source] == nil {
		return &udpSource{}
	}
	return ln.sources[source]
}

// removeFlow removes a flow from the count of its source.
func (ln *listener) removeFlow(src *udpSource, source netip.Addr) {
	if src.count--; src.count == 0 {
		delete(ln.sources, sourceKey(source))
	}
}

var drawSeed = maphash.MakeSeed()

// draw is the draw of checkShed for a flow: the same for each of its datagrams, or it would pass with one of them.
func (k flowKey) draw() float64 {
	return float64(maphash.Comparable(drawSeed, k.client)>>11) / (1 << 53)
}

// admit gives f, a new flow that m began, its slots, its table entries and a socket. It returns false
// if one of them is not available, or not yet.
func (f *udpFlow) admit(b binding, m sock.Message, now leaky.Time) bool {
	p := f.proxy
	p.evictions = p.evictions[:0]
	makeRoom := func(lru *flowLRU) bool { return p.evictions.include(lru, f.source, now) }
	f.source = b.sourceOf(f.flow.Source)
	to := f.target()
	if b.atSourceCap(f.source) {
		makeRoom(&f.source.flows) // first, since that may be all that is needed
	}
	var limit *shaper.Limit
	mayWait := false
	p.admission.decisions.time(p.admission.clock, func() {
		limit, mayWait = p.admission.precheck(&f.flow, b.name, !f.source.flows.hasAnswered(), f.key.draw(), now, makeRoom)
	})
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
		f.slots, limit = p.admission.tryAcquire(&f.flow, b.name, !f.source.flows.hasAnswered(), now)
	}
	if limit != nil {
		if limit.RefuseWith == shaper.RefuseReject && !m.Broadcast {
			p.reject(&f.key, f.flow.Port, m.Size)
		}
		return false
	}
	if err := f.dial(nil, now); err != nil {
		f.slots.release(now)
		f.dialFailed(err)
		return false
	}
	f.open(now)
	return true
}

// hasRoom reports whether the flow table has room for f. If not, it counts and logs the refusal.
func (ln *listener) hasRoom(f *udpFlow, makeRoom func(*flowLRU) bool, now leaky.Time) bool {
	key, why := ln.fullReason(f.source, makeRoom)
	if key == "" {
		return true
	}
	ln.counts.FlowsRefused.Add(1)
	ln.proxy.shaper.Record(f.flow.Source, topk.Usage{Dropped: 1}, now)
	ln.proxy.stateLog.warn("UDP flow refused: "+why, "listener", ln.name, "source", f.flow.Source,
		"flows_of_source", f.source.count, "flows", ln.counts.Flows.Load(), "raise", key)
	return false
}

// atSourceCap reports whether a source has its maximum of flows.
func (ln *listener) atSourceCap(source *udpSource) bool {
	maxFlows := ln.config.Load().MaxFlowsPerSource
	return maxFlows > 0 && source.count >= maxFlows
}

// fullReason returns the key of the maximum that keeps source from another flow, and the reason, or ""
// if there is room.
func (ln *listener) fullReason(source *udpSource, makeRoom func(*flowLRU) bool) (key, why string) {
	config := ln.config.Load()
	switch {
	case ln.atSourceCap(source) && !makeRoom(&source.flows):
		return "max_flows_per_source", "source has the maximum, none of them idle"
	case ln.counts.Flows.Load() >= int64(config.MaxFlows) && !makeRoom(&ln.flows):
		return "max_flows", "listener has the maximum, none of them idle"
	case ln.proxy.loop.overloaded(acceptWatermark) && !makeRoom(&ln.flows):
		return "max_flows", "low on descriptors or memory"
	}
	return "", ""
}

// hasDownstream reports whether a downstream has room for a flow, or can evict one of its flows.
func (ln *listener) hasDownstream(to target, makeRoom func(*flowLRU) bool, now leaky.Time) bool {
	if ln.held(now) {
		return false
	}
	list, _ := ln.eligible(to, nil, now)
	if ln.hasWaiters() { // waiters go first, but may wait for other downstreams
		return len(list) > 0 && !ln.hasServableWaiter(now)
	}
	if len(list) > 0 {
		return true
	}
	full := ln.fullDownstreams(to, nil, now)
	return slices.ContainsFunc(full, func(d *downstream) bool { return ln.proxy.evictions.frees(&d.flows) }) ||
		slices.ContainsFunc(full, func(d *downstream) bool { return makeRoom(&d.flows) })
}

// dial connects a socket of f to d, whose count includes f already, or if d is nil to a
// downstream that pick returns.
func (f *udpFlow) dial(d *downstream, now leaky.Time) error {
	to := f.target()
	counted := d != nil
	if !counted {
		full := false
		switch d, full = f.listener.pick(to, nil, now); {
		case full:
			return errDownstreamsFull
		case d == nil:
			return errNoAddress
		}
	}
	f.downstreamPort = to.portOn(d)
	addr := netip.AddrPortFrom(d.host.addr(), f.downstreamPort)
	var from netip.Addr
	transparent := f.listener.config.Load().Transparent
	if transparent {
		from = f.flow.Source
	}
	fd, err := sock.ConnectUDP(from, addr)
	if err != nil {
		if !isLocalError(err) {
			d.recordFailure(f.downstreamPort, err, now)
		}
		return fmt.Errorf("connect to %s: %w", addr, err)
	}
	if err := f.proxy.loop.watch(fd, unix.EPOLLIN, f); err != nil {
		unix.Close(fd)
		return err
	}
	f.fd, f.downstream, f.flow.Downstream, f.transparent = fd, d, d.id, transparent
	if !counted {
		d.inFlight++
		f.listener.letIn(nil, now)
	}
	return nil
}

func (f *udpFlow) target() target {
	return target{f.flow.Source, f.flow.Port, f.key.port.binding.samePort}
}

// redial connects f to a downstream of its listener's new configuration. Its queued datagrams
// go there.
func (f *udpFlow) redial(now leaky.Time) bool {
	fd, d := f.fd, f.downstream
	d.inFlight--
	if err := f.dial(nil, now); err != nil {
		f.dialFailed(err)
		d.inFlight++
		return false
	}
	f.proxy.loop.close(fd)
	d.listener.wakeLater()
	f.insertLRU(now)
	return true
}

func (f *udpFlow) dialFailed(err error) {
	f.listener.counts.DialErrors.Add(1)
	f.proxy.trafficLog.warn("opening UDP flow failed", "listener", f.listener.name, "err", err)
}

// open counts f, which has all that it needs, and applies its limits.
func (f *udpFlow) open(now leaky.Time) {
	p, ln := f.proxy, f.listener
	ln.sources[sourceKey(f.flow.Source)] = f.source // the source may have been deleted meanwhile
	f.source.count++
	ln.counts.Flows.Add(1)
	ln.counts.FlowsOpened.Add(1)
	f.insertLRU(now)
	p.flows[f.key] = f
	p.flowList.add(f, f.flow.Connection)
	f.prefix = f.proxyHeader()
	f.updateSlots(now)
	f.reroute(p.shaper.Policy(), now)
	f.expiry.Fire = f.expire
	p.loop.pacer.ScheduleCoarse(&f.expiry, now+f.idleTimeout())
}

// FlowQuota returns the number of UDP flows that a source has at a listener, the maximum, and
// whether it may have another one.
func (p *Proxy) FlowQuota(name string, source netip.Addr) (quota shaper.FlowQuota) {
	p.atListener(name, func(ln *listener, now leaky.Time) {
		src := ln.sources[sourceKey(source)]
		if src == nil {
			src = &udpSource{}
		}
		config := ln.config.Load()
		quota = shaper.FlowQuota{
			SourceFlows: src.count, MaxSourceFlows: config.MaxFlowsPerSource,
			Flows: int(ln.counts.Flows.Load()), MaxFlows: config.MaxFlows,
		}
		var ends evictions
		quota.Full, _ = ln.fullReason(src, func(lru *flowLRU) bool { return ends.include(lru, src, now) })
	})
	return quota
}
