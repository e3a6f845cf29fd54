// Owner: Plane.mu. The programs change calendars at the same time.

package bpf

import (
	"sync/atomic"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// slotShifts are the slot widths of a limit's calendars, of bytes and of packets, as powers of 2 of
// ticks. They are 0 where the limit has buckets instead.
type slotShifts [2]uint8

func slotShiftsOf(p *shaper.Policy, i int) (s slotShifts) {
	if p.Calendars()&(1<<i) != 0 {
		for meter, slots := range p.Slots(i) {
			s[meter] = slots.Shift
		}
	}
	return s
}

// calendar is a calendar of the programs, like [leaky.Calendar].
type calendar struct {
	*kernelCalendar
	shift uint8
}

func (k *kernel) calendar(limit uint32, meter int, shift uint8) calendar {
	return calendar{&k.calendars[int(limit)*len(slotShifts{})+meter], shift}
}

// taken returns the part of slot n that is taken, when all time before base is.
func (c calendar) taken(n uint64, base leaky.Time) (taken leaky.Time) {
	if word := atomic.LoadUint64(&c.Slot[n%uint64(len(c.Slot))]); word>>(c.shift+1) == n {
		taken = leaky.Time(word & (2<<c.shift - 1))
	}
	if uint64(base>>c.shift) == n {
		taken = max(taken, base&(1<<c.shift-1))
	}
	return taken
}

// backlog returns the time that is taken from now on, and the time until the first free instant.
func (c calendar) backlog(now leaky.Time) (backlog, first leaky.Time) {
	base := max(now, leaky.Time(atomic.LoadUint64(&c.From)))
	backlog = base - now
	begin := uint64(base >> c.shift)
	found := false
	for n := begin; n < begin+uint64(len(c.Slot)); n++ {
		taken := c.taken(n, base)
		if !found && taken < 1<<c.shift {
			found = true
			first = (leaky.Time(n)<<c.shift + taken).Sub(now)
		}
		if n == begin {
			taken -= base & (1<<c.shift - 1)
		}
		backlog += taken
	}
	return backlog, first
}

// reset marks all time before from as taken, and frees the rest.
func (c calendar) reset(from uint64) {
	atomic.StoreUint64(&c.From, from)
	for i := range c.Slot {
		atomic.StoreUint64(&c.Slot[i], 0)
	}
	c.reopen()
}

// reopen marks no slot as closed, so that searches consider all of them again.
func (c calendar) reopen() {
	for i := range c.Closed {
		atomic.StoreUint64(&c.Closed[i], 0)
	}
	atomic.StoreUint64(&c.Hint, 0)
}

// withdraw frees the slots from an instant on, and returns how much of them was taken.
func (c calendar) withdraw(from leaky.Time) (sum leaky.Time) {
	for n := uint64(from >> c.shift); n < uint64(from>>c.shift)+uint64(len(c.Slot)); n++ {
		slot := &c.Slot[n%uint64(len(c.Slot))]
		for {
			word := atomic.LoadUint64(slot)
			if word>>(c.shift+1) != n {
				break
			}
			if atomic.CompareAndSwapUint64(slot, word, 0) {
				taken := leaky.Time(word & (2<<c.shift - 1))
				if n == uint64(from>>c.shift) {
					taken = taken.Sub(from & (1<<c.shift - 1))
				}
				sum = sum.Add(taken)
				break
			}
		}
	}
	return sum
}
