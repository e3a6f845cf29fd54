// Owner: the loop's thread.

package conn

import (
	"cmp"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// maxYields bounds how many connections end in one round, which is twice a second.
const maxYields = 64

// slotUser is a source with slots of a gate.
type slotUser struct {
	key  memberKey
	held int
	idle []*session // that may end, the longest idle first
}

// yieldIdle ends idle connections for the sources that wait at gt, which has no free slot: the longest idle one of the
// source that holds the most, as long as the one that waits then holds no more than that.
func (p *worker) yieldIdle(gt *gate, now leaky.Time) {
	after := leaky.FromDuration(gt.limit.YieldAfter)
	if after == 0 || gt.limit.Observe || !gt.atCap(now) || gt.reserved.queue != nil {
		return
	}
	users := p.slotUsersOf(gt, after)
	for range maxYields {
		if !gt.atCap(now) { // who waits here next waits for something else, too
			return
		}
		from, to := gt.pairToYield(users)
		if from == nil {
			return
		}
		s := from.idle[0]
		from.idle = from.idle[1:]
		if !s.mayYield() { // the end of another one has ended it
			continue
		}
		from.held--
		to.held++
		s.endGracefully(shaper.Yielded, now)
	}
}

// slotUsersOf returns the sources that hold slots of gt, or wait there.
func (p *worker) slotUsersOf(gt *gate, after leaky.Time) (list []*slotUser) {
	byKey := map[memberKey]*slotUser{}
	of := func(key memberKey) *slotUser {
		h := byKey[key]
		if h == nil {
			h = &slotUser{key: key}
			byKey[key] = h
			list = append(list, h)
		}
		return h
	}
	for _, s := range p.sessions.all {
		if !slices.Contains(s.slots.held, gt) {
			continue
		}
		m := s.membersAt(gt)
		h := of(m.keys[0])
		h.held++
		if s.mayYield() && p.loop.hearing.until.Sub(s.activity.lastActive) >= after {
			h.idle = append(h.idle, s)
		}
	}
	for src := range gt.waiters() {
		of(src.key)
	}
	for _, h := range list {
		slices.SortFunc(h.idle, func(a, b *session) int { return cmp.Compare(a.activity.lastActive, b.activity.lastActive) })
	}
	return list
}

// pairToYield returns the source that holds the most, of which a connection may end, and one that waits here and holds
// the least, or nil if it would then hold more than the other. The slot would go to one of those whose turn is next: where another class
// goes first, its waiters would have it, and the connection would have ended for nothing.
func (gt *gate) pairToYield(users []*slotUser) (from, to *slotUser) {
	next := gt.first()
	if next == nil {
		return nil, nil
	}
	owed, priority := gt.owed(next.key.class), priorityOf(next.ticket())
	for _, u := range users {
		if len(u.idle) > 0 && (from == nil || u.held > from.held) && !gt.takesBack(u.key.class) {
			from = u
		}
		src := gt.sources[u.key]
		if src != nil && src.waiting > 0 && (to == nil || u.held < to.held) && gt.owed(u.key.class) == owed && priorityOf(src.ticket()) == priority {
			to = u
		}
	}
	if from != nil && to != nil && from.held >= to.held+2 {
		return from, to
	}
	for i := range gt.lines { // a class that has just its part shares it
		l := &gt.lines[i]
		if !gt.takesBack(l.class) || owed && l.class != next.key.class {
			continue
		}
		from, to = nil, nil
		for _, u := range users {
			if u.key.class != l.class {
				continue
			}
			if len(u.idle) > 0 && (from == nil || u.held > from.held) {
				from = u
			}
			if src := gt.sources[u.key]; src != nil && src.waiting > 0 && (to == nil || u.held < to.held) {
				to = u
			}
		}
		if from != nil && to != nil && from.held >= to.held+2 {
			return from, to
		}
	}
	return nil, nil
}

// takesBack reports whether a class, which waits here, would be owed the slot of a connection of its own that ends.
func (gt *gate) takesBack(class *shaper.ClassState) bool {
	l := gt.findLine(class)
	return l != nil && l.reserved > 0 && len(l.queued) > 0 && l.inFlight <= gt.slots*l.reserved/100
}

// mayYield reports whether s is between turns: nothing is on its way, and the downstream owes no answer.
func (s *session) mayYield() bool {
	answered := s.turns.askedAt == 0 || !s.turns.question && s.turns.firstByte == 0
	return s.stage == stageRelaying && answered && !s.up.dstShut && !s.down.dstShut &&
		!s.up.pending() && !s.down.pending() && !s.up.unit.queued && !s.down.unit.queued
}
