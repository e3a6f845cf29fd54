package conn

import (
	"cmp"
	"slices"

	"shaperd/leaky"
	"shaperd/shaper"
)

// booking is the time of a unit in a line. A unit that has had its turn in all of its lines
// leaves when all their buckets let it. Where some do not, as others have left meanwhile, it
// books the first time at which all will: others leave before that only if each line is ready
// again by then. This is backfilling as batch schedulers do it (Lifka, "The ANL/IBM SP
// Scheduling System", 1995). So a unit that needs several lines comes to its turn whatever the
// others do, and none has to hold a line to get the next one.
//
// Others may also put it off, but once in each line. Else a line would stand still whenever the
// next unit is a large one, and too little time is left for it before a small one that is booked.
type booking struct {
	unit        *unit
	from, until leaky.Time
	firm        bool // it was put off in the line, and is not again
}

// fit returns when u could leave through l, not before at: the bucket lets it, and it is out of
// the way of those that are booked and may not be put off. What others use between now and then
// is not in it.
func (l *line) fit(u *unit, at, now leaky.Time) leaky.Time {
	at = max(at, l.bucket.Depart(l.shape, now))
	if len(l.bookings) == 0 {
		return at
	}
	cost := l.cost(u.bytes, u.packets)
	i := l.find(at)
	if i > 0 && l.bookings[i-1].until > at {
		i--
	}
	for _, b := range l.bookings[i:] {
		if at.Add(cost) <= b.from {
			break
		}
		if b.unit == u || u.turn > 0 && u.turn < b.unit.turn || at < b.from && !b.firm {
			continue
		}
		at = max(at, b.until)
	}
	return at
}

// find returns the first booking that is not before at.
func (l *line) find(at leaky.Time) int {
	i, _ := slices.BinarySearchFunc(l.bookings, at, func(b booking, at leaky.Time) int { return cmp.Compare(b.from, at) })
	return i
}

// earliest returns when u could leave through all its lines.
func (u *unit) earliest(now leaky.Time) leaky.Time {
	at := now
	for i := 0; i < len(u.path); i++ {
		if next := u.path[i].fit(u, at, now); next > at {
			at, i = next, -1 // those before may be booked then
		}
	}
	return at
}

// book has u, whose turn it is in its last line, leave at due. It is charged for its turn there.
// From then on only those that had their turn before go before it, even when all are late.
func (ls *lines) book(u *unit, due, now leaky.Time) {
	last := &u.path[u.pos]
	if last.fit(u, now, now) > now {
		last.held = u
	}
	last.leaf.charge(u.cost)
	last.leaf.done()
	last.leaf.bar() // none of its flow goes before it
	u.paid, u.joined = u.cost, now
	for i := range u.path {
		if u.path[i].fit(u, now, now) > u.path[u.short].fit(u, now, now) {
			u.short = i
		}
	}
	u.waited |= 1 << u.short
	ls.turn++
	u.turn = ls.turn
	u.enter(due)
}

// enter books u in all its lines.
func (u *unit) enter(due leaky.Time) {
	u.booked, u.due = true, due
	for i, at := range u.path {
		l := at.line
		b := booking{u, due, due.Add(l.cost(u.bytes, u.packets)), u.firm&(1<<i) != 0}
		l.bookings = slices.Insert(l.bookings, l.find(due), b)
	}
	l := u.path[u.pos].line
	i, _ := slices.BinarySearchFunc(l.late, due, func(u *unit, due leaky.Time) int { return cmp.Compare(u.due, due) })
	l.late = slices.Insert(l.late, i, u)
}

// exit is the opposite of enter.
func (u *unit) exit() {
	u.booked = false
	for _, at := range u.path {
		l := at.line
		i := l.find(u.due)
		for l.bookings[i].unit != u {
			i++
		}
		l.bookings = slices.Delete(l.bookings, i, i+1)
	}
	l := u.path[u.pos].line
	i := slices.Index(l.late, u)
	l.late = slices.Delete(l.late, i, i+1)
}

// unbook ends the wait of u for its time.
func (u *unit) unbook(now leaky.Time) {
	u.exit()
	last := &u.path[u.pos]
	last.leaf.admit()
	if last.held == u {
		last.held = nil
	}
	at := &u.path[u.short]
	at.wait(now.Sub(u.joined))
	u.turn, u.paid, u.short, u.firm = 0, 0, 0, 0
}

// punctual returns the next of those that are booked and leave from l, if it may leave now. It
// is booked again when it may sooner, as others have used less than they might have, or
// later, as the thread was held up.
func (l *line) punctual(now leaky.Time) *unit {
	for len(l.late) > 0 {
		u := l.late[0]
		due := u.earliest(now)
		if due <= now {
			return u
		}
		if due == u.due {
			break
		}
		u.exit()
		u.enter(due)
	}
	return nil
}

// putOff books those in l again whose time comes before l lets the next one leave.
func (ls *lines) putOff(l *line, now leaky.Time) {
	for len(l.bookings) > 0 && l.bookings[0].from < l.bucket.Depart(l.shape, now) {
		u := l.bookings[0].unit
		for i := range u.path {
			if u.path[i].line == l {
				u.firm |= 1 << i
			}
		}
		u.exit()
		u.enter(u.earliest(now))
		ls.consider(u.path[u.pos].line)
	}
}

// rebook brings those that are booked in l to a new rate.
func (ls *lines) rebook(l *line, now leaky.Time) {
	for _, b := range slices.Clone(l.bookings) {
		b.unit.exit()
		b.unit.enter(b.unit.earliest(now))
		ls.consider(b.unit.path[b.unit.pos].line)
	}
}

// wake has l served again at at, or when one that is booked is due.
func (ls *lines) wake(l *line, at leaky.Time) {
	if len(l.late) > 0 {
		at = min(at, l.late[0].due)
	}
	if at < leaky.Never {
		ls.wheel.Schedule(&l.event, at)
	}
}

// heldBy returns the state of the limit that holds u back.
func (u *unit) heldBy() *shaper.State {
	if u.booked {
		return u.path[u.short].state
	}
	return u.path[u.pos].state
}
