package leaky

import "math/bits"

// Slots is how a [Calendar] divides time.
type Slots struct {
	Shift uint8 // a slot is 2^Shift ticks wide
	Unit  Time  // cost of an ordinary unit: those of up to so much keep their order
}

const (
	// CalendarSlots is how many slots a Calendar has.
	CalendarSlots = 1 << calendarBits
	calendarBits  = 11

	minShift = 23  // slots of 131 us
	maxSpan  = 256 // slots that one unit may be spread over
	tries    = 64  // slots, or runs of closed ones, that are looked at for a unit
	beyond   = 1<<64 - 1
)

// NewSlots returns the slots for a rate of which an ordinary unit costs unit, of which a
// small part costs part, and which reserves up to horizon ahead.
func NewSlots(unit, part, horizon Time) Slots {
	s := Slots{Shift: minShift, Unit: unit}
	for s.Shift < 60 && (s.Width() < part || s.Width() < horizon/(CalendarSlots-maxSpan)+1) {
		s.Shift++
	}
	return s
}

// Width returns how wide a slot is.
func (s *Slots) Width() Time { return 1 << s.Shift }

// span returns over how many slots a unit may be spread: an ordinary one over eight times its
// cost, so that what lies scattered about is of use.
func (s *Slots) span(cost Time) uint64 {
	return 2*uint64(cost>>s.Shift) + 6*uint64(s.Unit>>s.Shift) + 2
}

// Slack returns by how much a calendar may exceed rate × time + burst, as time, where units
// cost largest at most: two slots at the ends of an interval, and what the last units in it
// take behind it.
func (s *Slots) Slack(largest Time) Time {
	return Time(s.span(max(largest, s.Unit))+1) << s.Shift
}

// Calendar is a leaky bucket whose units need not leave in the order in which they come: one
// that may leave at some instant to come takes its time there, and leaves what is before to
// others. For units that come in the order in which they may leave it does what a [Bucket]
// does, to the tick.
//
// It is a ring of slots, each a word of the slot's number and how much of it is taken. A
// unit leaves in the first slot from which on there is room for it within its span, and
// takes what is free from there on. So what leaves in an interval took its time in that
// interval, or in a slot before or a span behind.
//
// Where there is no room for an ordinary unit a slot is closed, and never looked at again:
// room only shrinks. What is in front of the hint is closed as well.
type Calendar struct {
	from   Time // all before is taken
	top    Time // nothing behind is taken
	hint   Time // where the first slot begins that may be open
	slot   [CalendarSlots]uint64
	closed [CalendarSlots / 32]uint64 // 32 numbers of such slots, and a bit for each
}

// Begin has all before from be taken.
func (c *Calendar) Begin(from Time) { c.from = from }

// Booking is what a unit took of a calendar.
type Booking struct {
	Depart Time    // when it may leave
	Slot   uint64  // the number of the first slot
	Taken  [4]Time // of the first slots
}

// taken returns how much of slot k is taken, where all before base is.
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

// room returns how much is free from slot k on, as far as a unit may be spread, and cost at
// most; 0 when nothing is free in slot k.
func (c *Calendar) room(s *Slots, k uint64, cost, base Time) (room Time) {
	for j := k; j < k+s.span(cost) && room < cost; j++ {
		room += s.Width() - c.taken(s, j, base)
		if room == 0 {
			return 0
		}
	}
	return min(room, cost)
}

// open returns the first slot from k on that is not closed, and after how many words.
func (c *Calendar) open(k uint64) (uint64, bool) {
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

func (c *Calendar) close(k uint64) {
	word := &c.closed[k/32%uint64(len(c.closed))]
	if *word>>32 != k/32&(1<<32-1) {
		*word = k / 32 << 32
	}
	*word |= 1 << (k % 32)
}

// Take books a unit that may leave at ready, not before now, and returns what it took. When it
// could leave after latest alone, or beyond what a calendar reaches, it returns false and
// when that is, and takes nothing.
func (c *Calendar) Take(s *Slots, cost, burst, ready, latest, now Time) (b Booking, ok bool) {
	base := max(now, c.from)
	need := max(cost, s.Unit)
	k, giant := uint64(beyond), s.span(need) > maxSpan
	if !giant {
		k = c.find(s, need, max(ready, base), base)
	}
	if k > uint64(now>>s.Shift)+CalendarSlots-maxSpan {
		// Behind all that is taken; and nothing goes before a giant any more.
		at := max(ready, base, c.top)
		b = Booking{Depart: max(ready, at.Sub(burst)), Slot: uint64(at >> s.Shift)}
		if !giant || b.Depart > latest {
			return b, false
		}
		c.from = at.Add(cost)
		return b, true
	}
	b.Depart = max(ready, (Time(k)<<s.Shift + c.taken(s, k, base)).Sub(burst))
	if b.Depart > latest {
		return b, false
	}
	c.book(s, &b, k, cost, base)
	return b, true
}

// find returns the first slot from an instant on that has room for need, or one beyond reach.
func (c *Calendar) find(s *Slots, need, from, base Time) uint64 {
	k := uint64(from >> s.Shift)
	hint := uint64(c.hint >> s.Shift)
	first := k <= hint
	k = max(k, hint)
	for range tries {
		var found bool
		if k, found = c.open(k); !found {
			continue
		}
		room := c.room(s, k, need, base)
		if room == need {
			if first && need == s.Unit {
				c.hint = Time(k) << s.Shift
			}
			return k
		}
		if room == 0 || need == s.Unit {
			c.close(k)
			k++
		} else {
			k += uint64(need>>s.Shift)/4 + 1
		}
	}
	return beyond
}

// book has a unit take what there is from slot k on.
func (c *Calendar) book(s *Slots, b *Booking, k uint64, cost, base Time) {
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
		c.top = max(c.top, Time(j)<<s.Shift+taken+part)
	}
}

// Return takes back what a booking took of its first slots, and opens them again. What a
// train took behind them is lost.
func (c *Calendar) Return(s *Slots, b *Booking) {
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

// Backlog returns how much is taken from now on, as time.
func (c *Calendar) Backlog(s *Slots, now Time) Time {
	base := max(now, c.from)
	backlog := c.from.Sub(now)
	for k := uint64(base >> s.Shift); k < uint64(base>>s.Shift)+CalendarSlots; k++ {
		taken := c.taken(s, k, base)
		if k == uint64(base>>s.Shift) {
			taken -= base & (s.Width() - 1)
		}
		backlog += taken
	}
	return backlog
}
