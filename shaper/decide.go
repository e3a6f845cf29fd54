package shaper

import (
	"math/bits"

	"shaperd/leaky"
)

// Decision is what became of a unit.
type Decision struct {
	Verdict Verdict
	Reason  Reason
	Depart  leaky.Time // when it may leave, not before now
	Limit   int        // that delayed it longest, or refused it; -1 when it passed
}

// Decide offers a unit of f, routed as r by p, to the limits of set: all of them
// take it, or the first that does not refuses it and none is charged. It counts
// the unit under every limit that decided over it. All are charged for now: for a unit that
// passes at once, where each limit would let it within its max_delay. Depart is when the
// last of them would.
//
// Limits that enforce and limits that observe must not be offered together, as
// the latter refuse nothing.
func (s *Shaper) Decide(p *Policy, f *Flow, r Route, set Set, bytes, packets uint64, now leaky.Time) Decision {
	return s.decide(p, f, r, set, bytes, packets, now, false)
}

// Shape is [Shaper.Decide] for a unit that is held until the last of its limits lets it
// leave: each bucket is charged for that instant.
//
// Limits with calendars, of which Decide knows nothing, are asked when it is known when the
// others let the unit leave, one after another until there is an instant at which all have
// room. For none of them it waits longer than its max_delay, and in all no longer than
// [Policy.Longest].
func (s *Shaper) Shape(p *Policy, f *Flow, r Route, set Set, bytes, packets uint64, now leaky.Time) Decision {
	return s.decide(p, f, r, set, bytes, packets, now, true)
}

// unit is one that is decided over.
type unit struct {
	policy         *Policy
	flow           *Flow
	route          Route
	set            Set // of limits that pace it
	bytes, packets uint64
	now            leaky.Time
	hold           bool
	calendars      Set // limits of set that have them

	ready   leaky.Time // when limits without calendars let it leave
	depart  leaky.Time
	waits   leaky.Time // the longest that one limit makes it wait
	limit   int        // which
	delayed Set        // limits that make it wait
}

// weigh takes in that limit i lets the unit leave at depart, and others would at ready.
func (u *unit) weigh(i int, depart, ready leaky.Time) {
	if depart <= ready {
		return
	}
	u.delayed |= 1 << i
	if depart-ready > u.waits {
		u.waits, u.limit = depart-ready, i
	}
	u.depart = max(u.depart, depart)
}

func (s *Shaper) decide(p *Policy, f *Flow, r Route, set Set, bytes, packets uint64, now leaky.Time, hold bool) Decision {
	if blocks := set & p.blocks; blocks != 0 {
		d := Decision{Verdict: Refuse, Reason: Blocked, Depart: now, Limit: bits.TrailingZeros64(uint64(blocks))}
		p.states[d.Limit].count(Refuse, Blocked, bytes, packets)
		return d
	}
	u := unit{policy: p, flow: f, route: r, set: set & p.paced, bytes: bytes, packets: packets, now: now, hold: hold, depart: now, limit: -1}
	if hold {
		u.calendars = u.set & p.calendars
	}
	s.mu.Lock()
	refused, depart := s.ask(&u)
	if refused < 0 {
		refused, depart = s.book(&u)
	}
	if refused < 0 {
		s.charge(&u)
	}
	s.mu.Unlock()
	if refused >= 0 {
		p.states[refused].count(Refuse, QueueFull, bytes, packets)
		return Decision{Verdict: Refuse, Reason: QueueFull, Depart: depart, Limit: refused}
	}
	for left := set; left != 0; left &= left - 1 { // Set.All would cost 3 ns a limit
		i := bits.TrailingZeros64(uint64(left))
		if u.delayed&(1<<i) != 0 {
			p.states[i].count(Delay, ByRate, bytes, packets)
		} else {
			p.states[i].count(Pass, None, bytes, packets)
		}
	}
	if u.limit < 0 {
		return Decision{Depart: now, Limit: -1}
	}
	return Decision{Verdict: Delay, Reason: ByRate, Depart: u.depart, Limit: u.limit}
}

// ask asks the limits without calendars, and changes nothing. It returns the one that
// refuses the unit, and when that would let it leave, or -1.
func (s *Shaper) ask(u *unit) (refused int, depart leaky.Time) {
	p := u.policy
	for _, set := range [...]Set{u.set &^ p.calendars, u.set & p.calendars &^ u.calendars} {
		for left := set; left != 0; left &= left - 1 {
			i := bits.TrailingZeros64(uint64(left))
			shape := &p.shapes[i]
			key := p.Key(i, u.flow, u.route)
			depart := s.table.get(&key, s.table.place(&key), u.now).bucket.Depart(shape, u.now)
			if depart-u.now > shape.MaxDelay {
				return i, depart
			}
			u.weigh(i, depart, u.now)
		}
	}
	u.ready = u.depart
	return -1, 0
}

// rounds is how often limits are asked for an instant that suits all of them.
const rounds = 8

// book has the limits with calendars take the unit, at the first instant from u.depart on
// at which all of them have room. It returns the one that refuses it, and when that would
// let it leave, or -1.
func (s *Shaper) book(u *unit) (refused int, depart leaky.Time) {
	set := u.calendars
	if set == 0 {
		return -1, 0
	}
	var held [2]Set
	for range rounds {
		again := false
		for left := set; left != 0; left &= left - 1 {
			i := bits.TrailingZeros64(uint64(left))
			c := u.policy.calendarsOf(i)
			latest := min(u.ready.Add(c.shape.MaxDelay), u.now.Add(u.policy.longest[i]))
			costs, bursts := c.ofUnit(u.bytes, u.packets)
			for m := range c.meter {
				if c.unlimited(m) {
					continue
				}
				booking, slots := &s.booked[i][m], &c.slots[m]
				ready := u.depart
				if held[m]&(1<<i) != 0 {
					if booking.Slot >= uint64(ready>>slots.Shift) {
						continue
					}
					c.meter[m].Return(slots, booking)
					held[m] &^= 1 << i
				}
				var ok bool
				*booking, ok = c.meter[m].Take(slots, costs[m], bursts[m], ready, latest, u.now)
				if !ok {
					s.release(u, held)
					return i, booking.Depart
				}
				held[m] |= 1 << i
				if booking.Depart > ready {
					again = again || held[0]|held[1] != 1<<i || held[0]&held[1] != 0
				}
				u.weigh(i, booking.Depart, ready)
			}
		}
		if !again {
			return -1, 0
		}
	}
	s.release(u, held)
	return bits.TrailingZeros64(uint64(set)), u.depart
}

// release takes back what the unit booked.
func (s *Shaper) release(u *unit, held [2]Set) {
	for m := range held {
		for i := range held[m].All {
			c := u.policy.states[i].calendars
			c.meter[m].Return(&c.slots[m], &s.booked[i][m])
		}
	}
}

// charge charges the limits without calendars.
func (s *Shaper) charge(u *unit) {
	p := u.policy
	for left := u.set &^ u.calendars; left != 0; left &= left - 1 {
		i := bits.TrailingZeros64(uint64(left))
		key := p.Key(i, u.flow, u.route)
		at := u.depart
		if !u.hold || p.crossed&(1<<i) != 0 {
			at = u.now
		}
		s.table.get(&key, s.table.place(&key), u.now).bucket.Charge(&p.shapes[i], u.bytes, u.packets, at)
	}
}

// calendars are what a limit has instead of a bucket, of bytes and of packets.
type calendars struct {
	shape leaky.Shape
	slots [2]leaky.Slots
	meter [2]leaky.Calendar
}

// calendarsOf returns those of limit i, which a policy that is not in force any more may not
// have.
func (p *Policy) calendarsOf(i int) *calendars {
	st := p.states[i]
	if st.calendars == nil {
		st.calendars = &calendars{shape: p.shapes[i], slots: p.slots[i]}
	}
	return st.calendars
}

func (c *calendars) unlimited(m int) bool {
	return [2]leaky.Rate{c.shape.Bytes, c.shape.Packets}[m].Unlimited()
}

func (c *calendars) ofUnit(bytes, packets uint64) (costs, bursts [2]leaky.Time) {
	costs[0], costs[1] = c.shape.Cost(bytes, packets)
	return costs, [2]leaky.Time{c.shape.BytesBurst, c.shape.PacketsBurst}
}

// swapCalendars has limit i of next go on with what its bucket or its calendars owe.
func (s *Shaper) swapCalendars(next *Policy, i int, state *State, now leaky.Time) {
	is := next.calendars&(1<<i) != 0
	was := state.calendars
	if !is && was == nil || is && was != nil && was.shape == next.shapes[i] && was.slots == next.slots[i] {
		return
	}
	key := Key{Limit: state.ID} // of a limit of all
	var bucket leaky.Bucket
	if slot := s.table.find(&key, s.table.place(&key)); slot != nil {
		bucket = slot.bucket
	}
	if was != nil {
		var owed leaky.Bucket
		owed.Owe(was.meter[0].Backlog(&was.slots[0], now), was.meter[1].Backlog(&was.slots[1], now), now)
		owed.Rescale(&was.shape, &next.shapes[i], now)
		bucket.Merge(owed)
		state.calendars = nil
	}
	if !is {
		if !bucket.Drained(now) {
			s.table.get(&key, s.table.place(&key), now).bucket.Merge(bucket)
		}
		return
	}
	state.calendars = &calendars{shape: next.shapes[i], slots: next.slots[i]}
	ofBytes, ofPackets := bucket.Owes(now)
	state.calendars.meter[0].Begin(now.Add(ofBytes))
	state.calendars.meter[1].Begin(now.Add(ofPackets))
}
