// Owner: the loop's thread.

package conn

import (
	"iter"
	"slices"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/shaper"
)

// classLine is the connections of one class at a gate: those in flight, and those that wait here, by source. It exists while there are any.
//
// Slots that are reserved for a class are lent to the others while it does not need them. While it has fewer in flight than
// are reserved, and some of it wait, the class is owed: each slot that is freed goes to it before all others, whatever their
// priority. So it has what is reserved for it after as many connections have ended, of any class.
type classLine struct {
	class    *shaper.ClassState
	reserved int // percent of the slots
	inFlight int
	queued   fairq.Heap[gateSource, byTicket] // sources that wait here
}

// line returns the line of a class. A missing one is created. It is valid until another one is created or dropped.
func (gt *gate) line(class *shaper.ClassState) *classLine {
	if l := gt.findLine(class); l != nil {
		return l
	}
	gt.lines = append(gt.lines, classLine{class: class, reserved: gt.limit.ReservedFor(class.Name)})
	return &gt.lines[len(gt.lines)-1]
}

func (gt *gate) findLine(class *shaper.ClassState) *classLine {
	for i := range gt.lines {
		if gt.lines[i].class == class {
			return &gt.lines[i]
		}
	}
	return nil
}

// dropLine drops the line of a class if nothing is left in it.
func (gt *gate) dropLine(class *shaper.ClassState) {
	gt.lines = slices.DeleteFunc(gt.lines, func(l classLine) bool { return l.class == class && l.inFlight == 0 && len(l.queued) == 0 })
}

// owed reports whether a class, or none if it is nil, has fewer connections in flight than are reserved for it.
func (gt *gate) owed(class *shaper.ClassState) bool {
	if class == nil || len(gt.limit.Reserve) == 0 {
		return false
	}
	if l := gt.findLine(class); l != nil {
		return l.inFlight < gt.slots*l.reserved/100
	}
	return gt.slots*gt.limit.ReservedFor(class.Name)/100 > 0
}

// first returns the source whose turn it is at gt, or nil if none waits here.
func (gt *gate) first() (first *gateSource) {
	for i := range gt.lines {
		if l := &gt.lines[i]; len(l.queued) > 0 && (first == nil || gt.before(l.class, l.queued[0].ticket(), first.key.class, first.ticket())) {
			first = l.queued[0]
		}
	}
	return first
}

// before reports whether a ticket of class c comes before one of class d at gt.
func (gt *gate) before(c *shaper.ClassState, ticket uint64, d *shaper.ClassState, other uint64) bool {
	if owed := gt.owed(c); owed != gt.owed(d) {
		return owed
	}
	return ticket < other
}

// waiters are the sources that wait at gt, in no order.
func (gt *gate) waiters() iter.Seq[*gateSource] {
	return func(yield func(*gateSource) bool) {
		for i := range gt.lines {
			for _, src := range gt.lines[i].queued {
				if !yield(src) {
					return
				}
			}
		}
	}
}

// waitingSources is how many sources wait at gt.
func (gt *gate) waitingSources() (n int) {
	for i := range gt.lines {
		n += len(gt.lines[i].queued)
	}
	return n
}
