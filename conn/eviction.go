// Owner: the loop's thread.

package conn

import (
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// evictions is the flows to evict for a new one. None is evicted unless the new flow then has all that
// it needs: a flow that is refused costs the others nothing.
type evictions []*udpFlow

// include reports whether a flow of lru can be evicted for one of source, or already is included.
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

// frees reports whether evictions already include a flow of lru.
func (ev *evictions) frees(lru *flowLRU) bool {
	return slices.ContainsFunc(*ev, func(f *udpFlow) bool {
		return slices.ContainsFunc(f.lruEntries, func(at lruEntry) bool { return at.lru == lru })
	})
}

// evict closes the flows of p.evictions. What is admitted meanwhile has a list of its own.
func (p *worker) evict(counts *shaper.ListenerState, now leaky.Time) {
	list := p.evictions
	p.evictions = nil
	for _, f := range list {
		counts.FlowsEvicted.Add(1)
		f.close(now)
	}
	p.evictions = list[:0]
}

// relieve makes room for the connections that wait at gt, and repeats that while some wait.
func (a *admission) relieve(gt *gate, now leaky.Time) {
	a.evictIdleFlows(gt, now)
	a.yieldIdle(gt, now)
	if gt.first() != nil {
		a.wheel.Schedule(&gt.relief, now+unansweredGrace)
	}
}

// evictIdleFlows evicts idle UDP flows for the connections that wait at gt. Otherwise sources that may be forged could
// keep connections out of a limit that applies to both, with an occasional datagram.
func (a *admission) evictIdleFlows(gt *gate, now leaky.Time) {
	for n := gt.waiting; n > 0 && gt.first() != nil && gt.atCap(now) && !gt.awaitsClaim(now) && (gt.pool == nil || !gt.pool.listener.held(now)); n-- {
		f := gt.victim(now)
		if f == nil {
			break
		}
		f.listener.counts.FlowsEvicted.Add(1)
		f.close(now)
		if gt.pool != nil {
			gt.pool.listener.wakeWaiters(now)
		}
	}
}

// victim returns a flow to evict at gt, or nil. For a waiting flow it may be a verified one.
func (gt *gate) victim(now leaky.Time) *udpFlow {
	maxRank := rankAnswered
	if gt.first().next().waiters.First().flow.Protocol == shaper.UDP {
		maxRank = rankVerified
	}
	if gt.pool == nil {
		return gt.flows.victimUpTo(maxRank, now)
	}
	for _, d := range gt.pool.listener.fullDownstreams(gt.pool.target, gt.pool.failed, now) {
		if f := d.flows.victimUpTo(maxRank, now); f != nil {
			return f
		}
	}
	return nil
}

// victimUpTo returns the flow of lru, of rank maxRank at most, to evict, or nil. For a connection that is a
// flow without a reply, or whose source sent nothing after the reply.
func (lru *flowLRU) victimUpTo(maxRank flowRank, now leaky.Time) *udpFlow {
	if f := lru.victim(nil, now); f != nil && f.rank <= maxRank {
		return f
	}
	return nil
}
