// Owner: the loop's thread, except for the methods of Proxy.

package conn

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"shaperd.dev/shaperd/conn/penalty"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// sourcePenalty is the penalty of a limit in use.
type sourcePenalty struct {
	*shaper.Penalty
	book      *penalty.Book
	limit     *shaper.Limit
	state     *shaper.LimitState
	index     int           // of limit in the policy
	elsewhere *shaper.Limit // stands for limit where that does not apply, and its reply is of another protocol
	end       pacer.Event   // of the next block
}

// prefixOf returns the source that an address is for y.
func (y *sourcePenalty) prefixOf(a netip.Addr) netip.Prefix {
	bits, _ := y.limit.PrefixOf(a)
	return netip.PrefixFrom(a, bits).Masked()
}

// enforced reports whether y blocks sources.
func (y *sourcePenalty) enforced() bool { return !y.Observe && !y.limit.Observe }

// counters returns the counters for what y imposes, or would impose.
func (y *sourcePenalty) counters(observed bool) *shaper.PenaltyCounters {
	if observed {
		return &y.state.ObservedPenalties
	}
	return &y.state.Penalties
}

// checkPenalties counts a connection or flow of a source that is blocked by the penalty of a limit, and returns the limit
// that refuses it, and for how long. Without blocks it costs nothing, and then one lookup for each penalty that blocks.
func (a *admission) checkPenalties(f *shaper.Flow, r shaper.Route, now leaky.Time) (*shaper.Limit, time.Duration) {
	for _, y := range a.penalties {
		s := y.blocks(a.policy, f.Source, now)
		if s == nil {
			continue
		}
		y.state.Connections.Add(shaper.Refuse, shaper.Blocked, 1)
		recordRefusal(a.shaper, y.state, a.policy.Key(y.index, f, r), f.Source, now)
		if r.Limits()>>y.index&1 == 0 {
			return y.elsewhere, s.Until - now.Duration()
		}
		return y.limit, s.Until - now.Duration()
	}
	return nil, 0
}

// blocks returns the block of an address at now, or nil.
func (y *sourcePenalty) blocks(p *shaper.Policy, source netip.Addr, now leaky.Time) *penalty.Source {
	if blocked, _ := y.book.Totals(false); blocked == 0 || !y.enforced() {
		return nil
	}
	s := y.book.Blocked(y.prefixOf(source), now.Duration())
	if s == nil || s.Observed || p.Penalizes(source)>>y.index&1 == 0 {
		return nil
	}
	return s
}

// penalize counts a connection that was refused, if its limit has a penalty: then it is of TCP. One whose client has left
// does not count, nor one that is refused for another reason than how much its source has or opens, or because of others.
func (a *admission) penalize(w *waiter, why *refusal, now leaky.Time) {
	if len(a.penalties) == 0 || why.poolFull || why.byOthers {
		return
	}
	switch why.reason {
	case shaper.ByConnections, shaper.ByNewConnections, shaper.WaitTimeout, shaper.WaitingFull:
	default:
		return
	}
	at := slices.IndexFunc(a.penalties, func(y *sourcePenalty) bool { return y.limit.Name == why.limit.Name })
	if at < 0 || a.policy.Penalizes(w.flow.Source)>>a.penalties[at].index&1 == 0 {
		return
	}
	y := a.penalties[at]
	s := y.book.Refused(y.prefixOf(w.flow.Source), y.Penalty, now.Duration())
	if s == nil {
		return
	}
	y.counters(s.Observed).Imposed.Add(1)
	a.followPenalty(y, now)
	a.onPenalty(y, s)
	if y.enforced() {
		a.refuseWaiting(s.Prefix, now)
	}
}

// refuseWaiting refuses the connections and flows of a source that has just been blocked and that wait.
func (a *admission) refuseWaiting(source netip.Prefix, now leaky.Time) {
	key := sourceKey(source.Addr())
	one := source.IsSingleIP() || !source.Addr().Is4() && source.Bits() >= 64
	if one && !a.waits(key) && !a.waits(unverifiedSource) {
		return // there may be many queues
	}
	var found []*waiter
	for _, q := range a.queues {
		if addr := q.member.addr; source.Contains(addr) || addr == key || addr == unverifiedSource {
			found = slices.AppendSeq(found, q.waiters.All())
		}
	}
	for _, w := range found {
		if w.inTurns {
			continue
		}
		if l, left := a.checkPenalties(&w.flow, w.route, now); l != nil {
			a.dequeue(w, now)
			a.outcomes = append(a.outcomes, outcome{w, refusal{limit: l, reason: shaper.Blocked, retryAfter: left}})
		}
	}
}

// waits reports whether connections of a source wait.
func (a *admission) waits(addr netip.Addr) bool {
	for c := range a.policy.Classes() {
		if a.sources[memberKey{class: a.policy.ClassState(c), addr: addr}] != nil {
			return true
		}
	}
	return false
}

// followPenalty publishes how many sources y blocks, and wakes up when that changes.
func (a *admission) followPenalty(y *sourcePenalty, now leaky.Time) {
	a.penaltyChanges.Add(1)
	next := y.book.Advance(y.Penalty, now.Duration())
	for _, observed := range []bool{false, true} {
		blocked, evicted := y.book.Totals(observed)
		y.counters(observed).Active.Store(int64(blocked))
		y.counters(observed).Evicted.Store(evicted)
	}
	if next > 0 {
		a.wheel.Schedule(&y.end, leaky.FromDuration(next))
	} else {
		a.wheel.Cancel(&y.end)
	}
}

// updatePenalties adopts the penalties of a new policy. A limit that keeps its name, its prefixes and its penalty keeps
// who is blocked, until when it was said.
func (a *admission) updatePenalties(now leaky.Time) {
	old := a.penalties
	a.penalties = nil
	for i := range a.policy.Penalties().All {
		l := a.policy.Limit(i)
		y := &sourcePenalty{state: a.policy.State(i)}
		at := slices.IndexFunc(old, func(o *sourcePenalty) bool { return o.state == y.state })
		if at >= 0 && old[at].limit.IPv4Prefix == l.IPv4Prefix && old[at].limit.IPv6Prefix == l.IPv6Prefix {
			y = old[at]
			old = slices.Delete(old, at, at+1)
		} else {
			y.book = penalty.NewBook()
			y.end.Fire = func(now leaky.Time) { a.followPenalty(y, now) }
		}
		y.Penalty, y.limit, y.index, y.elsewhere = l.Penalty, l, i, &shaper.Limit{Name: l.Name}
		y.restore(a.restored, now.Duration())
		if !y.Observe {
			y.book.ForgetObserved()
		}
		a.penalties = append(a.penalties, y)
		a.followPenalty(y, now)
	}
	a.restored = nil
	for _, y := range old {
		a.wheel.Cancel(&y.end)
		if a.policy.IndexOf(y.state) < 0 || a.policy.Penalties()>>a.policy.IndexOf(y.state)&1 == 0 {
			y.state.Penalties.Active.Store(0)
			y.state.ObservedPenalties.Active.Store(0)
		}
		a.penaltyChanges.Add(1)
	}
}

// logPenalty says that a source is blocked, or would be.
func (p *Proxy) logPenalty(y *sourcePenalty, s *penalty.Source) {
	msg := "source penalized"
	if s.Observed {
		msg = "source would be penalized"
	}
	p.penaltyLog.warn(msg, "limit", y.limit.Name, "source", s.Prefix.String(), "times", s.Times, "for", (s.Until - s.Since).String(),
		"kind", "penalty")
}

// Penalties returns the sources that penalties block, would block, or have blocked and remember. Those of one penalty
// take the loop half a millisecond at most; other work has its turn before the next.
func (p *Proxy) Penalties() (all []shaper.PenaltyStatus) {
	policy := p.shaper.Policy()
	for i := range policy.Penalties().All {
		all = slices.Grow(all, penalty.MaxSources)
		p.home.loop.call(func(now leaky.Time) {
			for _, y := range p.home.admission.penalties {
				if y.state == policy.State(i) {
					y.book.Advance(y.Penalty, now.Duration())
					y.book.Each(func(s *penalty.Source) { all = append(all, y.status(s, now)) })
				}
			}
		})
	}
	return all
}

func (y *sourcePenalty) status(s *penalty.Source, now leaky.Time) shaper.PenaltyStatus {
	return shaper.PenaltyStatus{
		Limit: y.limit.Name, Source: s.Prefix, Age: now.Duration() - s.Since, Left: s.Until - now.Duration(), Times: s.Times,
		Observed: s.Observed, Enforced: !s.Observed && y.enforced() && now.Duration() < s.Until,
	}
}

// PenaltyChanges returns a number that changes when Penalties does, other than with time.
func (p *Proxy) PenaltyChanges() uint64 { return p.home.admission.penaltyChanges.Load() }

// RestorePenalties restores what Penalties returned with the next Apply, for the limits that have a penalty then. It
// ignores sources of a length that a limit does not have.
func (p *Proxy) RestorePenalties(all []shaper.PenaltyStatus) {
	p.home.loop.call(func(leaky.Time) { p.home.admission.restored = all })
}

// restore restores the sources of all that are of y.
func (y *sourcePenalty) restore(all []shaper.PenaltyStatus, now time.Duration) {
	all = slices.DeleteFunc(slices.Clone(all), func(s shaper.PenaltyStatus) bool {
		return s.Limit != y.limit.Name || y.prefixOf(s.Source.Addr()) != s.Source || s.Observed && !y.Observe
	})
	slices.SortFunc(all, func(a, b shaper.PenaltyStatus) int { return cmp.Compare(a.Left, b.Left) })
	for _, s := range all {
		y.book.Restore(penalty.Source{Prefix: s.Source, Since: now - s.Age, Until: now + s.Left, Times: s.Times, Observed: s.Observed}, now)
	}
}

// EndPenalty forgets what a limit has refused of a source, and ends its block if there is one; of all limits if limit is
// "". It reports whether the source was blocked, or is remembered.
func (p *Proxy) EndPenalty(limit string, source netip.Prefix) (found bool) {
	p.home.loop.call(func(now leaky.Time) {
		for _, y := range p.home.admission.penalties {
			if of := y.prefixOf(source.Addr()); (limit == "" || y.limit.Name == limit) && (source.IsSingleIP() || source == of) {
				y.book.Advance(y.Penalty, now.Duration())
				found = y.book.Forget(of) || found
				p.home.admission.followPenalty(y, now)
			}
		}
	})
	return found
}

// PenaltyOf returns the block of an address by the penalty of a limit, unless that excepts it.
func (p *Proxy) PenaltyOf(limit string, source netip.Addr) (block shaper.PenaltyStatus, blocked bool) {
	p.withPenalty(limit, source, func(y *sourcePenalty, now leaky.Time) {
		if s := y.book.Blocked(y.prefixOf(source), now.Duration()); s != nil {
			block, blocked = y.status(s, now), true
		}
	})
	return block, blocked
}

// PenaltyCount returns how many refusals of an address count for the penalty of a limit now, and for how long they still do.
func (p *Proxy) PenaltyCount(limit string, source netip.Addr) (refusals uint64, left time.Duration) {
	p.withPenalty(limit, source, func(y *sourcePenalty, now leaky.Time) {
		n, since := y.book.Count(y.prefixOf(source), y.Penalty, now.Duration())
		if refusals = n; n > 0 {
			left = since + y.After.Per - now.Duration()
		}
	})
	return refusals, left
}

// withPenalty calls f with the penalty of a limit on the loop's thread, unless that excepts source.
func (p *Proxy) withPenalty(limit string, source netip.Addr, f func(y *sourcePenalty, now leaky.Time)) {
	p.home.loop.call(func(now leaky.Time) {
		a := p.home.admission
		for _, y := range a.penalties {
			if y.limit.Name == limit && a.policy.Penalizes(source)>>y.index&1 != 0 {
				f(y, now)
			}
		}
	})
}
