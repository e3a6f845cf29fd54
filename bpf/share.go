// Owner: Plane.mu. The programs charge packets at the same time.

package bpf

import (
	"maps"
	"sync/atomic"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// shareScale returns how much of the time of a bucket with parts passes in d.
func shareScale(d, parts uint64) uint64 {
	return d/shaper.Whole*parts + d%shaper.Whole*parts/shaper.Whole
}

// shareUnscale returns how long it takes until d of it has passed, rounded up; at most leaky.Forever.
func shareUnscale(d, parts uint64) uint64 {
	if d/parts >= uint64(leaky.Forever)/shaper.Whole {
		return uint64(leaky.Forever)
	}
	return d/parts*shaper.Whole + (d%parts*shaper.Whole+parts-1)/parts
}

// sub returns a - b, or 0 if that is negative.
func sub(a, b uint64) uint64 { return uint64(leaky.Time(a).Sub(leaky.Time(b))) }

// ofHot returns l for a hot bucket that was given parts, as load_terms in share.h does.
func (l kernelLease) ofHot(parts uint64) *kernelLease {
	l.Between = min(l.Between, shareScale(parts, shaper.Whole-l.Withheld))
	return &l
}

// partsAt returns what a bucket that was given parts has at boot, an instant of CLOCK_BOOTTIME.
func (l *kernelLease) partsAt(parts, boot uint64) uint64 {
	switch {
	case boot < l.End:
		return parts
	case boot < l.AloneAt:
		return min(parts, l.Between)
	}
	return l.Alone
}

// advance moves a share, of a bucket with a burst, to an instant, or to its beginning if that is later. It raises
// floor where parts grow. It does what advance_terms in share.h does.
func (l *kernelLease) advance(sh kernelShare, floor, burst, boot uint64) (_ kernelShare, _ uint64) {
	end := max(l.End, sh.From)
	aloneAt := max(l.AloneAt, end)
	began := sh.From
	boot = max(boot, began)
	move := func(to uint64) {
		sh.Vtime += shareScale(to-sh.From, sh.Parts)
		sh.From = to
	}
	if boot >= end && end < aloneAt {
		move(end)
		sh.Parts = min(sh.Parts, l.Between)
	}
	if boot >= aloneAt {
		move(aloneAt)
		if began < aloneAt && sh.Parts < l.Alone {
			floor = max(floor, sub(sh.Vtime, shareScale(burst, sh.Parts)))
		}
		sh.Parts = l.Alone
	}
	move(boot)
	return sh, floor
}

// when returns the first instant, not before boot, at which a unit may leave a bucket of a value. alone is whether the
// bucket is hot and its queue empty. It does what share_when in share.h does.
func (l *kernelLease) when(alone bool, sh kernelShare, value, boot uint64) uint64 {
	present := l.partsAt(sh.Parts, boot)
	end := max(l.End, sh.From)
	for _, next := range [...]struct{ until, parts uint64 }{
		{end, min(sh.Parts, l.Between)}, {max(l.AloneAt, end), l.Alone}, {uint64(leaky.Never), 0},
	} {
		if sh.Parts > 0 {
			t := leaky.Time(sh.From).Add(leaky.Time(shareUnscale(sub(value, sh.Vtime), sh.Parts)))
			if t = max(t, leaky.Time(boot)); uint64(t) < next.until {
				if !alone && sh.Parts != present {
					break
				}
				return uint64(t)
			}
		}
		sh.Vtime += shareScale(next.until-sh.From, sh.Parts)
		sh.From, sh.Parts = next.until, next.parts
	}
	return uint64(leaky.Never)
}

// lease returns the lease in effect.
func (k *kernel) lease() kernelLease { return k.leases[0].Copy[k.leases[0].Current&1] }

func (k *kernel) setLease(l *kernelLease) {
	slot := &k.leases[0]
	slot.Copy[(slot.Current+1)&1] = *l
	atomic.StoreUint64(&slot.Current, slot.Current+1)
}

func (b *kernelHotBucket) share() *kernelHotShare { return &b.Copy[b.Current&1] }

func (b *kernelHotBucket) setShare(s *kernelHotShare) {
	b.Copy[(b.Current+1)&1] = *s
	atomic.StoreUint64(&b.Current, b.Current+1)
}

// hotTag returns the word of the tag of the hot bucket at an index.
func (k *kernel) hotTag(i int) *uint64 {
	n := len(kernelHotLine{}.Tag)
	return &k.hotLines[i/n].Tag[i%n]
}

// hotProbes returns the indexes that the hot bucket with a tag may have.
func (k *kernel) hotProbes(tag uint64) (all []int) {
	n := len(kernelHotLine{}.Tag)
	for _, factor := range [...]uint64{0xd6e8feb86659fd93, 0x9e3779b97f4a7c15} {
		line := int(tag * factor >> 52)
		for i := range n {
			all = append(all, line*n+i)
		}
	}
	return all
}

// findHot returns the index of the hot bucket with a tag, or -1.
func (k *kernel) findHot(tag uint64) int {
	for _, i := range k.hotProbes(tag) {
		if *k.hotTag(i) == tag {
			return i
		}
	}
	return -1
}

// sharedMeter is the meter of a shared limit, as far as its share matters.
type sharedMeter struct {
	rate     [2]uint64 // a unit costs the first shifted by the second
	burst    uint64
	maxDelay uint64 // for which packets are queued if its bucket says so
	hold     uint64 // for which they may be although it does not, as they are charged on arrival

	inheritable uint64 // the most backlog that a new key inherits
}

// queuedUntil returns the last departure, not before boot, that a cold bucket of a value may have granted. It was
// charged under lease l, and has the share sh.
func (m *sharedMeter) queuedUntil(l *kernelLease, sh kernelShare, value, boot uint64) uint64 {
	if value == 0 { // nothing was ever charged
		return boot
	}
	last := boot
	if now, _ := l.advance(sh, 0, 0, boot); value > now.Vtime {
		last = min(l.when(false, sh, value, boot), boot+m.maxDelay)
	}
	return max(last, boot+m.hold)
}

// shareChange is a change of what the programs may use.
type shareChange struct {
	lease kernelLease         // the share of cold buckets with the parts only
	hot   map[uint64]hotParts // of buckets, by tag
	cold  []uint64            // tags of buckets that are cold again
	reset bool                // all are cold but those in hot

	meters map[uint64]sharedMeter // by number

	// settled is set to when all has left that was enqueued under more parts, by tag. Cold buckets that
	// remain so are not in it.
	settled map[uint64]uint64
}

// hotParts are the parts of a hot bucket, and the hash of its meter and key.
type hotParts struct{ parts, hash uint64 }

// setShares puts c into effect, at now, which is boot by the clock of leases. Of each bucket a program may use
// what it could before or what it can after, until it returns. It returns the number of hot buckets for
// which there is no room: all cold ones have no more than these.
func (k *kernel) setShares(c *shareChange, now leaky.Time, boot uint64) (lacking int) {
	c.settled = map[uint64]uint64{}
	u := shareUpdate{kernel: k, meters: c.meters, settled: c.settled, was: k.lease(), next: c.lease, now: now, boot: boot}
	if u.was.Cold.From == 0 { // the first: late enough that a credit is not before 0
		u.was.Cold = kernelShare{From: boot, Vtime: boot}
	}
	u.cold, _ = u.was.advance(u.was.Cold, 0, 0, boot)
	for number, m := range c.meters {
		atomic.StoreUint64(&k.bursts[number-1], m.burst)
	}
	if c.reset {
		clear(k.lacking)
	}
	hot := map[uint64]hotParts{}
	if boot >= k.retryAt {
		maps.Copy(hot, k.lacking)
		k.retryAt = boot + uint64(leaky.Second)
	}
	maps.Copy(hot, c.hot)
	ended := boot >= u.was.End || boot >= u.next.End // then what buckets have is not what they were given
	for i := range k.hotBuckets {
		tag, b := *k.hotTag(i), &k.hotBuckets[i]
		if _, ok := hot[tag]; tag == 0 || ok {
			continue
		}
		switch {
		case c.reset:
			u.cool(i)
		case ended || atomic.LoadUint64(&b.Last) > min(u.was.End, u.next.End): // granted as if the lease were not renewed
			hot[tag] = hotParts{b.share().Share.Parts, b.Hash}
		}
	}
	for _, tag := range c.cold {
		if i := k.findHot(tag); i >= 0 {
			u.cool(i)
		}
		delete(hot, tag)
		delete(k.lacking, tag)
	}
	for tag, h := range hot {
		if delete(k.lacking, tag); !u.give(tag, h) {
			k.lacking[tag] = h
		}
	}
	for _, h := range k.lacking {
		u.next.Cold.Parts = min(u.next.Cold.Parts, h.parts)
	}
	if parts := u.next.Cold.Parts; ended || parts != u.was.Cold.Parts {
		u.next.Cold = kernelShare{From: boot, Vtime: u.cold.Vtime, Parts: parts}
		for number, m := range c.meters {
			_, floor := u.was.advance(u.was.Cold, k.coldFloors[number-1], m.burst, boot)
			atomic.StoreUint64(&k.coldFloors[number-1], u.limitCredit(u.cold, floor, &u.next, parts, m.burst))
		}
	} else {
		u.next.Cold = u.was.Cold
	}
	k.setLease(&u.next)
	return len(k.lacking)
}

// shareUpdate is a change that is being made.
type shareUpdate struct {
	*kernel
	meters    map[uint64]sharedMeter
	settled   map[uint64]uint64
	was, next kernelLease
	cold      kernelShare // of was, at boot
	now       leaky.Time
	boot      uint64
}

// limitCredit returns the floor of a bucket that has a share, and gets parts then, under lease next: the credit that it
// has, as far as these allow.
func (u *shareUpdate) limitCredit(sh kernelShare, floor uint64, next *kernelLease, parts, burst uint64) uint64 {
	return max(floor, sub(sh.Vtime, shareScale(burst, min(sh.Parts, next.partsAt(parts, sh.From)))))
}

// give gives parts to the bucket with a tag, which is hot from now on. It returns false if there is no room.
func (u *shareUpdate) give(tag uint64, h hotParts) bool {
	m := u.meters[meterOf(tag)]
	i := u.findHot(tag)
	if i < 0 {
		return u.heat(tag, h, m)
	}
	u.set(i, tag, h.parts, m, u.was.ofHot(u.hotBuckets[i].share().Share.Parts))
	return true
}

// set gives parts to the hot bucket at an index, which was under a lease, from its last departure on. What waits for
// that leaves as it was to, and what comes later leaves after it.
func (u *shareUpdate) set(i int, tag, parts uint64, m sharedMeter, lease *kernelLease) {
	b := &u.hotBuckets[i]
	was, from := b.share(), max(u.boot, atomic.LoadUint64(&b.Last))
	sh, floor := lease.advance(was.Share, was.Floor, m.burst, from)
	next := u.next.ofHot(parts)
	u.settle(i, tag, lease, next.partsAt(parts, u.boot))
	b.setShare(&kernelHotShare{
		Share: kernelShare{From: from, Vtime: sh.Vtime, Parts: parts},
		Floor: u.limitCredit(sh, floor, next, parts, m.burst),
	})
}

// settle notes when the hot bucket at an index, which was under a lease and has parts from now on, is empty of what was
// enqueued under more.
func (u *shareUpdate) settle(i int, tag uint64, lease *kernelLease, parts uint64) {
	b := &u.hotBuckets[i]
	emptyAt, most := atomic.LoadUint64(&b.EmptyAt), lease.partsAt(b.share().Share.Parts, u.boot)
	if emptyAt >= u.was.AloneAt {
		most = max(most, u.was.Alone)
	}
	if emptyAt > u.boot && parts < most {
		u.settled[tag] = emptyAt
	}
}

// heat makes a bucket hot.
func (u *shareUpdate) heat(tag uint64, h hotParts, m sharedMeter) bool {
	for _, i := range u.hotProbes(tag) {
		if *u.hotTag(i) != 0 || u.boot < u.cooled[i]+uint64(reuseAfter) {
			continue
		}
		b := &u.hotBuckets[i]
		value := u.coldValue(tag, h.hash, u.cold, m, u.now)
		if _, known := u.lookup(tag&^tagHash, h.hash); !known {
			m.hold = 0 // nothing was charged on arrival that may be queued
		}
		last := m.queuedUntil(&u.was, u.was.Cold, value, u.boot)
		// As a charge would: what is added below is no more than the charges.
		_, floor := u.was.advance(u.was.Cold, u.coldFloors[meterOf(tag)-1], m.burst, u.boot)
		value = max(value, floor, u.cold.drained(m.burst))
		b.Hash, b.Reported, b.ShortAt, b.Last, b.EmptyAt = h.hash, b.Used, 0, last, last
		atomic.StoreUint64(&b.Value, value)
		b.setShare(&kernelHotShare{Share: u.was.Cold, Floor: u.coldFloors[meterOf(tag)-1]})
		u.set(i, tag, h.parts, m, &u.was)
		atomic.StoreUint64(u.hotTag(i), tag)
		atomic.AddUint64(&b.Value, sub(u.coldValue(tag, h.hash, u.cold, m, u.now), value)) // charged meanwhile
		return true
	}
	return false
}

// cool makes the hot bucket at an index cold.
func (u *shareUpdate) cool(i int) {
	b, tag := &u.hotBuckets[i], *u.hotTag(i)
	m, was, from := u.meters[meterOf(tag)], b.share(), max(u.boot, atomic.LoadUint64(&b.Last))
	lease := u.was.ofHot(was.Share.Parts)
	sh, floor := lease.advance(was.Share, was.Floor, m.burst, from)
	least := max(floor, sub(sh.Vtime, shareScale(m.burst, sh.Parts)))
	if from > u.boot { // what comes later does not overtake what waits
		least = sh.Vtime
	}
	value := max(atomic.LoadUint64(&b.Value), least)
	u.settle(i, tag, lease, u.next.partsAt(u.next.Cold.Parts, u.boot))
	cold, _ := u.next.advance(kernelShare{From: u.boot, Vtime: u.cold.Vtime, Parts: u.next.Cold.Parts}, 0, 0, from)
	to, until := u.lookupOrInsert(tag&^tagHash, b.Hash, u.now, u.cold), sub(cold.Vtime+value, sh.Vtime)
	if to != nil {
		atomic.StoreUint64(to, until)
	} else { // the table is full: as if the bucket were evicted at once
		u.raiseFloors(b.Hash, u.now.Add(u.cold.drainsIn(until, m.burst)))
	}
	atomic.StoreUint64(u.hotTag(i), 0)
	u.cooled[i] = u.boot
	if to != nil {
		atomic.AddUint64(to, sub(atomic.LoadUint64(&b.Value), value)) // charged meanwhile
	}
}

// reuseAfter is when no program uses a hot bucket any more that it has found, in ticks.
const reuseAfter = leaky.Second / 100

// withdrawCredit makes the buckets of a meter begin without credit, at boot.
func (k *kernel) withdrawCredit(number, boot uint64) {
	l := k.lease()
	cold, _ := l.advance(l.Cold, 0, 0, boot)
	atomic.StoreUint64(&k.coldFloors[number-1], cold.Vtime)
	for i := range k.hotBuckets {
		if tag := *k.hotTag(i); tag != 0 && meterOf(tag) == number {
			s := *k.hotBuckets[i].share()
			sh, _ := l.ofHot(s.Share.Parts).advance(s.Share, 0, 0, boot)
			s.Floor = sh.Vtime
			k.hotBuckets[i].setShare(&s)
		}
	}
}

// coldValue returns the value of the bucket with a tag in the table, or that of a new one. sh is what cold
// buckets have at now.
func (k *kernel) coldValue(tag, hash uint64, sh kernelShare, m sharedMeter, now leaky.Time) uint64 {
	if until, ok := k.lookup(tag&^tagHash, hash); ok {
		return atomic.LoadUint64(until)
	}
	if tag&neverEvicted != 0 {
		return 0
	}
	backlog := shareScale(uint64(k.floor(hash).Sub(now)), sh.Parts)
	return sh.drained(m.burst) + min(backlog, shareScale(m.inheritable, sh.Parts))
}

// drained returns the value of a bucket with a burst that has drained by the time of sh.
func (sh kernelShare) drained(burst uint64) uint64 { return sub(sh.Vtime, shareScale(burst, sh.Parts)) }

// drainsIn returns how long a bucket of a value takes to drain.
func (sh kernelShare) drainsIn(value, burst uint64) leaky.Time {
	return leaky.Time(shareUnscale(sub(value, sh.drained(burst)), max(sh.Parts, leastDraining)))
}

// leastDraining are the least parts at which a bucket is taken to drain, as set_shared_clock does.
const leastDraining = shaper.Whole >> 6

// sharedBacklog returns the backlog of the bucket of a meter and a hash, as time at the whole rate, and how
// long the next unit waits.
func (k *kernel) sharedBacklog(m *kernelMeter, hash uint64, now leaky.Time, boot uint64) (backlog, wait leaky.Time) {
	l, tag := k.lease(), m.Tag|hash&tagHash
	alone := false
	cold, _ := l.advance(l.Cold, 0, 0, boot)
	share, floor := l.Cold, k.coldFloors[meterOf(tag)-1]
	value := k.coldValue(tag, hash, cold, sharedMeter{burst: m.Burst, inheritable: uint64(m.inheritable())}, now)
	if i := k.findHot(tag); i >= 0 {
		b := &k.hotBuckets[i]
		alone = atomic.LoadUint64(&b.Last) <= boot
		share, floor, value = b.share().Share, b.share().Floor, atomic.LoadUint64(&b.Value)
		l = *l.ofHot(share.Parts)
	}
	sh, floor := l.advance(share, floor, m.Burst, boot)
	burst := shareScale(m.Burst, sh.Parts)
	value = max(value, floor, sub(sh.Vtime, burst))
	queued := shareScale(sub(share.From, boot), sh.Parts) // about: it has been granted under other parts
	return leaky.Time(sub(value+burst, sh.Vtime) + queued), leaky.Time(l.when(alone, share, value, boot) - boot)
}

// lastSharedDeparture returns when all packets have left that wait under shared limits, which were charged under
// lease l, not before boot.
func (k *kernel) lastSharedDeparture(l *kernelLease, meters map[uint64]sharedMeter, boot uint64) uint64 {
	last := boot
	for i := range k.buckets {
		for j, tag := range &k.buckets[i].Tag {
			if m, ok := meters[meterOf(tag)]; ok && tag&sharedTag != 0 {
				last = max(last, m.queuedUntil(l, l.Cold, atomic.LoadUint64(&k.buckets[i].DrainedAt[j]), boot))
			}
		}
	}
	for i := range k.hotBuckets {
		if *k.hotTag(i) != 0 {
			last = max(last, atomic.LoadUint64(&k.hotBuckets[i].EmptyAt))
		}
	}
	return last
}
