package shaper

import (
	"hash/maphash"
	"math/bits"
	"unsafe"

	"shaperd.dev/shaperd/leaky"
)

// table is a hash table of buckets by key, with a fixed number of slots and without
// pointers, so that the garbage collector does not scan it.
//
// A key belongs in one of two groups of sixteen slots, and is inserted into the one with
// more room (Azar, Broder, Karlin and Upfal, "Balanced allocations", 1999), which
// fills nearly all slots before a group overflows. A drained bucket counts as room: it
// equals a new one. The tags of a group, a byte of each key's hash, share two words: the
// tags of a million keys stay in cache, and a lookup reads one slot.
//
// If neither group has room the key evicts the bucket that drains first, and the group's
// floor keeps the evicted backlog. A new bucket inherits the floors of its groups, as the
// smallest counter is inherited in Space-Saving (Metwally, Agrawal and El Abbadi, ICDT
// 2005): a key that is not in the table never has a larger backlog than these, so a flood
// of keys can slow new keys down, but cannot gain any key an empty bucket. Floors are
// shared by the keys of all limits, and backlogs of one limit may take hours to drain: a
// new bucket inherits no more than the maximum backlog of its own limit.
type table struct {
	tags      [][2]uint64    // by group, a byte for each slot; 0 is empty
	floors    []leaky.Bucket // by group
	limits    []tableLimit   // by Key.Limit
	slots     []slot
	seed      maphash.Seed
	entries   int
	migration *migration // pending for some groups; nil when all are migrated

	evictedDrained, evictedBacklogged uint64
}

// tableLimit is what the buckets of one limit have in common.
type tableLimit struct {
	whole  *leaky.Shape // of the last policy with the limit; nil if it is unknown
	shared bool         // in that policy
	share  leaky.Share  // of whole, at which the buckets are
	keyed  *keyedShapes // of the buckets, if they differ; nil if they have those of share
	fresh  leaky.Bucket // of a key that is not in the table: not empty if the limit is shared
}

type slot struct {
	key    Key
	bucket leaky.Bucket
}

const (
	groupSize = 16
	lowBits   = 0x0101010101010101
	highBits  = 0x8080808080808080

	// spareDivisor makes a fifth more slots than the promised number of keys: with these,
	// about one in 100,000 random keys at most evicts another that has a backlog.
	spareDivisor = 5

	// minTag is the lowest tag of a key. It is not 1, which differs from the tag of an
	// empty slot in one bit, where matches may return a false positive: the zero Key
	// would be found in an empty slot.
	minTag = 2

	// keyBytes is the size of the fields of a Key; padding follows.
	keyBytes = unsafe.Offsetof(Key{}.Country) + unsafe.Sizeof(Key{}.Country)
)

func newTable(keys int) *table {
	groups := max(1, (keys+keys/spareDivisor+groupSize-1)/groupSize)
	return &table{
		tags:   make([][2]uint64, groups),
		floors: make([]leaky.Bucket, groups),
		slots:  make([]slot, groups*groupSize),
		seed:   maphash.MakeSeed(),
	}
}

// migration is a change of the shares of buckets. A group is migrated when one of its keys
// is looked up, or by [table.migrateSome]: a million buckets at once would block all traffic
// for 10 ms. No bucket of a group is touched before its migration, so the result is the
// same as at the instant of the change.
type migration struct {
	at      leaky.Time
	changes map[uint32]shareChange // by Key.Limit
	pending []uint64               // bitmap of groups that are not migrated yet
	next    int                    // word of pending; those before it are zero
}

// shareChange is the change for the buckets of one limit.
type shareChange struct {
	from, to           leaky.Share
	fromKeyed, toKeyed *keyedShapes // in place of those, for limits with tiers
	enforce            bool         // the limit only observed before
}

// apply changes b, the bucket of k, at now.
func (c *shareChange) apply(k *Key, b *leaky.Bucket, now leaky.Time) {
	from, to := c.from, c.to
	if c.fromKeyed != nil {
		from.Shape = *c.fromKeyed.of(k)
	}
	if c.toKeyed != nil {
		to.Shape = *c.toKeyed.of(k)
	}
	if from.Parts == Whole && to.Parts == Whole {
		b.Rescale(&from.Shape, &to.Shape, now)
	} else {
		b.Reshare(&from, &to, now)
	}
	if c.enforce {
		b.CapToBurst(&to.Shape, now)
	}
}

// probe is the hash of a key: the groups that it may be in, and its tag.
type probe struct {
	first, second uint32
	tag           uint64 // in all eight bytes
}

// probe returns the probe of k, and migrates its groups.
func (t *table) probe(k *Key) probe {
	h := maphash.Bytes(t.seed, unsafe.Slice((*byte)(unsafe.Pointer(k)), keyBytes))
	n := uint64(len(t.tags))
	p := probe{
		first:  uint32((h & (1<<32 - 1)) * n >> 32),
		second: uint32((h * 0x9e3779b97f4a7c15 >> 32) * n >> 32),
		tag:    max(h>>56, minTag) * lowBits,
	}
	if t.migration != nil {
		t.migrate(p.first)
		t.migrate(p.second)
	}
	return p
}

// startMigration migrates all buckets to new shares as of now. The floors keep their drain
// times, since they are of keys of any limit.
func (t *table) startMigration(changes map[uint32]shareChange, now leaky.Time) {
	if len(changes) == 0 {
		return
	}
	for t.migrateSome() {
	}
	for id, change := range changes {
		l := t.limit(id)
		l.share = change.to
		change.apply(&Key{}, &l.fresh, now)
	}
	due := make([]uint64, (len(t.tags)+63)/64)
	for i := range due {
		due[i] = ^uint64(0)
	}
	t.migration = &migration{at: now, changes: changes, pending: due}
}

// migrateSome migrates up to 64 groups. It reports whether there are more.
func (t *table) migrateSome() (more bool) {
	c := t.migration
	if c == nil {
		return false
	}
	for group := c.next * 64; group < min(c.next*64+64, len(t.tags)); group++ {
		t.migrate(uint32(group))
	}
	if c.next++; c.next == len(c.pending) {
		t.migration = nil
	}
	return t.migration != nil
}

// migrate migrates a group, if it is pending.
func (t *table) migrate(group uint32) {
	c := t.migration
	if c.pending[group/64]>>(group%64)&1 == 0 {
		return
	}
	c.pending[group/64] &^= 1 << (group % 64)
	t.eachInGroup(int(group), func(k *Key, b *leaky.Bucket) {
		if change, ok := c.changes[k.Limit]; ok {
			change.apply(k, b, c.at)
		}
	})
}

// lookup returns the slot of k, or nil. Both groups are searched as one: which of
// them holds a key is a coin toss that no branch predictor gets right.
func (t *table) lookup(k *Key, p probe) *slot {
	a, b := &t.tags[p.first], &t.tags[p.second]
	m := matches(a[0], p.tag) | matches(a[1], p.tag)<<8 | matches(b[0], p.tag)<<16 | matches(b[1], p.tag)<<24
	for ; m != 0; m &= m - 1 {
		i := uint32(bits.TrailingZeros64(m))
		group := p.first
		if i >= groupSize {
			group = p.second
		}
		if s := &t.slots[group*groupSize+i%groupSize]; s.key == *k {
			return s
		}
	}
	return nil
}

// matches returns a bitmap of the bytes of tags that equal tag. Bits above the
// lowest may be false positives, which the comparison of keys rejects.
func matches(tags, tag uint64) uint64 {
	x := tags ^ tag
	m := (x - lowBits) &^ x & highBits
	return m >> 7 * 0x0102040810204080 >> 56 // gathers the high bits of the bytes
}

// lookupOrInsert returns the slot of k. If k has none it is inserted, which may evict
// another key.
func (t *table) lookupOrInsert(k *Key, p probe, now leaky.Time) *slot {
	if s := t.lookup(k, p); s != nil {
		return s
	}
	i := t.pickVictim(p, now)
	s := &t.slots[i]
	group, shift := i/groupSize, i%8*8
	tags := &t.tags[group][i%groupSize/8]
	switch {
	case *tags>>shift&0xff == 0:
		t.entries++
	case s.bucket.Drained(now):
		t.evictedDrained++
	default:
		t.evictedBacklogged++
		t.floors[group].Inherit(s.bucket)
	}
	*s = slot{key: *k, bucket: t.newBucket(k, p, now)}
	*tags = *tags&^(0xff<<shift) | p.tag&(0xff<<shift)
	return s
}

// pickVictim returns the slot in which to insert a new key with probe p: the one that
// drains first in the group with more room.
func (t *table) pickVictim(p probe, now leaky.Time) uint32 {
	first, room1 := t.scanGroup(p.first, now)
	second, room2 := t.scanGroup(p.second, now)
	if room2 > room1 || room2 == 0 && room1 == 0 && t.slots[second].bucket.DrainedAt() < t.slots[first].bucket.DrainedAt() {
		return second
	}
	return first
}

// scanGroup returns the slot of a group that drains first, and the number of slots that
// have drained or are empty.
func (t *table) scanGroup(group uint32, now leaky.Time) (soonest uint32, room int) {
	soonest = group * groupSize
	for i := soonest; i < (group+1)*groupSize; i++ {
		if t.slots[i].bucket.Drained(now) {
			room++
		}
		if t.slots[i].bucket.DrainedAt() < t.slots[soonest].bucket.DrainedAt() {
			soonest = i
		}
	}
	return soonest, room
}

// newBucket returns the initial bucket of a key that is not in the table.
func (t *table) newBucket(k *Key, p probe, now leaky.Time) leaky.Bucket {
	b := t.floors[p.first]
	b.Merge(t.floors[p.second])
	if l := t.limit(k.Limit); l.whole != nil {
		b.CapToQueue(l.shapeOf(k), now)
		b.Merge(l.fresh)
	}
	return b
}

// shapeOf returns the shape of the bucket of k.
func (l *tableLimit) shapeOf(k *Key) *leaky.Shape {
	if l.keyed != nil {
		return l.keyed.of(k)
	}
	return &l.share.Shape
}

// shareOf returns the share of the bucket of k.
func (l *tableLimit) shareOf(k *Key) leaky.Share {
	share := l.share
	share.Shape = *l.shapeOf(k)
	return share
}

// limit returns what the buckets of a limit have in common.
func (t *table) limit(id uint32) *tableLimit {
	for int(id) >= len(t.limits) {
		t.limits = append(t.limits, tableLimit{})
	}
	return &t.limits[id]
}

// add adds the backlog of b to the bucket of k.
func (t *table) add(k *Key, b leaky.Bucket, now leaky.Time) {
	p := t.probe(k)
	if s := t.lookup(k, p); s != nil {
		s.bucket.Merge(b)
		return
	}
	t.lookupOrInsert(k, p, now).bucket = b // its backlog is known: it inherits none
}

// remove removes k from the table and returns its bucket.
func (t *table) remove(k *Key, p probe, now leaky.Time) leaky.Bucket {
	s := t.lookup(k, p)
	if s == nil {
		return t.newBucket(k, p, now)
	}
	b := s.bucket
	i := uint32((uintptr(unsafe.Pointer(s)) - uintptr(unsafe.Pointer(&t.slots[0]))) / unsafe.Sizeof(*s))
	t.tags[i/groupSize][i%groupSize/8] &^= 0xff << (i % 8 * 8)
	*s = slot{}
	t.entries--
	return b
}

// each migrates the whole table, and calls f for every key.
func (t *table) each(f func(k *Key, b *leaky.Bucket)) {
	for t.migrateSome() {
	}
	for g := range t.tags {
		t.eachInGroup(g, f)
	}
}

// eachInGroup calls f for every key in a group.
func (t *table) eachInGroup(group int, f func(k *Key, b *leaky.Bucket)) {
	for i := range groupSize {
		if t.tags[group][i/8]>>(i%8*8)&0xff != 0 {
			s := &t.slots[group*groupSize+i]
			f(&s.key, &s.bucket)
		}
	}
}
