package leaky

import (
	"math"
	"math/bits"
)

const (
	// A slot is 2^19 ticks, 8.192 us; the wheel spans 0.54 s. Later events wait
	// in a late slot and are placed anew when it comes round.
	slotShift = 19
	slotCount = 1 << 16
	slotMask  = slotCount - 1
)

// Event is something to do at an instant. The zero value with Fire set is ready
// for use; an Event must not be copied while it is scheduled.
type Event struct {
	// Fire is called once, on the wheel's thread, at or after the instant. It
	// may schedule events, this one too.
	Fire func(now Time)

	at         Time
	next, prev *Event // nil when not scheduled
	slot       int32  // or due
}

// due marks an event that Advance has taken out of its slot and is about to fire.
const due = -1

// Scheduled reports whether e waits in a wheel.
func (e *Event) Scheduled() bool { return e.next != nil }

// Wheel is a timing wheel (Varghese and Lauck, SOSP 1987) with a two-level
// bitmap over its slots, so that finding the next event does not walk empty
// ones. Slots only sort: an event fires at its own instant, not at its slot's.
//
// A Wheel is not safe for concurrent use.
type Wheel struct {
	slots   [slotCount]Event // list heads
	ready   Event            // list head of what Advance is about to fire
	words   [slotCount / 64]uint64
	summary [slotCount / 64 / 64]uint64
	spread  uint64 // of events beyond the last slot
	pos     uint64 // slot number, not wrapped, up to which events have fired
	len     int
}

// Len returns the number of scheduled events.
func (w *Wheel) Len() int { return w.len }

// Schedule makes e fire at at, or in the next Advance when at is past. An event
// that is already scheduled moves.
func (w *Wheel) Schedule(e *Event, at Time) {
	if e.next != nil {
		w.Cancel(e)
	}
	e.at = at
	w.insert(e)
}

// Cancel takes e out of the wheel; it does nothing when e is not in it.
func (w *Wheel) Cancel(e *Event) {
	if e.next == nil {
		return
	}
	e.prev.next, e.next.prev = e.next, e.prev
	e.next, e.prev = nil, nil
	if e.slot == due {
		return
	}
	w.len--
	if head := &w.slots[e.slot]; head.next == head {
		w.clear(uint16(e.slot))
	}
}

// Skip brings an empty wheel up to now. Without it the first event after a long
// rest is looked for through all the slots of that time.
func (w *Wheel) Skip(now Time) {
	if w.len == 0 {
		w.pos = max(w.pos, uint64(now)>>slotShift)
	}
}

// Next returns the instant at which Advance has something to do, which may be
// past; ok is false when nothing is scheduled.
func (w *Wheel) Next() (at Time, ok bool) {
	if w.len == 0 {
		return math.MaxUint64, false
	}
	slot := w.first(uint16(w.pos & slotMask))
	ahead := (uint64(slot) - w.pos) & slotMask
	at = Time((w.pos + ahead + 1) << slotShift) // a later event waits here for its turn
	head := &w.slots[slot]
	for e := head.next; e != head; e = e.next {
		at = min(at, e.at)
	}
	return at, true
}

// Advance fires the events that are due at now, in order of their slots and
// within a slot in the order they were scheduled.
func (w *Wheel) Advance(now Time) {
	ready := &w.ready
	ready.next, ready.prev = ready, ready
	target := uint64(now) >> slotShift
	for w.len > 0 {
		slot := w.first(uint16(w.pos & slotMask))
		number := w.pos + (uint64(slot)-w.pos)&slotMask
		if number > target {
			break
		}
		w.collect(slot, number, now)
		if number == target {
			break
		}
		w.pos = number + 1
	}
	w.pos = max(w.pos, target)
	for ready.next != ready {
		e := ready.next
		ready.next, e.next.prev = e.next, ready
		e.next, e.prev = nil, nil
		e.Fire(now)
	}
}

// collect moves the due events of a slot to the end of ready, and places the
// others anew, counting from the slot's number.
func (w *Wheel) collect(slot uint16, number uint64, now Time) {
	head, ready := &w.slots[slot], &w.ready
	e, last := head.next, head.prev
	last.next = nil
	head.next, head.prev = head, head
	w.clear(slot)
	w.pos = number
	for e != nil {
		next := e.next
		w.len--
		if e.at <= now {
			e.slot = due
			e.next, e.prev = ready, ready.prev
			ready.prev.next, ready.prev = e, e
		} else {
			w.insert(e)
		}
		e = next
	}
}

func (w *Wheel) insert(e *Event) {
	number := max(uint64(e.at)>>slotShift, w.pos)
	if most := w.pos + slotMask; number > most {
		// Far ones are spread, or those that came together would stay together, and
		// be looked at all at once whenever their slot comes round.
		number = most - w.spread%(slotCount/2)
		w.spread += 20_251 // with steps of 1, those of slots in a row would meet again
	}
	slot := uint16(number & slotMask)
	head := &w.slots[slot]
	if head.next == nil || head.next == head {
		head.next, head.prev = head, head
		w.words[slot/64] |= 1 << (slot % 64)
		w.summary[slot/4096] |= 1 << (slot / 64 % 64)
	}
	e.slot = int32(slot)
	e.next, e.prev = head, head.prev
	head.prev.next, head.prev = e, e
	w.len++
}

func (w *Wheel) clear(slot uint16) {
	w.words[slot/64] &^= 1 << (slot % 64)
	if w.words[slot/64] == 0 {
		w.summary[slot/4096] &^= 1 << (slot / 64 % 64)
	}
}

// first returns the first occupied slot at or after from, wrapping round. There
// must be one.
func (w *Wheel) first(from uint16) uint16 {
	word := from / 64
	if m := w.words[word] >> (from % 64); m != 0 {
		return from + uint16(bits.TrailingZeros64(m))
	}
	// The words after from's, then from the start: its own low bits come last.
	i := (word + 1) % uint16(len(w.words))
	group := i / 64
	m := w.summary[group] >> (i % 64) << (i % 64)
	for m == 0 {
		group = (group + 1) % uint16(len(w.summary))
		m = w.summary[group]
	}
	word = group*64 + uint16(bits.TrailingZeros64(m))
	return word*64 + uint16(bits.TrailingZeros64(w.words[word]))
}
