package pacer

import (
	"math"
	"math/bits"

	"shaperd.dev/shaperd/leaky"
)

const (
	// A fine slot is 2^19 ticks, 8.192 us, and the fine ring spans 0.54 s. A coarse slot
	// is half of that, and the coarse ring spans 4.9 hours. An event further away waits
	// in a coarse slot of the second half, and is reinserted when that slot is due.
	fineShift   = 19
	coarseShift = fineShift + 15
	slotCount   = 1 << 16
	slotMask    = slotCount - 1

	coarseGrid leaky.Time = 1 << 30 // 16.8 ms
)

// Event is a callback to run at an instant. The zero value with Fire set is ready
// for use; an Event must not be copied while it is scheduled.
type Event struct {
	// Fire is called once, on the wheel's thread, at or after the instant. It
	// may schedule events, including this one.
	Fire func(now leaky.Time)

	at         leaky.Time
	next, prev *Event // nil when not scheduled
	ring       *ring  // nil when the event is about to fire, or deferred
	slot       uint16
}

// Scheduled reports whether e waits in a wheel, for an instant or deferred.
func (e *Event) Scheduled() bool { return e.next != nil }

// Wheel is a timing wheel (Varghese and Lauck, SOSP 1987) of two rings: events within
// half a second wait in the fine one, all others in the coarse one, from which they move
// to the fine one once, shortly before they are due. So an event far in the future costs
// nothing until then. Slots only sort: an event fires at its own instant, not at that of
// its slot.
//
// The zero Wheel is empty. A Wheel is not safe for concurrent use, and never allocates.
type Wheel struct {
	fine, coarse ring
	ready        Event      // list head of the events that are about to fire
	deferred     Event      // list head of those that wait for FireDeferred
	pos          uint64     // fine slot number, not wrapped, up to which events have fired
	spread       uint64     // offset of the next event beyond the coarse ring
	next         leaky.Time // result of Next, valid if nextKnown
	nextKnown    bool
}

// ring is an array of slots with a two-level bitmap of the used ones, so that finding the
// next one skips empty ones.
type ring struct {
	slots   [slotCount]Event // list heads
	words   [slotCount / 64]uint64
	summary [slotCount / 64 / 64]uint64
	len     int
}

// Len returns the number of scheduled events.
func (w *Wheel) Len() int { return w.fine.len + w.coarse.len }

// Schedule makes e fire at at, or in the next Advance if at is past. An event
// that is already scheduled is moved.
func (w *Wheel) Schedule(e *Event, at leaky.Time) {
	if e.next != nil {
		w.Cancel(e)
	}
	e.at = at
	w.insert(e)
}

// ScheduleCoarse is Schedule up to 17 ms later, so that events of about the same time fire
// together, with one wake-up.
func (w *Wheel) ScheduleCoarse(e *Event, at leaky.Time) {
	w.Schedule(e, at.Add(coarseGrid-1)/coarseGrid*coarseGrid)
}

// Cancel removes e from the wheel; it does nothing if e is not scheduled.
func (w *Wheel) Cancel(e *Event) {
	if e.next == nil {
		return
	}
	e.prev.next, e.next.prev = e.next, e.prev
	e.next, e.prev = nil, nil
	if e.ring == nil {
		return
	}
	w.nextKnown = w.nextKnown && (e.ring == &w.fine && e.at > w.next)
	e.ring.len--
	if head := &e.ring.slots[e.slot]; head.next == head {
		e.ring.clear(e.slot)
	}
}

// Defer makes e fire in the next FireDeferred. An event that is already scheduled is moved.
func (w *Wheel) Defer(e *Event) {
	if e.next != nil {
		w.Cancel(e)
	}
	d := &w.deferred
	if d.next == nil {
		d.next, d.prev = d, d
	}
	e.ring = nil
	e.next, e.prev = d, d.prev
	d.prev.next, d.prev = e, e
}

// HasDeferred reports whether an event waits for FireDeferred.
func (w *Wheel) HasDeferred() bool { return w.deferred.next != nil && w.deferred.next != &w.deferred }

// FireDeferred fires the events that were deferred before it, in that order.
func (w *Wheel) FireDeferred(now leaky.Time) {
	if !w.HasDeferred() {
		return
	}
	d, ready := &w.deferred, &w.ready
	ready.next, ready.prev = d.next, d.prev
	d.next.prev, d.prev.next = ready, ready
	d.next, d.prev = d, d
	w.fireReady(now)
}

// Absorb moves the events of o to w. Each keeps its instant. None of both may be in Advance.
func (w *Wheel) Absorb(o *Wheel) {
	for o.HasDeferred() {
		e := o.deferred.next
		o.Cancel(e)
		w.Defer(e)
	}
	for _, r := range []*ring{&o.fine, &o.coarse} {
		for r.len > 0 {
			e := r.slots[r.firstUsedSlot(0)].next
			o.Cancel(e)
			w.Schedule(e, e.at)
		}
	}
}

// Skip advances an empty wheel to now. Without it the search for the first event after a
// long idle time goes through all the slots of that time.
func (w *Wheel) Skip(now leaky.Time) {
	if w.Len() == 0 {
		w.pos = max(w.pos, uint64(now)>>fineShift)
	}
}

// Next returns the instant at which Advance is needed next, which may be past; or Never
// and false if nothing is scheduled. Events far in the future need an Advance before the
// first of them is due, at most one for each coarse slot.
func (w *Wheel) Next() (at leaky.Time, ok bool) {
	if w.Len() == 0 {
		return leaky.Never, false
	}
	if !w.nextKnown {
		w.next, w.nextKnown = w.findNext(), true
	}
	return w.next, true
}

// findNext computes the result of Next, if an event is scheduled.
func (w *Wheel) findNext() leaky.Time {
	at := leaky.Never
	if w.coarse.len > 0 {
		at = leaky.Time(w.coarse.firstUsed(w.coarsePos()) << coarseShift)
	}
	if w.fine.len == 0 {
		return at
	}
	number := w.fine.firstUsed(w.pos)
	if at <= leaky.Time(number<<fineShift) {
		return at
	}
	head := w.fine.head(number)
	for e := head.next; e != head; e = e.next {
		at = min(at, e.at)
	}
	return at
}

func (w *Wheel) coarsePos() uint64 { return w.pos >> (coarseShift - fineShift) }

// Advance fires the events that are due at now, in order of their fine slots and
// within a slot in order of insertion.
func (w *Wheel) Advance(now leaky.Time) {
	ready := &w.ready
	ready.next, ready.prev = ready, ready
	w.nextKnown = false
	target := uint64(now) >> fineShift
	for w.Len() > 0 {
		number := uint64(math.MaxUint64)
		if w.fine.len > 0 {
			number = w.fine.firstUsed(w.pos)
		}
		if w.coarse.len > 0 {
			coarse := w.coarse.firstUsed(w.coarsePos())
			if begin := coarse << (coarseShift - fineShift); begin <= min(number, target) {
				w.pos = max(w.pos, begin)
				w.collect(&w.coarse, coarse, now)
				continue
			}
		}
		if number > target {
			break
		}
		w.pos = number
		w.collect(&w.fine, number, now)
		if number == target {
			break
		}
		w.pos = number + 1
	}
	w.pos = max(w.pos, target)
	w.fireReady(now)
}

func (w *Wheel) fireReady(now leaky.Time) {
	ready := &w.ready
	for ready.next != ready {
		e := ready.next
		ready.next, e.next.prev = e.next, ready
		e.next, e.prev = nil, nil
		e.Fire(now)
	}
}

// collect moves the due events of a fine slot to the end of ready, and reinserts the
// others, and those of a coarse slot, relative to pos.
func (w *Wheel) collect(r *ring, number uint64, now leaky.Time) {
	head, ready := r.head(number), &w.ready
	e, last := head.next, head.prev
	last.next = nil
	head.next, head.prev = head, head
	r.clear(uint16(number))
	for e != nil {
		next := e.next
		r.len--
		if r == &w.fine && e.at <= now {
			e.ring = nil
			e.next, e.prev = ready, ready.prev
			ready.prev.next, ready.prev = e, e
		} else {
			w.insert(e)
		}
		e = next
	}
}

func (w *Wheel) insert(e *Event) {
	number := max(uint64(e.at)>>fineShift, w.pos)
	r := &w.fine
	if number-w.pos > slotMask {
		r = &w.coarse
		number >>= coarseShift - fineShift
		if last := w.coarsePos() + slotMask; number > last {
			// Spread, as events scheduled together would all be reinserted at once.
			number = last - w.spread%(slotCount/2)
			w.spread += 20_251 // with steps of 1, those of consecutive slots would meet again
		}
	}
	e.ring, e.slot = r, uint16(number)
	head := r.head(number)
	if head.next == nil || head.next == head {
		head.next, head.prev = head, head
		r.words[e.slot/64] |= 1 << (e.slot % 64)
		r.summary[e.slot/4096] |= 1 << (e.slot / 64 % 64)
	}
	e.next, e.prev = head, head.prev
	head.prev.next, head.prev = e, e
	r.len++
	switch {
	case r == &w.fine:
		w.next = min(w.next, e.at)
	case leaky.Time(number<<coarseShift) < w.next:
		w.next = leaky.Time(number << coarseShift)
	}
}

func (r *ring) head(number uint64) *Event { return &r.slots[number&slotMask] }

func (r *ring) clear(slot uint16) {
	r.words[slot/64] &^= 1 << (slot % 64)
	if r.words[slot/64] == 0 {
		r.summary[slot/4096] &^= 1 << (slot / 64 % 64)
	}
}

// firstUsed returns the number of the first used slot from pos on. There must be one.
func (r *ring) firstUsed(pos uint64) uint64 {
	return pos + uint64(r.firstUsedSlot(uint16(pos))-uint16(pos))
}

// firstUsedSlot is firstUsed for a wrapped slot number.
func (r *ring) firstUsedSlot(from uint16) uint16 {
	word := from / 64
	if m := r.words[word] >> (from % 64); m != 0 {
		return from + uint16(bits.TrailingZeros64(m))
	}
	// The words after that of from, then from the start: the low bits of its own come last.
	i := (word + 1) % uint16(len(r.words))
	group := i / 64
	m := r.summary[group] >> (i % 64) << (i % 64)
	for m == 0 {
		group = (group + 1) % uint16(len(r.summary))
		m = r.summary[group]
	}
	word = group*64 + uint16(bits.TrailingZeros64(m))
	return word*64 + uint16(bits.TrailingZeros64(r.words[word]))
}
