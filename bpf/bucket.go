package bpf

import (
	"encoding/binary"
	"sync/atomic"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// Bucket returns the state of the bucket of f, routed as r, under limit i of the current
// policy. It returns false if limit i has no buckets here, or has one for each connection,
// which a Flow does not identify as packets do.
func (p *Plane) Bucket(i int, f *shaper.Flow, r shaper.Route) (b shaper.BucketState, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.policy == nil || i >= p.policy.Len() {
		return b, false
	}
	return p.bucket(i, p.policy.Key(i, f, r), monotonic())
}

// KeyBucket returns the state of the bucket of a key of limit i, like [Plane.Bucket].
func (p *Plane) KeyBucket(i int, k shaper.Key) (b shaper.BucketState, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bucket(i, k, monotonic())
}

func (p *Plane) bucket(i int, k shaper.Key, now leaky.Time) (b shaper.BucketState, ok bool) {
	if p.kernel == nil || p.policy == nil || i >= p.policy.Len() {
		return b, false
	}
	l := p.policy.Limit(i)
	if !l.InPacketPlane() || l.Key&shaper.KeyConnection != 0 {
		return b, false
	}
	shape := p.policy.Shape(i)
	limit := encodeLimit(p.policy, i, p.numbers.limits[l.Name], p.kernel.Hashes)
	key := p.kernel.hashKey(l.Key, &k, p.attachmentNumber(p.numbers.attachments, k.Origin))
	var backlog, next [len(limit.Meter)]leaky.Time
	for j := range limit.Meter {
		switch m := &limit.Meter[j]; {
		case m.Rate.Mult == 0:
		case l.Shared:
			backlog[j], next[j] = p.kernel.sharedBacklog(m, join(m, key), now, uint64(boottime()))
		default:
			backlog[j] = p.kernel.drainTime(m, join(m, key), now).Sub(now)
			next[j] = backlog[j].Sub(leaky.Time(m.Burst))
			if j == int(meterNew) {
				next[j] = newConnsDepart(p.policy.NewConnections(i), backlog[j], now).Sub(now)
			}
		}
	}
	for j, shift := range slotShiftsOf(p.policy, i) {
		if shift != 0 {
			backlog[j], next[j] = p.kernel.calendar(limit.Id, j, shift).backlog(now)
			next[j] = next[j].Sub(leaky.Time(limit.Meter[j].Burst))
		}
	}
	b.BacklogBytes = shape.Bytes.Units(backlog[meterBytes])
	b.BacklogPackets = shape.Packets.Units(backlog[meterPackets])
	b.NextDeparture = max(next[meterBytes], next[meterPackets]).Duration()
	b.NextAdmission = next[meterNew].Duration()
	if l.MaxConnections > 0 {
		b.InFlight = p.kernel.inFlight(join(&limit.Meter[meterNew], key))
	}
	return b, true
}

// ForgetBucket forgets what the buckets of a key of limit i owe: its packets and connections may pass as those of a new key. It returns
// false if the limit has no buckets here that can be told apart by such a key, or one that is a calendar, or shared by hosts.
func (p *Plane) ForgetBucket(i int, k shaper.Key) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.kernel == nil || p.policy == nil || i >= p.policy.Len() {
		return false
	}
	l := p.policy.Limit(i)
	if !l.InPacketPlane() || l.Shared || l.Key&shaper.KeyConnection != 0 || p.policy.Calendars()&(1<<i) != 0 {
		return false
	}
	limit := encodeLimit(p.policy, i, p.numbers.limits[l.Name], p.kernel.Hashes)
	key := p.kernel.hashKey(l.Key, &k, p.attachmentNumber(p.numbers.attachments, k.Origin))
	for j := range limit.Meter {
		if until, ok := p.kernel.lookup(limit.Meter[j].Tag, join(&limit.Meter[j], key)); ok {
			atomic.StoreUint64(until, 0)
		}
	}
	return true
}

// newConnsDepart returns when a bucket of new connections, which drains after a time, admits the next one.
func newConnsDepart(s *leaky.Shape, backlog, now leaky.Time) leaky.Time {
	var b leaky.Bucket
	b.SetDrainTimes(0, backlog, now)
	return b.Depart(s, now)
}

// attachmentNumber returns the number, of those by name, of the attachment that keys refer to by id.
func (p *Plane) attachmentNumber(numbers map[string]uint32, id uint16) uint32 {
	for name, number := range numbers {
		if p.shaper.AttachmentID(name) == id {
			return number
		}
	}
	return 0
}

// hashKey hashes the given fields of a key, as key.h does.
func (k *kernel) hashKey(fields shaper.Fields, key *shaper.Key, attachment uint32) (hash [2]uint64) {
	add := func(word uint64, n int) {
		hash[0] += k.Hashes[n][0] * word
		hash[1] += k.Hashes[n][1] * word
	}
	if fields&(shaper.KeySource|shaper.KeyDestination) != 0 {
		for i := range 4 {
			add(uint64(binary.BigEndian.Uint32(key.Address[4*i:])), i)
		}
	}
	add(uint64(key.ASN), 4)
	add(uint64(key.Country), 16)
	at := uint64(0)
	if fields&shaper.KeyAttach != 0 {
		at = uint64(attachment + 1)
	}
	add(uint64(key.Port)|at<<16, 5)
	return hash
}

// join combines the hashes of a meter and a key, as key.h does.
func join(m *kernelMeter, key [2]uint64) uint64 {
	const upper = 1<<64 - 1<<32
	h := (m.Hash[0]+key[0])&upper | (m.Hash[1]+key[1])>>32
	h = (h ^ h>>32) * 0xd6e8feb86659fd93
	return h ^ h>>32
}

// probeLines returns the two lines, of n, that may contain the entry of a hash.
func probeLines(hash, n uint64) [2]uint32 {
	return [2]uint32{uint32(hash >> 32 * n >> 32), uint32(hash * 0x9e3779b97f4a7c15 >> 32 * n >> 32)}
}

// lookup returns the drain time of the bucket of a meter and a hash, or false.
func (k *kernel) lookup(meter, hash uint64) (until *uint64, ok bool) {
	tag := meter | hash&tagHash
	for _, line := range probeLines(hash, uint64(len(k.buckets))) {
		l := &k.buckets[line]
		for i := range l.Tag {
			if atomic.LoadUint64(&l.Tag[i]) == tag {
				return &l.DrainedAt[i], true
			}
		}
	}
	return nil, false
}

// lookupOrInsert returns the drain time of the bucket of a meter and a hash, and inserts the bucket if
// necessary. It returns nil if the table is full. cold is what cold buckets of shared limits have at now.
func (k *kernel) lookupOrInsert(meter, hash uint64, now leaky.Time, cold kernelShare) *uint64 {
	if until, ok := k.lookup(meter, hash); ok {
		return until
	}
	for _, line := range probeLines(hash, uint64(len(k.buckets))) {
		l := &k.buckets[line]
		for i := range l.Tag {
			tag, until, drained := atomic.LoadUint64(&l.Tag[i]), atomic.LoadUint64(&l.DrainedAt[i]), uint64(now)
			if tag&sharedTag != 0 {
				drained = cold.drained(k.bursts[meterOf(tag)-1])
			}
			if (tag == 0 || tag&neverEvicted == 0 && until <= drained) &&
				atomic.CompareAndSwapUint64(&l.Tag[i], tag, meter|hash&tagHash) {
				atomic.CompareAndSwapUint64(&l.DrainedAt[i], until, 0)
				return &l.DrainedAt[i]
			}
		}
	}
	return nil
}

// drainTime returns the drain time of the bucket of a meter and a hash, or that of a new bucket.
func (k *kernel) drainTime(m *kernelMeter, hash uint64, now leaky.Time) leaky.Time {
	if until, ok := k.lookup(m.Tag, hash); ok {
		return leaky.Time(atomic.LoadUint64(until))
	}
	if m.Tag&neverEvicted != 0 {
		return 0
	}
	return min(k.floor(hash), now.Add(m.inheritable()))
}

// floor returns the floor of the lines that may contain the bucket of a hash.
func (k *kernel) floor(hash uint64) leaky.Time {
	at := probeLines(hash, uint64(len(k.buckets)))
	return leaky.Time(max(atomic.LoadUint64(&k.floors[at[0]]), atomic.LoadUint64(&k.floors[at[1]])))
}

// raiseFloors raises the floors of these lines to an instant.
func (k *kernel) raiseFloors(hash uint64, until leaky.Time) {
	for _, line := range probeLines(hash, uint64(len(k.buckets))) {
		floor := &k.floors[line]
		for was := atomic.LoadUint64(floor); was < uint64(until); was = atomic.LoadUint64(floor) {
			if atomic.CompareAndSwapUint64(floor, was, uint64(until)) {
				break
			}
		}
	}
}

// inFlight returns the number of slots that the key of a hash holds.
func (k *kernel) inFlight(hash uint64) int {
	words := len(kernelSlotLine{}.Word)
	for _, line := range probeLines(hash, uint64(k.ConnSlots.MaxEntries())) {
		for i := range words {
			word := atomic.LoadUint64(&k.slots[int(line)*words+i])
			if n := word & slotCount; n > 0 && n <= slotMax && word>>slotBits == hash<<slotBits>>slotBits {
				return int(n)
			}
		}
	}
	return 0
}
