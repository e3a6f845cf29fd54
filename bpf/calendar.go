package bpf

import (
	"sync/atomic"

	"shaperd/leaky"
	"shaperd/shaper"
)

// slotted is how the calendars of a limit, of bytes and of packets, divide time: a slot is
// 2^n ticks wide. Where it has buckets instead it is 0.
type slotted [2]uint8

func slottedOf(p *shaper.Policy, i int) (s slotted) {
	if p.Calendars()&(1<<i) != 0 {
		for meter, slots := range p.Slots(i) {
			s[meter] = slots.Shift
		}
	}
	return s
}

// calendar is one that the programs have, as [leaky.Calendar].
type calendar struct {
	*kernelCalendar
	shift uint8
}

func (k *kernel) calendar(limit uint32, meter int, shift uint8) calendar {
	return calendar{&k.calendars[int(limit)*len(slotted{})+meter], shift}
}

// taken returns how much of slot n is taken, where all before base is.
func (c calendar) taken(n uint64, base leaky.Time) (taken leaky.Time) {
	if word := atomic.LoadUint64(&c.Slot[n%uint64(len(c.Slot))]); word>>(c.shift+1) == n {
		taken = leaky.Time(word & (2<<c.shift - 1))
	}
	if uint64(base>>c.shift) == n {
		taken = max(taken, base&(1<<c.shift-1))
	}
	return taken
}

// owes returns how much is taken from now on, and how long it is to the first instant that
// is not.
func (c calendar) owes(now leaky.Time) (backlog, first leaky.Time) {
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

// begin has all before from be taken, and nothing behind. What programs take meanwhile may be
// forgotten: some packets, once.
func (c calendar) begin(from uint64) {
	atomic.StoreUint64(&c.From, from)
	for i := range c.Slot {
		atomic.StoreUint64(&c.Slot[i], 0)
	}
	for i := range c.Closed {
		atomic.StoreUint64(&c.Closed[i], 0)
	}
	atomic.StoreUint64(&c.Hint, 0)
}

// carry is a meter of a limit that changes from a bucket to a calendar or back, or whose
// calendar changes.
type carry struct {
	limit  uint32
	meter  int
	bucket kernelMeter
	was    uint8
	is     uint8
	rates  [2]leaky.Rate
}

// carries returns what p changes about the calendars of limits that have been in force.
func (k *kernel) carries(p *shaper.Policy, im *image) (all []carry) {
	for i := range p.Len() {
		l := p.Limit(i)
		known := k.Limits[l.Name]
		if known == nil {
			continue
		}
		was, is := known.Rates.meters(), ratesOf(l).meters()
		slotted := slottedOf(p, i)
		for j := range slotted {
			if known.Slotted[j] != slotted[j] || slotted[j] != 0 && was[j] != is[j] {
				all = append(all, carry{known.Number, j, im.policy.Limit[i].Meter[j], known.Slotted[j], slotted[j], [2]leaky.Rate{was[j], is[j]}})
			}
		}
	}
	return all
}

// carryOver has what is charged from now on begin behind what was owed. A bucket's rate has
// been changed already.
func (k *kernel) carryOver(c *carry, now leaky.Time) {
	hash := join(&c.bucket, [2]uint64{}) // of the key of all
	var owed leaky.Time
	if c.was != 0 {
		owed, _ = k.calendar(c.limit, c.meter, c.was).owes(now)
		owed = c.rates[0].Rescale(owed, c.rates[1])
	} else if until, ok := k.find(c.bucket.Id, hash); ok {
		owed = leaky.Time(atomic.LoadUint64(until)).Sub(now)
	}
	if owed == 0 {
		return
	}
	until := uint64(now.Add(owed))
	if c.is != 0 {
		k.calendar(c.limit, c.meter, c.is).begin(until)
	} else if bucket := k.place(c.bucket.Id, hash, now); bucket != nil {
		atomic.StoreUint64(bucket, until)
	}
}

// place returns the bucket of a meter and a hash, which has one from now on if there is room
// for it, or nil.
func (k *kernel) place(meter, hash uint64, now leaky.Time) *uint64 {
	if until, ok := k.find(meter, hash); ok {
		return until
	}
	for _, line := range lines(hash, uint64(len(k.buckets))) {
		l := &k.buckets[line]
		for i := range l.Tag {
			tag := atomic.LoadUint64(&l.Tag[i])
			if (tag == 0 || atomic.LoadUint64(&l.Until[i]) <= uint64(now)) &&
				atomic.CompareAndSwapUint64(&l.Tag[i], tag, meter|hash&(1<<48-1)) {
				return &l.Until[i]
			}
		}
	}
	return nil
}
