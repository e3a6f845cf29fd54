package conn

import (
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// evictIdleFlows evicts idle UDP flows for the connections that wait at gt, and repeats that while
// some wait. Otherwise sources that may be forged could keep connections out of a limit that applies
// to both, with an occasional datagram.
func (a *admission) evictIdleFlows(gt *gate, now leaky.Time) {
	for n := gt.waiting; n > 0 && len(gt.queued) > 0 && gt.atCap(now); n-- {
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
	if len(gt.queued) > 0 {
		a.wheel.Schedule(&gt.relief, now+unansweredGrace)
	}
}

// victim returns a flow to evict at gt, or nil. For a waiting flow it may be a verified one.
func (gt *gate) victim(now leaky.Time) *udpFlow {
	maxRank := rankAnswered
	if gt.queued[0].queues[0].head.flow.Protocol == shaper.UDP {
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

// victimUpTo returns the flow of r, of rank most at most, to evict, or nil. For a connection that is a
// flow without a reply, or whose source sent nothing after the reply.
func (lru *flowLRU) victimUpTo(maxRank flowRank, now leaky.Time) *udpFlow {
	if f := lru.victim(nil, now); f != nil && f.rank <= maxRank {
		return f
	}
	return nil
}

// fullDownstreams returns the full downstreams that could take a connection to to if they had one
// less. Those that are unavailable are only considered if all are.
func (s *listener) fullDownstreams(to target, failed []*downstream, now leaky.Time) (full []*downstream) {
	for _, usable := range [...]bool{true, false} {
		found := false
		for _, d := range s.downstreams {
			if d.available(to.portOn(d), now) != usable || d.drained || slices.Contains(failed, d) || !d.host.addr().IsValid() || !d.matchesFamily(to.source) {
				continue
			}
			found = true
			if d.inFlight == d.MaxConnections {
				full = append(full, d)
			}
		}
		if found {
			break
		}
	}
	return full
}
