package cluster

import (
	"maps"
	"slices"
)

// call is one call on its way through the ledger.
type call struct {
	*state
	now Time
	q   *Request
	lag Time    // of the ledger, see stoodStill
	m   *member // of the caller

	same          bool  // the host knows this epoch
	settled       bool  // for the caller: it may be counted, and given more
	claims        bool  // the call claims leases of the epoch before
	wasLive       bool  // the caller was counted before the call
	knewBefore    int64 // version up to which the caller knew events before the call
	knownByOthers int64 // version up to which all others know
	cut           bool  // the host says that it uses more than it was given
	untold        bool  // there was no room for slots that it has
}

// meet finds out who calls: a host that is known, one that joins, or one that was forgotten.
func (c *call) meet() {
	s, q, now := c.state, c.q, c.now
	m := s.members[q.Host]
	switch {
	case m == nil || m.start != q.Start || !c.same:
		// The process before is gone, and with it what it had.
		s.generation++
		fresh := &member{start: q.Start, born: now, generation: s.generation, resync: c.same && !mutant("no-resync-at-start"), returning: s.takeBack(q.Host, q.Left, now)}
		if m != nil {
			fresh.digest, fresh.info = m.digest, m.info
		}
		m = fresh
		s.members[q.Host] = m
	case s.expired(m, now):
		s.generation++
		m.generation, m.resync = s.generation, !mutant("no-resync")
	case m.resync && (q.Got == m.n || mutant("resync-once")):
		m.resync = false // the host knows
	}
	c.m, c.wasLive = m, s.live(m, now)
	if c.same && q.Got > 0 && q.Got == m.n {
		m.gotN, m.gotAt, m.gotLag = m.n, m.at, m.lag
		if m.renewed {
			m.good = m.at
		}
	}
	m.joined = m.joined || c.same
	if c.same && !m.heard {
		m.heard = s.heardSince(q.Host, m, now)
	}
	if c.same && m.returning {
		m.returning = s.countedBy(q.Host, m, now)
	}

	quarantined := now < s.settleAt
	late := s.late(m, now)
	c.settled = !quarantined
	if c.same && (!m.heard && !m.claimed || m.returning || late) {
		c.settled = false
	}
	c.claims = c.same && q.Claim && quarantined && (!m.claimed || m.claiming) && !s.params.Strict
	m.n, m.at, m.lag = q.N, now, c.lag
	if c.claims {
		m.claimed, m.claiming = true, q.More
		s.claimGone(q.Gone, now)
	}
	// Leases that are not claimed yet must end before the epoch is settled.
	m.renewed = c.same && !m.resync && (!q.Claim || m.claimed && !m.claiming)
	c.knownByOthers, c.knewBefore = s.knownByAll(q.Host, now), m.version
	if c.same {
		m.version = q.Known
	}
	m.digest = q.Digest
	if q.Info != "" {
		m.info = q.Info
	}
}

// takeBack makes a host one that is not gone, and reports whether others may count its part as
// theirs. A host that is new takes the place of one that is gone, and so does one for which there is
// no other place: those that are away have theirs.
func (s *state) takeBack(host string, left bool, now Time) bool {
	if s.members[host] != nil {
		return s.members[host].returning
	}
	if s.isGone(host) {
		delete(s.gone, host)
		return true
	}
	delete(s.gone, host) // or it was replaced
	if s.countGone() == 0 || !left && s.places(now) < s.params.Hosts {
		return false
	}
	s.replaceFirst()
	return true
}

// replaceFirst gives the place of a host that is gone to another one.
func (s *state) replaceFirst() {
	was := slices.DeleteFunc(s.goneList(), func(g Gone) bool { return !g.Replaced() })
	if len(was) >= s.params.Hosts {
		delete(s.gone, was[0].Host)
	}
	for _, g := range s.goneList() {
		if !g.Replaced() {
			s.gone[g.Host] = g.replaced()
			return
		}
	}
}

// claimGone remembers who was gone in the epoch before.
func (s *state) claimGone(gone []Gone, now Time) {
	for _, g := range gone {
		switch _, known := s.gone[g.Host]; {
		case g.Replaced():
			if s.members[g.Host] == nil && !known && len(s.gone) < 2*s.params.Hosts {
				s.gone[g.Host] = g
			}
		case s.members[g.Host] == nil && s.places(now) < s.params.Hosts || mutant("gone-anyway"):
			s.gone[g.Host] = g
		}
	}
}

// late reports whether m may have a lease of another ledger that has not ended.
func (s *state) late(m *member, now Time) bool {
	return s.params.Strict && now < m.born+s.params.expiry() && !mutant("strict-at-once")
}

// heardSince reports whether all hosts that were counted when m joined have called since.
func (s *state) heardSince(host string, m *member, now Time) bool {
	for name, o := range s.members {
		if name != host && o.at < m.born && s.live(o, now) {
			return false
		}
	}
	return true
}

// countedBy reports whether a host may count the part of m, which was gone, as its own.
func (s *state) countedBy(host string, m *member, now Time) bool {
	for name, o := range s.members {
		if name != host && now < o.known && o.gotAt < m.born {
			return true
		}
	}
	return false
}

// read takes in what the host says about buckets.
func (c *call) read() {
	s, m := c.state, c.m
	floor := s.params.Floor()
	for i := range c.q.Items {
		it := &c.q.Items[i]
		b := s.buckets[it.Key]
		if b == nil {
			if it.Want == 0 && (it.Has == 0 || !c.claims && !IsSlots(it.Key)) {
				continue
			}
			if len(s.buckets) >= maxBuckets {
				c.untold = c.untold || IsSlots(it.Key) && it.Has > 0
				continue
			}
			s.version++
			s.log.addHot(it.Key, s.version)
			b = &bucket{
				slots: IsSlots(it.Key), tickets: IsTickets(it.Key), version: s.version, wanted: c.now, holders: map[string]*holder{},
			}
			s.buckets[it.Key] = b
		}
		s.purge(b, c.now)
		h := b.holders[c.q.Host]
		if h == nil {
			h = &holder{generation: m.generation}
			b.holders[c.q.Host] = h
		}
		has, want, weight := c.has(b, h, it), max(0, min(it.Want, Whole)), max(1, min(it.Weight, MaxWeight))
		free := has < h.parts || want < h.want || weight < h.weight
		h.parts, h.want, h.weight = has, want, weight
		if want > 0 && b.tickets || has > floor || want > floor {
			b.wanted = c.now
		}
		switch {
		case b.tickets:
			h.at, h.turn = c.now, max(h.turn, b.turn)
		case free:
			s.markShort(it.Key, b, c.q.Host)
		}
		switch {
		case b.tickets:
		case it.Has == 0 && want == 0: // like a host that has said nothing
			delete(b.holders, c.q.Host)
		default:
			m.mark(it.Key)
		}
		s.demote(it.Key, b, c.now)
	}
}

// has returns what h counts to have of b, according to an item.
func (c *call) has(b *bucket, h *holder, it *Item) int64 {
	switch {
	case b.tickets:
		return 0
	case b.slots && c.same:
		return it.Has
	case c.claims:
		return max(0, min(it.Has, Whole-b.others(c.q.Host)))
	case !c.same || c.m.resync:
		return 0
	case it.Has <= h.parts:
		return it.Has
	}
	// What was a floor becomes parts when a host learns that the bucket is hot, if others count it, or may still do so:
	// they know of more live hosts than there are.
	may := h.parts
	if (c.wasLive || c.now < c.m.known && !mutant("floor-only-counted") || mutant("floor-uncounted")) && c.knewBefore < b.version && b.version <= c.q.Known {
		may = c.params.Floor()
	}
	if mutant("believe-has") {
		return it.Has
	}
	c.cut = c.cut || it.Has > may
	return min(it.Has, may)
}

// mark makes the next reply to m have a grant of a bucket.
func (m *member) mark(key string) {
	if m.marked == nil {
		m.marked = map[string]struct{}{}
	}
	m.marked[key] = struct{}{}
}

// markShort makes the next replies to hosts that should have more of b, but for one, say so.
func (s *state) markShort(key string, b *bucket, but string) {
	level := b.level()
	for name, h := range b.holders {
		if name != but && h.parts < level.target(h) {
			s.members[name].mark(key)
		}
	}
}

// purge removes what hosts have that is void.
func (s *state) purge(b *bucket, now Time) {
	maps.DeleteFunc(b.holders, func(name string, h *holder) bool {
		m := s.members[name]
		if b.slots && m != nil && s.expired(m, now) {
			h.want = min(h.want, h.parts) // it cannot take more
		}
		return m == nil || h.generation != m.generation || (!b.slots || mutant("slots-expire")) && s.expired(m, now)
	})
}

// others returns what hosts but one have of b.
func (b *bucket) others(but string) (parts int64) {
	for name, h := range b.holders {
		if name != but {
			parts += h.parts
		}
	}
	return parts
}

// count decides whether others count the caller, and whether the epoch is settled.
func (c *call) count() {
	s, m, q := c.state, c.m, c.q
	quarantined := c.now < s.settleAt
	late := s.late(m, c.now)
	switch {
	case !c.same || !q.Leased && !mutant("count-unleased") || m.resync:
		m.counted = false
	case c.wasLive:
	case c.cut && !mutant("count-cut") || late || m.returning:
		m.counted = false
	case m.claimed && !m.claiming && quarantined:
		m.counted = true
	default:
		m.counted = c.settled && (q.Known >= c.knownByOthers || mutant("count-ignorant"))
	}
	if c.same {
		m.over = q.Over
		m.told = !m.resync && (m.told || q.Told && !c.untold)
	}
	if quarantined {
		spoken := s.countGone()
		for _, o := range s.members {
			// Who has claimed must know, too, how many are live in this epoch.
			if o.claimed && !o.claiming && (s.live(o, c.now) || mutant("spoken-uncounted")) || o.over {
				spoken++
			}
		}
		if spoken >= s.params.Hosts {
			s.settleAt = c.now // nobody is left who could have what is not known
		}
	}
	if s.live(m, c.now) {
		m.known = m.good + 2*s.params.Lease + knowledgeLag
		if mutant("known-while-live") {
			m.known = m.good + s.params.Lease
		}
	}
}

// reply builds the reply to the call.
func (c *call) reply() *Reply {
	s, m := c.state, c.m
	r := &Reply{
		N: c.q.N, Start: c.q.Start, Epoch: s.epoch,
		Live: s.countLive(c.now), Counted: s.live(m, c.now), Settled: c.settled, Resync: m.resync, Renew: m.renewed,
		Version: s.version, Gone: s.goneList(), AskInfo: m.info == "",
	}
	for _, o := range s.members {
		if o.digest != m.digest {
			r.Differ++
		}
	}
	r.Events = s.log.after(m.version)
	r.AllTold = s.allTold(c.now)
	known := s.knownByAll("", c.now)
	for _, key := range slices.Sorted(maps.Keys(m.marked)) {
		b := s.buckets[key]
		if b == nil {
			continue
		}
		if s.purge(b, c.now); b.holders[c.q.Host] == nil {
			continue
		}
		lend := (c.settled || mutant("lend-unsettled")) && (b.version <= known || mutant("lend-before-known"))
		if b.slots {
			lend = r.AllTold && b.version <= m.version
		}
		r.Grants = append(r.Grants, s.grant(key, b, c.q.Host, lend))
	}
	m.marked = nil
	r.Sales = c.sellAll()
	return r
}

// grant gives a host its share of b: by weighted max-min fairness, as far as others have confirmed that
// they no longer use it. A decrease counts when the host has confirmed it, an increase at once.
func (s *state) grant(key string, b *bucket, host string, lend bool) Grant {
	h := b.holders[host]
	level := b.level()
	g := Grant{Key: key, Parts: level.target(h), Tight: level.limited}
	switch {
	case g.Parts <= h.parts:
		if mutant("decrease-at-once") {
			h.parts = g.Parts
		}
		return g
	case !lend:
		g.Parts, g.Short = h.parts, true
	default:
		free := Whole - b.others(host)
		if b.slots {
			free = Whole - s.othersSlots(b, host)
		} else if h.parts > s.params.Floor()/4 {
			free -= spare * int64(max(0, s.params.Hosts-len(b.holders))) / int64(s.params.Hosts)
		}
		target := g.Parts
		g.Parts = min(target, max(h.parts, free))
		if mutant("lend-in-use") {
			g.Parts = target
		}
		g.Short = g.Parts < target-Whole/256
	}
	if !mutant("increase-unbooked") {
		h.parts = g.Parts
	}
	if g.Short {
		for name, o := range b.holders {
			if name != host && o.parts > level.target(o) {
				s.members[name].mark(key)
			}
		}
	}
	return g
}
