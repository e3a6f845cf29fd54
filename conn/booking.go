// Owner: the loop's thread.

package conn

import (
	"cmp"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// booking is the reserved departure time of a unit in a queue. A unit that had its turn in all of its
// queues leaves when all their buckets allow it. If some do not, since other units have left
// meanwhile, it books the first time at which all will. Others may leave before that time only if each
// queue is ready again by then. This is backfilling, as in batch schedulers (Lifka, "The ANL/IBM SP
// Scheduling System", 1995). So a unit that needs several queues is served whatever the others do, and
// none holds one queue while it waits for the next.
//
// Others may also postpone it, but only once in each queue. Otherwise a queue would idle whenever its
// next unit is a large one that does not fit before a small booked one.
type booking struct {
	unit        *unit
	from, until leaky.Time
	firm        bool // the unit was postponed in this queue, and cannot be again
}

// earliest returns when u could leave through q, at at or later: the bucket allows it, and u stays
// clear of bookings that cannot be postponed. It does not account for what others use before then.
func (q *queue) earliest(u *unit, at, now leaky.Time) leaky.Time {
	at = max(at, q.depart(now))
	if len(q.bookings) == 0 {
		return at
	}
	cost := q.cost(u.bytes, u.packets)
	i := q.findBooking(at)
	if i > 0 && q.bookings[i-1].until > at {
		i--
	}
	for _, b := range q.bookings[i:] {
		if at.Add(cost) <= b.from {
			break
		}
		if b.unit == u || u.bookingSeq > 0 && u.bookingSeq < b.unit.bookingSeq || at < b.from && !b.firm {
			continue
		}
		at = max(at, b.until)
	}
	return at
}

// findBooking returns the index of the first booking that is not before at.
func (q *queue) findBooking(at leaky.Time) int {
	i, _ := slices.BinarySearchFunc(q.bookings, at, func(b booking, at leaky.Time) int { return cmp.Compare(b.from, at) })
	return i
}

// earliest returns when u could leave through all its queues.
func (u *unit) earliest(now leaky.Time) leaky.Time {
	at := now
	for i := 0; i < len(u.path); i++ {
		if next := u.path[i].earliest(u, at, now); next > at {
			at, i = next, -1 // earlier queues may be booked at that time
		}
	}
	return at
}

// book reserves the departure of u, whose turn it is in its last queue, at due. u is charged for its
// turn there. From then on only units that had their turn before it go first, even when all are late.
func (sc *scheduler) book(u *unit, due, now leaky.Time) {
	last := &u.path[u.pos]
	if last.earliest(u, now, now) > now {
		last.blocked = u
	}
	last.flowQueue.Charge(u.cost)
	last.flowQueue.EndService()
	last.flowQueue.Suspend() // no unit of its flow goes before it
	u.charged, u.enqueuedAt = u.cost, now
	for i := range u.path {
		if u.path[i].earliest(u, now, now) > u.path[u.bottleneck].earliest(u, now, now) {
			u.bottleneck = i
		}
	}
	u.delayedAt |= 1 << u.bottleneck
	if sh := u.path[u.bottleneck].share; sh != nil {
		sc.sharing.wait(sh, due, now)
	}
	sc.lastBooking++
	u.bookingSeq = sc.lastBooking
	u.insertBookings(due)
}

// insertBookings books u in all its queues.
func (u *unit) insertBookings(due leaky.Time) {
	u.booked, u.due = true, due
	for i, h := range u.path {
		q := h.queue
		b := booking{u, due, due.Add(q.cost(u.bytes, u.packets)), u.postponedAt&(1<<i) != 0}
		q.bookings = slices.Insert(q.bookings, q.findBooking(due), b)
	}
	q := u.path[u.pos].queue
	i, _ := slices.BinarySearchFunc(q.booked, due, func(u *unit, due leaky.Time) int { return cmp.Compare(u.due, due) })
	q.booked = slices.Insert(q.booked, i, u)
}

// removeBookings undoes insertBookings.
func (u *unit) removeBookings() {
	u.booked = false
	for _, h := range u.path {
		q := h.queue
		i := q.findBooking(u.due)
		for q.bookings[i].unit != u {
			i++
		}
		q.bookings = slices.Delete(q.bookings, i, i+1)
	}
	q := u.path[u.pos].queue
	i := slices.Index(q.booked, u)
	q.booked = slices.Delete(q.booked, i, i+1)
}

// cancelBooking ends the wait of a booked unit.
func (u *unit) cancelBooking(now leaky.Time) {
	u.removeBookings()
	last := &u.path[u.pos]
	last.flowQueue.Resume()
	if last.blocked == u {
		last.blocked = nil
	}
	h := &u.path[u.bottleneck]
	h.addWait(now.Sub(u.enqueuedAt))
	u.bookingSeq, u.charged, u.bottleneck, u.postponedAt = 0, 0, 0, 0
}

// nextBooked returns the next booked unit that leaves from q, if it may leave now. It is rebooked when
// it may leave earlier, because others used less than they might have, or later, because the thread
// was delayed.
func (q *queue) nextBooked(now leaky.Time) *unit {
	for len(q.booked) > 0 {
		u := q.booked[0]
		due := u.earliest(now)
		if due <= now {
			return u
		}
		if due == u.due {
			break
		}
		u.removeBookings()
		u.insertBookings(due)
	}
	return nil
}

// postpone rebooks the units whose booking starts before q is ready for the next one.
func (sc *scheduler) postpone(q *queue, now leaky.Time) {
	for len(q.bookings) > 0 && q.bookings[0].from < q.depart(now) {
		u := q.bookings[0].unit
		for i := range u.path {
			if u.path[i].queue == q {
				u.postponedAt |= 1 << i
			}
		}
		u.removeBookings()
		u.insertBookings(u.earliest(now))
		sc.markRunnable(u.path[u.pos].queue)
	}
}

// rebook updates the bookings of q to a new rate.
func (sc *scheduler) rebook(q *queue, now leaky.Time) {
	for _, b := range slices.Clone(q.bookings) {
		b.unit.removeBookings()
		b.unit.insertBookings(b.unit.earliest(now))
		sc.markRunnable(b.unit.path[b.unit.pos].queue)
	}
}

// throttledBy returns the state of the limit that delays u.
func (u *unit) throttledBy() *shaper.LimitState {
	if u.booked {
		return u.path[u.bottleneck].state
	}
	return u.path[u.pos].state
}
