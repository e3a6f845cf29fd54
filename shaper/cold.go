package shaper

import "shaperd.dev/shaperd/leaky"

// learn returns what the buckets of a limit have in common, at first as a policy has it that is not
// current yet. If the limit is shared they have no parts, and so no credit: it may have been used
// before a restart.
func (t *table) learn(id uint32, shape *leaky.Shape, shared bool, now leaky.Time) *tableLimit {
	l := t.limit(id)
	if l.whole != nil {
		return l
	}
	l.whole, l.shared, l.share = shape, shared, leaky.NewShare(shape, Whole, Whole, now)
	if shared {
		none := leaky.NewShare(shape, 0, Whole, now)
		l.fresh.Reshare(&l.share, &none, now)
		l.share = none
	}
	return l
}

// planChange records in changes how the buckets of limit i change, as p has it. enforce is set if it
// only observed before.
func (s *Shaper) planChange(changes map[uint32]shareChange, p *Policy, i int, enforce bool, now leaky.Time) {
	shared, parts := p.limits[i].Shared, uint32(Whole)
	if shared {
		parts = s.coldParts
	}
	plan := func(id uint32, shape *leaky.Shape, enforce, newConns bool) {
		l := s.table.learn(id, shape, shared, now)
		next := leaky.NewShare(shape, parts, Whole, now)
		var keyed *keyedShapes
		if p.tiered&(1<<i) != 0 {
			keyed = &keyedShapes{p, i, newConns}
		}
		if l.share.Parts != parts || l.share.Shape != next.Shape || l.keyed != nil || keyed != nil || enforce {
			changes[id] = shareChange{l.share, next, l.keyed, keyed, enforce}
		}
		l.whole, l.shared, l.keyed = shape, shared, keyed
	}
	plan(p.states[i].ID, &p.shapes[i], enforce, false)
	plan(p.states[i].ID+1, &p.newConns[i], false, true)
}

// SetCold changes the parts that a cold bucket of a shared limit has from now on, initially 0. Like
// Swap it takes time in proportion to the number of limits, and leaves the buckets to Migrate.
//
// In the table all buckets of shared limits are cold. Those of hot keys must be checked out.
func (s *Shaper) SetCold(parts uint32, now leaky.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if parts == s.coldParts {
		return
	}
	s.coldParts, s.coldSince = parts, now
	changes, p := map[uint32]shareChange{}, s.policy.Load()
	for i := range p.shared.All {
		s.planChange(changes, p, i, false, now)
	}
	s.table.startMigration(changes, now)
}

// CheckOutShared is CheckOut for a key of a shared limit, whose bucket has another share from now on.
func (s *Shaper) CheckOutShared(k Key, to *leaky.Share, now leaky.Time) leaky.Bucket {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.table.remove(&k, s.table.probe(&k), now)
	b.Reshare(&s.table.limit(k.Limit).share, to, now)
	return b
}

// CheckInShared is CheckIn for a bucket that had another share than cold ones.
func (s *Shaper) CheckInShared(k Key, b leaky.Bucket, from *leaky.Share, now leaky.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	to := &s.table.limit(k.Limit).share
	b.Reshare(from, to, now)
	if to.Parts == 0 {
		now = min(now, s.coldSince) // it stands still
	}
	if !b.Drained(now) {
		s.table.add(&k, b, now)
	}
}
