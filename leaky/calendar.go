package leaky

import "math/bits"

// Slots describes the time slots of a [Calendar].
type Slots struct {
	Shift uint8 // log2 of a slot's width in ticks
	Unit  Time  // cost of an ordinary unit; units of up to this cost keep their order
}

const (
	// CalendarSlots is the number of slots of a Calendar.
	CalendarSlots = 1 << calendarBits
	calendarBits  = 11

	minShift   = 23  // slots of 131 us
	maxSpan    = 256 // slots that one unit may be spread over
	maxProbes  = 64  // slots, or runs of closed ones, that are looked at for a unit
	outOfReach = 1<<64 - 1
)

// NewSlots returns the slots for a rate at which an ordinary unit costs unit, the smallest
// part that a slot must hold costs part, and units are booked up to horizon ahead.
func NewSlots(unit, part, horizon Time) Slots {
	s := Slots{Shift: minShift, Unit: unit}
	for s.Shift < 60 && (s.Width() < part || s.Width() < horizon/(CalendarSlots-maxSpan)+1) {
		s.Shift++
	}
	return s
}

// Width returns the width of a slot.
func (s *Slots) Width() Time { return 1 << s.Shift }

// span returns the number of slots that a unit may be spread over. For an ordinary unit
// they are eight times its cost, so that scattered free space is used.
func (s *Slots) span(cost Time) uint64 {
	return 2*uint64(cost>>s.Shift) + 6*uint64(s.Unit>>s.Shift) + 2
}

// Slack returns the most by which a calendar may exceed rate × time + burst, as time, if
// units cost at most largest: two slots at the ends of an interval, and the time after
// the interval that its last units were booked in.
func (s *Slots) Slack(largest Time) Time {
	return Time(s.span(max(largest, s.Unit))+1) << s.Shift
}

// Calendar is a leaky bucket whose units need not leave in order of arrival: a unit that
// may only leave at a later instant is booked there, and the time before that stays free
// for other units. For units that arrive in the order in which they may leave it equals
// a [Bucket], to the tick.
//
// It is a ring of slots, each a word of the slot's number and the time taken in it. A
// unit leaves in the first slot that has enough free time within the unit's span, and
// takes the free time from there on. So the units that leave in an interval took their
// time in that interval, in the slot before it, or within a span after it.
//
// A slot without room for an ordinary unit is closed and never searched again, since its
// free time only shrinks. All slots before the hint are closed too.
type Calendar struct {
	blockedUntil Time // end of the time that is taken without a booking
	end          Time // end of the last booking
	hint         Time // start of the first slot that may be open
	slot         [CalendarSlots]uint64
	closed       [CalendarSlots / 32]uint64 // for 32 slots each: their number / 32, and a bit per slot
}

// BlockUntil marks all time before until as taken.
func (c *Calendar) BlockUntil(until Time) { c.blockedUntil = until }

// Booking is the result of [Calendar.Book].
type Booking struct {
	Depart Time    // departure time
	Slot   uint64  // number of the first slot
	Taken  [4]Time // time taken in each of the first slots
}

// taken returns the time taken in slot k, if all time before base is taken.
func (c *Calendar) taken(s *Slots, k uint64, base Time) Time {
	var taken Time
	if word := c.slot[k%CalendarSlots]; word>>(s.Shift+1) == k {
		taken = Time(word) & (2*s.Width() - 1)
	}
	if uint64(base>>s.Shift) == k {
		taken = max(taken, base&(s.Width()-1))
	}
	return taken
}

// freeFrom returns the free time in the span of a unit that begins at slot k, at most
// cost. It is 0 if nothing is free in slot k itself.
func (c *Calendar) freeFrom(s *Slots, k uint64, cost, base Time) (free Time) {
	for j := k; j < k+s.span(cost) && free < cost; j++ {
		free += s.Width() - c.taken(s, j, base)
		if free == 0 {
			return 0
		}
	}
	return min(free, cost)
}

// nextOpen returns the first slot from k on that is not closed. If all slots in the word
// of k are closed it returns the first slot of the next word, and false.
func (c *Calendar) nextOpen(k uint64) (uint64, bool) {
	word := c.closed[k/32%uint64(len(c.closed))]
	if word>>32 != k/32&(1<<32-1) {
		return k, true
	}
	free := ^uint32(word) >> (k % 32)
	if free == 0 {
		return (k/32 + 1) * 32, false
	}
	return k + uint64(bits.TrailingZeros32(free)), true
}

// close excludes slot k from searches.
func (c *Calendar) close(k uint64) {
	word := &c.closed[k/32%uint64(len(c.closed))]
	if *word>>32 != k/32&(1<<32-1) {
		*word = k / 32 << 32
	}
	*word |= 1 << (k % 32)
}

// Book books a unit that may leave at ready, not before now. If its departure time would be
// after latest, or beyond the range of the calendar, it returns false and a booking with
// that time alone, and takes nothing.
func (c *Calendar) Book(s *Slots, cost, burst, ready, latest, now Time) (b Booking, ok bool) {
	base := max(now, c.blockedUntil)
	need := max(cost, s.Unit)
	k, giant := uint64(outOfReach), s.span(need) > maxSpan
	if !giant {
		k = c.findSlot(s, need, max(ready, base), base)
	}
	if k > uint64(now>>s.Shift)+CalendarSlots-maxSpan {
		// After the last booking; and nothing is booked before a giant any more.
		at := max(ready, base, c.end)
		b = Booking{Depart: max(ready, at.Sub(burst)), Slot: uint64(at >> s.Shift)}
		if !giant || b.Depart > latest {
			return b, false
		}
		c.blockedUntil = at.Add(cost)
		return b, true
	}
	b.Depart = max(ready, (Time(k)<<s.Shift + c.taken(s, k, base)).Sub(burst))
	if b.Depart > latest {
		return b, false
	}
	c.fill(s, &b, k, cost, base)
	return b, true
}

// findSlot returns the first slot from an instant on that has room for need, or outOfReach.
func (c *Calendar) findSlot(s *Slots, need, from, base Time) uint64 {
	k := uint64(from >> s.Shift)
	hint := uint64(c.hint >> s.Shift)
	first := k <= hint
	k = max(k, hint)
	for range maxProbes {
		var found bool
		if k, found = c.nextOpen(k); !found {
			continue
		}
		free := c.freeFrom(s, k, need, base)
		if free == need {
			if first && need == s.Unit {
				c.hint = Time(k) << s.Shift
			}
			return k
		}
		if free == 0 || need == s.Unit {
			c.close(k)
			k++
		} else {
			k += uint64(need>>s.Shift)/4 + 1
		}
	}
	return outOfReach
}

// fill takes the free time from slot k on for a unit.
func (c *Calendar) fill(s *Slots, b *Booking, k uint64, cost, base Time) {
	b.Slot = k
	for j := k; cost > 0; j++ {
		taken := c.taken(s, j, base)
		part := min(cost, s.Width()-taken)
		cost -= part
		if i := j - k; i < uint64(len(b.Taken)) {
			b.Taken[i] = part
		}
		c.slot[j%CalendarSlots] = j<<(s.Shift+1) | uint64(taken+part)
		if taken+part == s.Width() {
			c.close(j)
		}
		c.end = max(c.end, Time(j)<<s.Shift+taken+part)
	}
}

// Cancel frees the first slots of a booking and reopens them. The time that a train took
// beyond those is lost.
func (c *Calendar) Cancel(s *Slots, b *Booking) {
	for i, part := range b.Taken {
		k := b.Slot + uint64(i)
		word := &c.slot[k%CalendarSlots]
		if part == 0 || *word>>(s.Shift+1) != k {
			continue
		}
		*word -= uint64(part)
		if closed := &c.closed[k/32%uint64(len(c.closed))]; *closed>>32 == k/32&(1<<32-1) {
			*closed &^= 1 << (k % 32)
		}
		c.hint = min(c.hint, Time(k)<<s.Shift)
	}
}

// Backlog returns the time taken from now on.
func (c *Calendar) Backlog(s *Slots, now Time) Time {
	base := max(now, c.blockedUntil)
	backlog := c.blockedUntil.Sub(now)
	for k := uint64(base >> s.Shift); k < uint64(base>>s.Shift)+CalendarSlots; k++ {
		taken := c.taken(s, k, base)
		if k == uint64(base>>s.Shift) {
			taken -= base & (s.Width() - 1)
		}
		backlog += taken
	}
	return backlog
}
