// Owner: Plane.mu. The programs charge packets at the same time.

package bpf

import (
	"sync/atomic"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// migration is the change of a limit's meter from a bucket to a calendar or back, or to another
// calendar.
type migration struct {
	limit    uint32
	meter    int
	bucket   kernelMeter
	oldShift uint8
	newShift uint8
	change   rateChange

	at      leaky.Time // time of the migration
	backlog leaky.Time // backlog at that time
}

// migrations returns the meters of known limits that p moves from a bucket to a calendar or back, or
// to another calendar. The buckets of limits that hosts share have a time of their own, and begin without
// backlog or credit when a limit becomes a shared one.
func (k *kernel) migrations(p *shaper.Policy, im *image) (all []migration) {
	for i := range p.Len() {
		l := p.Limit(i)
		known := k.Limits[l.Name]
		if known == nil || l.Shared {
			continue
		}
		was, is := known.Rates.meters(), ratesOf(l).meters()
		slotted := slotShiftsOf(p, i)
		for j := range slotted {
			if known.Slotted[j] != slotted[j] || slotted[j] != 0 && was[j] != is[j] {
				all = append(all, migration{known.Number, j, im.policy.Limit[i].Meter[j], known.Slotted[j], slotted[j], rateChange{was[j], is[j]}, 0, 0})
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
		if bucket := k.lookupOrInsert(c.bucket.Tag, join(&c.bucket, [2]uint64{}), now, kernelShare{}); bucket != nil {
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
		if word = k.lookupOrInsert(c.bucket.Tag, join(&c.bucket, [2]uint64{}), c.at, kernelShare{}); word == nil {
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
	return c.change[0].Rescale(backlog, c.change[1].Rate)
}
