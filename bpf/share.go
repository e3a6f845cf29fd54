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

// advance moves a share, of a bucket with a burst, to an instant. It raises floor where parts grow. It
// does what advance_terms in share.h does.
func (l *kernelLease) advance(sh kernelShare, floor, burst, boot uint64) (_ kernelShare, _ uint64) {
	end := max(l.End, sh.From)
	aloneAt := max(l.AloneAt, end)
	began := sh.From
	move := func(to uint64) {
		sh.Vtime += shareScale(sub(to, sh.From), sh.Parts)
		sh.From = max(sh.From, to)
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

// when returns the first instant, not before boot, at which a unit may leave a bucket of a value.
func (l *kernelLease) when(sh kernelShare, value, boot uint64) uint64 {
	end := max(l.End, sh.From)
	for _, next := range [...]struct{ until, parts uint64 }{
		{end, min(sh.Parts, l.Between)}, {max(l.AloneAt, end), l.Alone}, {uint64(leaky.Never), 0},
	} {
		if sh.Parts > 0 {
			t := leaky.Time(sh.From).Add(leaky.Time(shareUnscale(sub(value, sh.Vtime), sh.Parts)))
			if t = max(t, leaky.Time(boot)); uint64(t) < next.until {
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
	maxDelay uint64 // for which packets are queued under it
	hold     uint64 // for which they may be in addition, as they are charged on arrival
}

// shareChange is a change of what the programs may use.
type shareChange struct {
	lease kernelLease         // the share of cold buckets with the parts only
	hot   map[uint64]hotParts // of buckets, by tag
	cold  []uint64            // tags of buckets that are cold again
	reset bool                // all are cold but those in hot

	meters map[uint64]sharedMeter // by number

	// settled is set to when all has left that was enqueued under more parts, by tag.
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
	hot := maps.Clone(c.hot)
	ended := boot >= u.was.End || boot >= u.next.End // then what buckets have is not what they were given
	if c.reset || ended {
		for i := range k.hotBuckets {
			tag := *k.hotTag(i)
			if _, ok := hot[tag]; tag == 0 || ok {
				continue
			}
			if c.reset {
				u.cool(i)
			} else {
				hot[tag] = hotParts{k.hotBuckets[i].share().Share.Parts, k.hotBuckets[i].Hash}
			}
		}
	}
	for _, tag := range c.cold {
		if i := k.findHot(tag); i >= 0 {
			u.cool(i)
			delete(hot, tag)
		}
	}
	for tag, h := range hot {
		if !u.give(tag, h) {
			u.next.Cold.Parts = min(u.next.Cold.Parts, h.parts)
			lacking++
		}
	}
	if parts := u.next.Cold.Parts; ended || parts != u.was.Cold.Parts {
		u.next.Cold = kernelShare{From: boot, Vtime: u.cold.Vtime, Parts: parts}
		for number, m := range c.meters {
			_, floor := u.was.advance(u.was.Cold, k.coldFloors[number-1], m.burst, boot)
			atomic.StoreUint64(&k.coldFloors[number-1], u.grow(u.cold, floor, parts, m.burst))
		}
	} else {
		u.next.Cold = u.was.Cold
	}
	k.setLease(&u.next)
	return lacking
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

// grow returns the floor of a bucket that has a share, and now gets parts.
func (u *shareUpdate) grow(sh kernelShare, floor, parts, burst uint64) uint64 {
	if u.next.partsAt(parts, u.boot) <= sh.Parts {
		return floor
	}
	return max(floor, sub(sh.Vtime, shareScale(burst, sh.Parts)))
}

// give gives parts to the bucket with a tag, which is hot from now on. It returns false if there is no room.
func (u *shareUpdate) give(tag uint64, h hotParts) bool {
	m := u.meters[meterOf(tag)]
	i := u.findHot(tag)
	if i < 0 {
		return u.heat(tag, h, m)
	}
	b := &u.hotBuckets[i]
	was := b.share()
	sh, floor := u.was.advance(was.Share, was.Floor, m.burst, u.boot)
	u.set(b, tag, was.Share, sh, floor, was.NotBefore, h.parts, m)
	return true
}

// set gives parts to a hot bucket that had the share was, which is sh by now.
func (u *shareUpdate) set(b *kernelHotBucket, tag uint64, was, sh kernelShare, floor, notBefore, parts uint64, m sharedMeter) {
	last := u.lastDeparture(was, sh, atomic.LoadUint64(&b.Value), m)
	if u.next.partsAt(parts, u.boot) < sh.Parts {
		u.settled[tag] = last + m.hold
	}
	notBefore = max(notBefore, last)
	b.setShare(&kernelHotShare{
		Share: kernelShare{From: u.boot, Vtime: sh.Vtime, Parts: parts},
		Floor: u.grow(sh, floor, parts, m.burst), NotBefore: notBefore,
	})
}

// lastDeparture returns when all has left that was charged to a bucket of a value, with the share was,
// which is sh by now.
func (u *shareUpdate) lastDeparture(was, sh kernelShare, value uint64, m sharedMeter) uint64 {
	if sh.Parts == 0 || value <= sh.Vtime {
		return u.boot
	}
	return min(u.was.when(was, value, u.boot), u.boot+m.maxDelay)
}

// heat makes a bucket hot.
func (u *shareUpdate) heat(tag uint64, h hotParts, m sharedMeter) bool {
	for _, i := range u.hotProbes(tag) {
		if *u.hotTag(i) != 0 || u.boot < u.cooled[i]+uint64(reuseAfter) {
			continue
		}
		b := &u.hotBuckets[i]
		value := u.coldValue(tag, h.hash)
		b.Hash, b.Reported, b.ShortAt = h.hash, b.Used, 0
		atomic.StoreUint64(&b.Value, value)
		_, floor := u.was.advance(u.was.Cold, u.coldFloors[meterOf(tag)-1], m.burst, u.boot)
		u.set(b, tag, u.was.Cold, u.cold, floor, 0, h.parts, m)
		atomic.StoreUint64(u.hotTag(i), tag)
		atomic.AddUint64(&b.Value, sub(u.coldValue(tag, h.hash), value)) // charged meanwhile
		return true
	}
	return false
}

// cool makes the hot bucket at an index cold.
func (u *shareUpdate) cool(i int) {
	b, tag := &u.hotBuckets[i], *u.hotTag(i)
	m, was := u.meters[meterOf(tag)], b.share()
	sh, floor := u.was.advance(was.Share, was.Floor, m.burst, u.boot)
	floor = max(floor, sub(sh.Vtime, shareScale(m.burst, sh.Parts)))
	value := max(atomic.LoadUint64(&b.Value), floor)
	if u.next.partsAt(u.next.Cold.Parts, u.boot) < sh.Parts {
		u.settled[tag] = u.lastDeparture(was.Share, sh, value, m) + m.hold
	}
	to := u.lookupOrInsert(tag&^tagHash, b.Hash, u.now, u.cold.Vtime)
	if to != nil { // otherwise the table is full
		atomic.StoreUint64(to, sub(u.cold.Vtime+value, sh.Vtime))
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
			sh, _ := l.advance(s.Share, 0, 0, boot)
			s.Floor = sh.Vtime
			k.hotBuckets[i].setShare(&s)
		}
	}
}

// coldValue returns the value of the bucket with a tag in the table, or 0.
func (k *kernel) coldValue(tag, hash uint64) uint64 {
	if until, ok := k.lookup(tag&^tagHash, hash); ok {
		return atomic.LoadUint64(until)
	}
	return 0
}

// sharedBacklog returns the backlog of the bucket of a meter and a hash, as time at the whole rate, and how
// long the next unit waits.
func (k *kernel) sharedBacklog(m *kernelMeter, hash, boot uint64) (backlog, wait leaky.Time) {
	l, tag := k.lease(), m.Tag|hash&tagHash
	share, floor, value := l.Cold, k.coldFloors[meterOf(tag)-1], k.coldValue(tag, hash)
	if i := k.findHot(tag); i >= 0 {
		b := &k.hotBuckets[i]
		share, floor, value = b.share().Share, b.share().Floor, atomic.LoadUint64(&b.Value)
	}
	sh, floor := l.advance(share, floor, m.Burst, boot)
	burst := shareScale(m.Burst, sh.Parts)
	value = max(value, floor, sub(sh.Vtime, burst))
	return leaky.Time(sub(value+burst, sh.Vtime)), leaky.Time(l.when(share, value, boot) - boot)
}

// lastSharedDeparture returns when all packets have left that wait under shared limits, not before boot.
func (k *kernel) lastSharedDeparture(boot uint64) uint64 {
	l, last := k.lease(), boot
	add := func(sh kernelShare, value uint64) {
		if when := l.when(sh, value, boot); when != uint64(leaky.Never) {
			last = max(last, when)
		}
	}
	for i := range k.buckets {
		for j, tag := range &k.buckets[i].Tag {
			if tag&sharedTag != 0 {
				add(l.Cold, atomic.LoadUint64(&k.buckets[i].DrainedAt[j]))
			}
		}
	}
	for i := range k.hotBuckets {
		if b := &k.hotBuckets[i]; *k.hotTag(i) != 0 {
			add(b.share().Share, atomic.LoadUint64(&b.Value))
		}
	}
	return last
}
