package shaper

import (
	"math/bits"

	"shaperd.dev/shaperd/leaky"
)

// Decision is the outcome for a unit.
type Decision struct {
	Verdict Verdict
	Reason  Reason
	Depart  leaky.Time // departure time, not before now
	Limit   int        // limit that delayed the unit longest, or refused it; -1 if it passed
}

// Decide offers a unit of f, routed as r by p, to the limits of set: either all of them
// admit it, or the first one that does not refuses it and none is charged. The unit is
// counted under every limit that decided on it. All limits charge it for now, as it passes
// at once if each would let it leave within its max_delay (policing). Depart is the
// latest of their departure times.
//
// Limits that enforce and limits that observe must not be mixed in one call, as
// the latter refuse nothing.
func (s *Shaper) Decide(p *Policy, f *Flow, r Route, set Set, bytes, packets uint64, now leaky.Time) Decision {
	return s.decide(p, f, r, set, bytes, packets, now, false)
}

// Shape is [Shaper.Decide] for a unit that is held until the latest departure time of its
// limits: each bucket is charged for that instant.
//
// Limits with calendars, which Decide treats like any other, are booked after the departure
// time of the other limits is known, one after another until there is an instant at which
// all have room. The unit waits no longer than max_delay for any of them, and no longer
// than [Policy.MaxTotalDelay] in total.
func (s *Shaper) Shape(p *Policy, f *Flow, r Route, set Set, bytes, packets uint64, now leaky.Time) Decision {
	return s.decide(p, f, r, set, bytes, packets, now, true)
}

// unit is the state of a decision on one unit.
type unit struct {
	policy         *Policy
	flow           *Flow
	route          Route
	set            Set // limits that pace the unit
	bytes, packets uint64
	now            leaky.Time
	shaped         bool // the unit is held until its departure time
	calendars      Set  // limits of set with calendars, if shaped

	ready        leaky.Time // departure time by limits without calendars
	depart       leaky.Time
	longestDelay leaky.Time // the longest delay by one limit
	slowestLimit int        // the limit with that delay
	delayed      Set        // limits that delay the unit
}

// addDelay records that limit i delays the unit from ready to depart.
func (u *unit) addDelay(i int, depart, ready leaky.Time) {
	if depart <= ready {
		return
	}
	u.delayed |= 1 << i
	if depart-ready > u.longestDelay {
		u.longestDelay, u.slowestLimit = depart-ready, i
	}
	u.depart = max(u.depart, depart)
}

func (s *Shaper) decide(p *Policy, f *Flow, r Route, set Set, bytes, packets uint64, now leaky.Time, hold bool) Decision {
	if blocks := set & p.blocks; blocks != 0 {
		d := Decision{Verdict: Refuse, Reason: Blocked, Depart: now, Limit: bits.TrailingZeros64(uint64(blocks))}
		p.states[d.Limit].count(Refuse, Blocked, bytes, packets)
		return d
	}
	u := unit{policy: p, flow: f, route: r, set: set & p.paced, bytes: bytes, packets: packets, now: now, shaped: hold, depart: now, slowestLimit: -1}
	if hold {
		u.calendars = u.set & p.calendars
	}
	s.mu.Lock()
	refused, depart := s.checkBuckets(&u)
	if refused < 0 {
		refused, depart = s.bookCalendars(&u)
	}
	if refused < 0 {
		s.chargeBuckets(&u)
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
	if u.slowestLimit < 0 {
		return Decision{Depart: now, Limit: -1}
	}
	return Decision{Verdict: Delay, Reason: ByRate, Depart: u.depart, Limit: u.slowestLimit}
}

// checkBuckets checks the limits without calendars and charges nothing. It returns the limit
// that refuses the unit and its departure time, or -1.
func (s *Shaper) checkBuckets(u *unit) (refused int, depart leaky.Time) {
	p := u.policy
	for _, set := range [...]Set{u.set &^ p.calendars, u.set & p.calendars &^ u.calendars} {
		for left := set; left != 0; left &= left - 1 {
			i := bits.TrailingZeros64(uint64(left))
			key := p.Key(i, u.flow, u.route)
			shape := p.shapeAt(i, &key, u.route)
			slot := s.table.lookupOrInsert(&key, s.table.probe(&key), u.now)
			depart := slot.bucket.Depart(shape, u.now)
			if depart-u.now > shape.MaxDelay {
				return i, depart
			}
			u.addDelay(i, depart, u.now)
		}
	}
	u.ready = u.depart
	return -1, 0
}

// maxRounds bounds the search for an instant at which all calendars have room.
const maxRounds = 8

// bookCalendars books the unit in all calendars, at the first instant from u.depart on at
// which all of them have room. It returns the limit that refuses the unit and its departure
// time, or -1.
func (s *Shaper) bookCalendars(u *unit) (refused int, depart leaky.Time) {
	set := u.calendars
	if set == 0 {
		return -1, 0
	}
	var booked [2]Set
	for range maxRounds {
		retry := false
		for left := set; left != 0; left &= left - 1 {
			i := bits.TrailingZeros64(uint64(left))
			c := u.policy.calendarsFor(i)
			latest := min(u.ready.Add(c.shape.MaxDelay), u.now.Add(u.policy.maxTotalDelay[i]))
			costs, bursts := c.costsAndBursts(u.bytes, u.packets)
			for m := range c.calendar {
				if c.isUnlimited(m) {
					continue
				}
				booking, slots := &s.bookings[i][m], &c.slots[m]
				ready := u.depart
				if booked[m]&(1<<i) != 0 {
					if booking.Slot >= uint64(ready>>slots.Shift) {
						continue
					}
					c.calendar[m].Cancel(slots, booking)
					booked[m] &^= 1 << i
				}
				var ok bool
				*booking, ok = c.calendar[m].Book(slots, costs[m], bursts[m], ready, latest, u.now)
				if !ok {
					s.cancelBookings(u, booked)
					return i, booking.Depart
				}
				booked[m] |= 1 << i
				if booking.Depart > ready {
					retry = retry || booked[0]|booked[1] != 1<<i || booked[0]&booked[1] != 0
				}
				u.addDelay(i, booking.Depart, ready)
			}
		}
		if !retry {
			return -1, 0
		}
	}
	s.cancelBookings(u, booked)
	return bits.TrailingZeros64(uint64(set)), u.depart
}

// cancelBookings cancels the bookings of the unit.
func (s *Shaper) cancelBookings(u *unit, booked [2]Set) {
	for m := range booked {
		for i := range booked[m].All {
			c := u.policy.states[i].calendars
			c.calendar[m].Cancel(&c.slots[m], &s.bookings[i][m])
		}
	}
}

// chargeBuckets charges the limits without calendars.
func (s *Shaper) chargeBuckets(u *unit) {
	p := u.policy
	for left := u.set &^ u.calendars; left != 0; left &= left - 1 {
		i := bits.TrailingZeros64(uint64(left))
		key := p.Key(i, u.flow, u.route)
		at := u.depart
		if !u.shaped || p.chargedOnArrival&(1<<i) != 0 {
			at = u.now
		}
		s.table.lookupOrInsert(&key, s.table.probe(&key), u.now).bucket.Charge(p.shapeAt(i, &key, u.route), u.bytes, u.packets, at)
	}
}

// calendars replace the bucket of a limit. Arrays have an element for bytes and one for
// packets.
type calendars struct {
	shape    leaky.Shape
	slots    [2]leaky.Slots
	calendar [2]leaky.Calendar
}

// calendarsFor returns the calendars of limit i. It creates them if p is not the current
// policy and they are gone.
func (p *Policy) calendarsFor(i int) *calendars {
	st := p.states[i]
	if st.calendars == nil {
		st.calendars = &calendars{shape: p.shapes[i], slots: p.slots[i]}
	}
	return st.calendars
}

func (c *calendars) isUnlimited(m int) bool {
	return [2]leaky.Rate{c.shape.Bytes, c.shape.Packets}[m].Unlimited()
}

func (c *calendars) costsAndBursts(bytes, packets uint64) (costs, bursts [2]leaky.Time) {
	costs[0], costs[1] = c.shape.Cost(bytes, packets)
	return costs, [2]leaky.Time{c.shape.BytesBurst, c.shape.PacketsBurst}
}

// migrateCalendars moves the backlog of limit i of next from its bucket to its calendars,
// or from its calendars to its bucket or to new calendars.
func (s *Shaper) migrateCalendars(next *Policy, i int, state *LimitState, now leaky.Time) {
	is := next.calendars&(1<<i) != 0
	was := state.calendars
	if !is && was == nil || is && was != nil && was.shape == next.shapes[i] && was.slots == next.slots[i] {
		return
	}
	key := Key{Limit: state.ID} // the only bucket of a limit without key fields
	var bucket leaky.Bucket
	if slot := s.table.lookup(&key, s.table.probe(&key)); slot != nil {
		bucket = slot.bucket
	}
	if was != nil {
		var backlog leaky.Bucket
		backlog.SetDrainTimes(was.calendar[0].Backlog(&was.slots[0], now), was.calendar[1].Backlog(&was.slots[1], now), now)
		backlog.Rescale(&was.shape, &next.shapes[i], now)
		bucket.Merge(backlog)
		state.calendars = nil
	}
	if !is {
		if !bucket.Drained(now) {
			s.table.lookupOrInsert(&key, s.table.probe(&key), now).bucket.Merge(bucket)
		}
		return
	}
	state.calendars = &calendars{shape: next.shapes[i], slots: next.slots[i]}
	bytesTime, packetsTime := bucket.DrainTimes(now)
	state.calendars.calendar[0].BlockUntil(now.Add(bytesTime))
	state.calendars.calendar[1].BlockUntil(now.Add(packetsTime))
}
