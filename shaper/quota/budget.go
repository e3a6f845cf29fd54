package quota

import "time"

// Budget is what one key has used of a quota. It is not safe for concurrent use.
//
// Time is that of the wall clock, and does not go back: when the clock is set back, what is used counts in the latest slot
// that was reached until the clock has reached it again. So no slot is used twice.
type Budget struct {
	quota      Quota
	start, end time.Time // of the present slot
	used       []uint64  // by slot, the present one first
	before     uint64    // the sum of used but for the present one
	claimed    uint64    // of the present slot: it is in the file, so it may be used
	need       uint64    // what a unit needs at once
	asked      uint64    // what claimed becomes when what is being written is in the file; 0 if nothing is
	turn       uint64    // grows when what was used so far counts elsewhere, or no more
}

// New returns the budget of a key of which the file has r; the zero Record if it has nothing.
func New(q Quota, r Record, now time.Time) *Budget {
	b := &Budget{quota: q}
	b.used = make([]uint64, 1+q.Period.slots())
	b.start, b.end = q.Period.slot(now)
	b.adopt(&r)
	return b
}

// Change gives b another quota. What was used counts under the new one as well: in its slots if they are the same, and else
// all of it in the present slot, if any of it was used in that.
func (b *Budget) Change(q Quota, now time.Time) {
	if q == b.quota {
		return
	}
	b.Follow(now)
	was := *b
	b.quota, b.claimed, b.asked = q, 0, 0
	b.used, b.before = make([]uint64, 1+q.Period.slots()), 0
	b.start, b.end = q.Period.slot(now)
	b.turn++
	b.adopt(&Record{was.quota.Unit, was.quota.Period, was.start, was.used})
}

// adopt counts what r counts in b, which is new.
func (b *Budget) adopt(r *Record) {
	switch {
	case len(r.Used) == 0 || r.Unit != b.quota.Unit:
	case r.Period == b.quota.Period:
		now := b.start
		b.start, b.end = r.Period.slotBegun(r.Start) // which is later if the clock was set back
		copy(b.used, r.Used)
		b.sum()
		b.Follow(now)
	default: // what ended before the present slot began is not in it
		start := r.Start
		for _, n := range r.Used {
			if _, end := r.Period.slotBegun(start); end.After(b.start) {
				b.used[0] += n
			}
			start = start.Add(-r.Period.Rolling / rollingSlots)
		}
	}
	b.claimed = b.used[0]
}

// sum sets what was used in the slots before the present one.
func (b *Budget) sum() {
	b.before = 0
	for _, n := range b.used[1:] {
		b.before += n
	}
}

// Follow moves b to the slot of now, if that is later than the one it is in.
func (b *Budget) Follow(now time.Time) {
	if now.Before(b.end) {
		return
	}
	start, end := b.quota.Period.slot(now)
	if !start.After(b.start) { // on a day that has no midnight, slots do not begin where the ones before end
		return
	}
	if b.quota.Period.Calendar == NoCalendar {
		passed := int(min(start.Sub(b.start)/end.Sub(start), rollingSlots+1))
		copy(b.used[passed:], b.used[:len(b.used)-passed])
		clear(b.used[:passed])
		b.sum()
	} else {
		b.used[0] = 0
	}
	b.start, b.end = start, end
	b.claimed, b.asked = 0, 0
	b.turn++
}

// End is when the present slot ends, by the wall clock.
func (b *Budget) End() time.Time { return b.end }

// Quota returns the quota of b.
func (b *Budget) Quota() Quota { return b.quota }

// Used is what was used in the present period, which may be more than the amount of a quota that was changed.
func (b *Budget) Used() uint64 { return b.before + b.used[0] }

// Left is what is left of the quota.
func (b *Budget) Left() uint64 {
	if used := b.Used(); used < b.quota.Amount {
		return b.quota.Amount - used
	}
	return 0
}

// Ready is how much of what is left may be used now: what is claimed. More is, once what [Budget.Claim] returns is in the file.
func (b *Budget) Ready() uint64 {
	if b.claimed <= b.used[0] {
		return 0
	}
	return min(b.claimed-b.used[0], b.Left())
}

// Use counts n as used now. It returns what Return needs to undo that.
func (b *Budget) Use(n uint64) (turn uint64) {
	b.used[0] += n
	return b.turn
}

// Return undoes the use of n, which has not passed. It counts all the same if the slot in which it was used is over.
func (b *Budget) Return(n, turn uint64) {
	if turn == b.turn {
		b.used[0] -= min(n, b.used[0])
	}
}

// Need makes the next claim one of n at least: what needs that cannot pass in parts.
func (b *Budget) Need(n uint64) { b.need = max(b.need, n) }

// WantsClaim reports whether what is claimed will be used up soon, and more is left.
func (b *Budget) WantsClaim() bool {
	return b.asked == 0 && b.Left() > b.Ready() && b.Ready() < max(b.quota.claim()/2+1, b.need)
}

// Claim returns what is to be written to the file for the next claim. One claim is written at a time: until it is in the file, which
// Claimed is told, there is no other.
func (b *Budget) Claim() Record {
	most := max(b.quota.Amount, b.before) - b.before
	b.asked = max(min(b.used[0]+max(b.quota.claim(), b.need), most), b.claimed, b.used[0])
	b.need = 0
	return b.record(b.asked)
}

// Claimed is told that what Claim returned is in the file, or, if it is not, that it may be.
func (b *Budget) Claimed(r Record, written bool) {
	if b.asked == 0 || !r.Start.Equal(b.start) || r.Period != b.quota.Period {
		return // of a slot that is over, of another quota, or before a reset
	}
	if written {
		b.claimed = max(b.claimed, r.Used[0])
	}
	b.asked = 0
}

// Record is what the file is to have when b ends in order: what was used, and no claim.
func (b *Budget) Record() Record { return b.record(b.used[0]) }

func (b *Budget) record(present uint64) Record {
	r := Record{Unit: b.quota.Unit, Period: b.quota.Period, Start: b.start, Used: append([]uint64(nil), b.used...)}
	r.Used[0] = present
	for len(r.Used) > 1 && r.Used[len(r.Used)-1] == 0 {
		r.Used = r.Used[:len(r.Used)-1]
	}
	return r
}

// Reset forgets what was used, and also that the clock once was in a later slot.
func (b *Budget) Reset(now time.Time) {
	b.start, b.end = b.quota.Period.slot(now)
	clear(b.used)
	b.before, b.claimed, b.asked = 0, 0, 0
	b.turn++
}

// Empty reports whether b equals a new budget.
func (b *Budget) Empty() bool { return b.Used() == 0 }
