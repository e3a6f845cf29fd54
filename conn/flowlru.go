// Owner: the loop's thread.

package conn

import (
	"slices"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/leaky"
)

// flowLRU is the UDP flows that hold a scarce resource, in order of eviction: entries of a listener's
// flow table, a source's entries in it, the connections of a downstream, the slots of a gate. Those of one
// rank are in order of when they were last active, to within refileInterval. When the resource is used up, the first flow is evicted for a new one. A flow with queued datagrams is never
// evicted, so nothing is dropped in favor of another flow.
type flowLRU [numRanks]fairq.List[udpFlow]

// flowRank is the order of eviction.
type flowRank uint8

const (
	rankUnanswered flowRank = iota // no reply yet: what a flood of forged sources leaves behind
	rankAnswered                   // nothing was sent after the reply: mostly a query that is done
	rankVerified                   // the source sent something after a reply
	rankQueued                     // had queued datagrams when last checked
	numRanks
)

// lruEntry is the entry of a flow in a flowLRU.
type lruEntry struct {
	lru  *flowLRU
	link fairq.Link[udpFlow] // of the same rank
}

const (
	// unansweredGrace protects a flow from new flows of other sources: a reply takes time, and a flood
	// of sources must not evict a flow that waits for its reply, or has just got it.
	unansweredGrace = leaky.Second / 2

	// sameSourceGrace protects an answered flow from new flows of its own source: a reply may be
	// several datagrams.
	sameSourceGrace = leaky.Second / 50

	// verifiedGraceDivisor is the fraction of the idle timeout for which a verified flow is protected.
	verifiedGraceDivisor = 4

	// refileInterval is how often an active flow moves to the end of its lists. To move it for each
	// datagram would cost as much as to forward the datagram.
	refileInterval = leaky.Second / 10
)

// victim returns the flow to evict for one of source, or nil.
func (lru *flowLRU) victim(source *udpSource, now leaky.Time) *udpFlow {
	for rank := range rankQueued {
		for f := lru[rank].First(); f != nil; f = lru[rank].First() {
			if !f.queued.Empty() {
				f.refile(now)
				continue
			}
			if now.Sub(f.lastActive) >= f.grace(source) {
				return f
			}
			if f.lastActive <= f.refiledAt {
				break
			}
			f.refile(now) // active since it was filed: not the longest idle
		}
	}
	return nil
}

// all returns the flows of lru.
func (lru *flowLRU) all() (flows []*udpFlow) {
	for rank := range lru {
		flows = slices.AppendSeq(flows, lru[rank].All())
	}
	return flows
}

// hasAnswered reports whether the downstream has replied to a flow of lru.
func (lru *flowLRU) hasAnswered() bool {
	for rank := rankAnswered; rank < numRanks; rank++ {
		for f := range lru[rank].All() {
			if !f.unanswered {
				return true
			}
		}
	}
	return false
}

// grace is the idle time for which f is protected from new flows of source.
func (f *udpFlow) grace(source *udpSource) leaky.Time {
	switch {
	case f.rank == rankAnswered && f.source == source:
		return sameSourceGrace
	case f.rank != rankVerified:
		return unansweredGrace
	}
	return max(leaky.FromDuration(f.listener.config.Load().UDPIdleTimeout)/verifiedGraceDivisor, unansweredGrace)
}

// insertLRU adds f to the lists of all resources that it holds.
func (f *udpFlow) insertLRU(now leaky.Time) {
	f.removeLRU()
	f.rank, f.refiledAt = f.currentRank(), now
	f.lruEntries = make([]lruEntry, 0, 3+len(f.slots.held))
	join := func(lru *flowLRU) {
		f.lruEntries = append(f.lruEntries, lruEntry{lru: lru})
		lru[f.rank].Push(&f.lruEntries[len(f.lruEntries)-1].link, f)
	}
	join(&f.listener.flows)
	join(&f.source.flows)
	join(&f.downstream.flows)
	for _, gt := range f.slots.held {
		join(&gt.flows)
	}
}

func (f *udpFlow) removeLRU() {
	for i := range f.lruEntries {
		e := &f.lruEntries[i]
		e.lru[f.rank].Remove(&e.link)
	}
	f.lruEntries = nil
}

// refile moves f to the end of its lists, at its current rank.
func (f *udpFlow) refile(now leaky.Time) {
	old := f.rank
	f.rank, f.refiledAt = f.currentRank(), max(f.lastActive, now)
	for i := range f.lruEntries {
		e := &f.lruEntries[i]
		e.lru[old].Remove(&e.link)
		e.lru[f.rank].Push(&e.link, f)
	}
}

func (f *udpFlow) currentRank() flowRank {
	switch {
	case !f.queued.Empty():
		return rankQueued
	case f.unanswered:
		return rankUnanswered
	case !f.verified:
		return rankAnswered
	}
	return rankVerified
}

// touch records that f received or sent a datagram.
func (f *udpFlow) touch(now leaky.Time) {
	f.lastActive = now
	if now.Sub(f.refiledAt) > refileInterval {
		f.refile(now)
	}
}
