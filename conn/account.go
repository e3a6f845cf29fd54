// Owner: the loop's thread.

package conn

import (
	"net/netip"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/topk"
)

// usage is shaper.Usage in the loop's time.
type usage struct {
	bytes   uint64
	waited  leaky.Time
	dropped uint64
}

func (t usage) export() topk.Usage {
	return topk.Usage{Bytes: t.bytes, Waited: t.waited.Duration(), Dropped: t.dropped}
}

// account is the usage of a flow apart from that of its paths.
type account struct {
	started       leaky.Time
	reportedAt    leaky.Time // time of the last report to the rankings
	reportedBytes uint64     // of the total, included in a report
	waited        leaky.Time // in admission, and in released paths

	longestAt   *shaper.LimitState // limit that it waited for the longest
	longestWait leaky.Time
}

// reportInterval is how often an active flow reports its usage to the rankings. To report each unit
// would cost more than the unit.
const reportInterval = leaky.Second

// addWait adds time spent in a queue.
func (h *hop) addWait(d leaky.Time) {
	h.usage.waited += d
	h.waited += d
}

// addWait adds time spent at a gate or in a queue.
func (a *account) addWait(at *shaper.LimitState, d leaky.Time) {
	a.waited += d
	if d > a.longestWait {
		a.longestAt, a.longestWait = at, d
	}
}

// report adds the usage of a flow of source since the last report to the rankings. bytes is its total
// so far.
func (a *account) report(s *shaper.Shaper, source netip.Addr, bytes uint64, now leaky.Time, paths ...[]hop) {
	a.reportedAt = now
	sum := usage{bytes: bytes - a.reportedBytes}
	a.reportedBytes = bytes
	for _, path := range paths {
		for i := range path {
			h := &path[i]
			if h.usage == (usage{}) {
				continue
			}
			if !h.state.Keys.TryAdd(h.key, h.usage.export(), now) {
				continue // included in the next report
			}
			sum.waited += h.usage.waited
			sum.dropped += h.usage.dropped
			h.usage = usage{}
		}
	}
	if sum != (usage{}) {
		s.Record(source, sum.export(), now)
	}
}

// merge adds the waits of a path that is about to be released.
func (a *account) merge(path []hop) {
	for i := range path {
		a.addWait(path[i].state, path[i].waited)
	}
}

// total returns the account with the waits of its paths.
func (a *account) total(paths ...[]hop) account {
	all := *a
	for _, path := range paths {
		all.merge(path)
	}
	return all
}

// reportUsage reports the usage of s. It is called before its paths change or end.
func (s *session) reportUsage(now leaky.Time) {
	s.account.report(s.proxy.shaper, s.flow.Source, s.up.moved+s.down.moved, now, s.up.unit.path, s.down.unit.path)
}

// reportUsage reports the usage of f. It is called before its paths change or end.
func (f *udpFlow) reportUsage(now leaky.Time) {
	f.account.report(f.proxy.shaper, f.flow.Source, f.up.moved+f.down.moved, now, f.up.path, f.down.path)
}

// recordRefusal adds a connection of source that a limit refused to the rankings.
func recordRefusal(s *shaper.Shaper, at *shaper.LimitState, key shaper.Key, source netip.Addr, now leaky.Time) {
	did := topk.Usage{Dropped: 1}
	at.Keys.TryAdd(key, did, now)
	s.Record(source, did, now)
}
