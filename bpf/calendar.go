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

// begin has all before from be taken, and nothing behind.
func (c calendar) begin(from uint64) {
	atomic.StoreUint64(&c.From, from)
	for i := range c.Slot {
		atomic.StoreUint64(&c.Slot[i], 0)
	}
	c.open()
}

// open has all slots be looked at again.
func (c calendar) open() {
	for i := range c.Closed {
		atomic.StoreUint64(&c.Closed[i], 0)
	}
	atomic.StoreUint64(&c.Hint, 0)
}

// withdraw gives up what is taken of slots from an instant on, and returns how much that was.
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

// carry is a meter of a limit that changes from a bucket to a calendar or back, or whose
// calendar changes.
type carry struct {
	limit  uint32
	meter  int
	bucket kernelMeter
	was    uint8
	is     uint8
	rates  [2]leaky.Rate

	at   leaky.Time // when it was carried over
	owed leaky.Time // by then, from then on
}

// carries returns the meters of known limits that p moves from a bucket to a calendar or back, or
// to another calendar.
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
				all = append(all, carry{known.Number, j, im.policy.Limit[i].Meter[j], known.Slotted[j], slotted[j], [2]leaky.Rate{was[j], is[j]}, 0, 0})
			}
		}
	}
	return all
}

// carryOver has what is charged under the next policy begin behind what is owed. A bucket's
// rate has been changed already.
func (k *kernel) carryOver(c *carry, now leaky.Time) {
	c.at = now
	c.owed = k.owedBy(c)
	if c.owed == 0 {
		return
	}
	until := uint64(now.Add(c.rescaled(c.owed)))
	switch {
	case c.was != 0 && c.is != 0: // in the same place, where packets are charged meanwhile
		cal := k.calendar(c.limit, c.meter, c.was)
		ahead := leaky.Time(atomic.SwapUint64(&cal.From, until)).Sub(now)
		c.owed = max(c.owed, ahead.Add(cal.withdraw(now.Add(ahead))))
		cal.open()
		atomic.AddUint64(&cal.From, uint64(now.Add(c.rescaled(c.owed)))-until)
	case c.is != 0:
		k.calendar(c.limit, c.meter, c.is).begin(until)
	default:
		if bucket := k.place(c.bucket.Id, join(&c.bucket, [2]uint64{}), now); bucket != nil {
			atomic.StoreUint64(bucket, until)
		}
	}
}

// settle adds what packets were charged as before since it was carried over. None is any more.
func (k *kernel) settle(c *carry) {
	var more leaky.Time
	switch {
	case c.was == c.is: // the slots are the same, and what is taken of them as well
	case c.was != 0 && c.is != 0:
		more = k.calendar(c.limit, c.meter, c.was).withdraw(c.at)
	default:
		more = k.owedBy(c).Sub(c.owed)
	}
	if more == 0 {
		return
	}
	word := &k.calendar(c.limit, c.meter, c.is).From
	if c.is == 0 {
		if word = k.place(c.bucket.Id, join(&c.bucket, [2]uint64{}), c.at); word == nil {
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

// owedBy returns what is owed from when it was carried over on, as it was kept before.
func (k *kernel) owedBy(c *carry) (owed leaky.Time) {
	if c.was != 0 {
		owed, _ = k.calendar(c.limit, c.meter, c.was).owes(c.at)
	} else if until, ok := k.find(c.bucket.Id, join(&c.bucket, [2]uint64{})); ok { // of the key of all
		owed = leaky.Time(atomic.LoadUint64(until)).Sub(c.at)
	}
	return owed
}

// rescaled returns what was kept in a calendar at the rate there is now.
func (c *carry) rescaled(owed leaky.Time) leaky.Time {
	if c.was == 0 {
		return owed
	}
	return c.rates[0].Rescale(owed, c.rates[1])
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
