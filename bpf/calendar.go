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

// migration is the change of a limit's meter from a bucket to a calendar or back, or to another
// calendar.
type migration struct {
	limit    uint32
	meter    int
	bucket   kernelMeter
	oldShift uint8
	newShift uint8
	rates    [2]leaky.Rate

	at      leaky.Time // time of the migration
	backlog leaky.Time // backlog at that time
}

// migrations returns the meters of known limits that p moves from a bucket to a calendar or back, or
// to another calendar.
func (k *kernel) migrations(p *shaper.Policy, im *image) (all []migration) {
	for i := range p.Len() {
		l := p.Limit(i)
		known := k.Limits[l.Name]
		if known == nil {
			continue
		}
		was, is := known.Rates.meters(), ratesOf(l).meters()
		slotted := slotShiftsOf(p, i)
		for j := range slotted {
			if known.Slotted[j] != slotted[j] || slotted[j] != 0 && was[j] != is[j] {
				all = append(all, migration{known.Number, j, im.policy.Limit[i].Meter[j], known.Slotted[j], slotted[j], [2]leaky.Rate{was[j], is[j]}, 0, 0})
			}
		}
	}
	return all
}

// migrate lets the charges of the next policy begin behind the backlog. Buckets have been rescaled
// before.
func (k *kernel) migrate(c *migration, now leaky.Time) {
	c.at = now
	c.backlog = k.oldBacklog(c)
	if c.backlog == 0 {
		return
	}
	until := uint64(now.Add(c.rescaled(c.backlog)))
	switch {
	case c.oldShift != 0 && c.newShift != 0: // in place, while packets are charged to it
		cal := k.calendar(c.limit, c.meter, c.oldShift)
		ahead := leaky.Time(atomic.SwapUint64(&cal.From, until)).Sub(now)
		c.backlog = max(c.backlog, ahead.Add(cal.withdraw(now.Add(ahead))))
		cal.reopen()
		atomic.AddUint64(&cal.From, uint64(now.Add(c.rescaled(c.backlog)))-until)
	case c.newShift != 0:
		k.calendar(c.limit, c.meter, c.newShift).reset(until)
	default:
		if bucket := k.lookupOrInsert(c.bucket.Tag, join(&c.bucket, [2]uint64{}), now); bucket != nil {
			atomic.StoreUint64(bucket, until)
		}
	}
}

// finishMigration adds the charges of the old policy since migrate. No packet meets that policy any more.
func (k *kernel) finishMigration(c *migration) {
	var more leaky.Time
	switch {
	case c.oldShift == c.newShift: // the slots are the same, with their charges
	case c.oldShift != 0 && c.newShift != 0:
		more = k.calendar(c.limit, c.meter, c.oldShift).withdraw(c.at)
	default:
		more = k.oldBacklog(c).Sub(c.backlog)
	}
	if more == 0 {
		return
	}
	word := &k.calendar(c.limit, c.meter, c.newShift).From
	if c.newShift == 0 {
		if word = k.lookupOrInsert(c.bucket.Tag, join(&c.bucket, [2]uint64{}), c.at); word == nil {
			return
		}
	}
	for {
		until := atomic.LoadUint64(word)
		if atomic.CompareAndSwapUint64(word, until, uint64(max(leaky.Time(until), c.at).Add(c.rescaled(more)))) {
			return
		}
	}
}

// oldBacklog returns the backlog at the time of the migration, in the old structure.
func (k *kernel) oldBacklog(c *migration) (backlog leaky.Time) {
	if c.oldShift != 0 {
		backlog, _ = k.calendar(c.limit, c.meter, c.oldShift).backlog(c.at)
	} else if until, ok := k.lookup(c.bucket.Tag, join(&c.bucket, [2]uint64{})); ok { // the limit has a single key
		backlog = leaky.Time(atomic.LoadUint64(until)).Sub(c.at)
	}
	return backlog
}

// rescaled returns a calendar's backlog at the new rate. Buckets are rescaled already.
func (c *migration) rescaled(backlog leaky.Time) leaky.Time {
	if c.oldShift == 0 {
		return backlog
	}
	return c.rates[0].Rescale(backlog, c.rates[1])
}

// lookupOrInsert returns the drain time of the bucket of a meter and a hash, and inserts the bucket if
// necessary. It returns nil if the table is full.
func (k *kernel) lookupOrInsert(meter, hash uint64, now leaky.Time) *uint64 {
	if until, ok := k.lookup(meter, hash); ok {
		return until
	}
	for _, line := range probeLines(hash, uint64(len(k.buckets))) {
		l := &k.buckets[line]
		for i := range l.Tag {
			tag := atomic.LoadUint64(&l.Tag[i])
			if (tag == 0 || atomic.LoadUint64(&l.DrainedAt[i]) <= uint64(now)) &&
				atomic.CompareAndSwapUint64(&l.Tag[i], tag, meter|hash&tagHash) {
				return &l.DrainedAt[i]
			}
		}
	}
	return nil
}
