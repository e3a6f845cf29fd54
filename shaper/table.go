package shaper

import (
	"hash/maphash"
	"math/bits"
	"unsafe"

	"shaperd/leaky"
)

// table holds buckets by key, in a fixed number of slots and without a pointer,
// so that the garbage collector has nothing to look at.
//
// A key may stand in one of two groups of sixteen slots, and goes to the one with
// more room (Azar, Broder, Karlin and Upfal, "Balanced allocations", 1999), which
// fills nearly all slots before a group overflows. A drained bucket is room: it
// equals a fresh one. A byte of each key's hash stands in a word a group: the
// words of a million keys stay in cache, and a search reads one slot.
//
// When neither group has room the key takes the place of the one that drains
// first, and the group's floor keeps what that one owed. A newcomer inherits the
// floors of its groups, as the smallest counter is inherited in Space-Saving
// (Metwally, Agrawal and El Abbadi, ICDT 2005): a key that is not in the table
// never owes more, so a flood of keys can slow newcomers, but cannot buy anybody
// a fresh bucket. Floors are of keys of all limits, and those of one may owe for
// hours: a newcomer inherits no more than a bucket of its own limit can owe.
type table struct {
	tags    [][2]uint64 // a byte a slot; 0 is empty
	floors  []leaky.Bucket
	shapes  []*leaky.Shape // by Key.Limit; nil is not known
	slots   []slot
	seed    maphash.Seed
	entries int
	change  *change // that groups may have yet to follow; nil when all have

	evictedDrained, evictedIndebted uint64
}

type slot struct {
	key    Key
	bucket leaky.Bucket
	_      [8]byte
}

const (
	groupSize = 16
	lowBits   = 0x0101010101010101
	highBits  = 0x8080808080808080

	// spare is the share of slots beyond the promised number of keys: with so
	// many, hardly one in 100,000 random keys has to evict another in debt.
	spare = 5

	// lowestTag of a key is not 1, which differs from that of an empty slot in the one
	// bit that matches may overlook: the zero Key would be found where no key is.
	lowestTag = 2

	// keyBytes is the part of a Key that holds values; padding follows.
	keyBytes = unsafe.Offsetof(Key{}.Listen) + unsafe.Sizeof(Key{}.Listen)
)

func newTable(keys int) *table {
	groups := max(1, (keys+keys/spare+groupSize-1)/groupSize)
	return &table{
		tags:   make([][2]uint64, groups),
		floors: make([]leaky.Bucket, groups),
		slots:  make([]slot, groups*groupSize),
		seed:   maphash.MakeSeed(),
	}
}

// change is one of the shapes of buckets. A group follows it when one of its keys is looked
// for, or in [table.settle]: a million buckets at once would hold up all traffic for 10 ms.
// Until then no bucket of the group was touched, so it is as if it followed at the instant
// of the change.
type change struct {
	at     leaky.Time
	shapes map[uint32]reshape // by Key.Limit
	due    []uint64           // groups that have yet to follow, a bit each
	next   int                // word of due; those before it are zero
}

// reshape is the change for the buckets of one limit.
type reshape struct {
	from, to *leaky.Shape
	enforce  bool // they only watched until then
}

// place is where a key may stand.
type place struct {
	first, second uint32 // groups
	tag           uint64 // in all eight bytes
}

// place returns where k may stand. The groups there have followed what changed.
func (t *table) place(k *Key) place {
	h := maphash.Bytes(t.seed, unsafe.Slice((*byte)(unsafe.Pointer(k)), keyBytes))
	n := uint64(len(t.tags))
	p := place{
		first:  uint32((h & (1<<32 - 1)) * n >> 32),
		second: uint32((h * 0x9e3779b97f4a7c15 >> 32) * n >> 32),
		tag:    max(h>>56, lowestTag) * lowBits,
	}
	if t.change != nil {
		t.follow(p.first)
		t.follow(p.second)
	}
	return p
}

// reshape has all buckets follow a change that was made at now. The floors keep their time:
// they stand for keys of any limit.
func (t *table) reshape(shapes map[uint32]reshape, now leaky.Time) {
	for t.settle() {
	}
	due := make([]uint64, (len(t.tags)+63)/64)
	for i := range due {
		due[i] = ^uint64(0)
	}
	t.change = &change{at: now, shapes: shapes, due: due}
}

// settle has some groups, 64 at most, follow what changed. It reports whether there are more.
func (t *table) settle() (more bool) {
	c := t.change
	if c == nil {
		return false
	}
	for group := c.next * 64; group < min(c.next*64+64, len(t.tags)); group++ {
		t.follow(uint32(group))
	}
	if c.next++; c.next == len(c.due) {
		t.change = nil
	}
	return t.change != nil
}

// follow has a group follow what changed, if it has not.
func (t *table) follow(group uint32) {
	c := t.change
	if c.due[group/64]>>(group%64)&1 == 0 {
		return
	}
	c.due[group/64] &^= 1 << (group % 64)
	t.eachOf(int(group), func(k *Key, b *leaky.Bucket) {
		if r, ok := c.shapes[k.Limit]; ok {
			b.Rescale(r.from, r.to, c.at)
			if r.enforce {
				b.Enforce(r.to, c.at)
			}
		}
	})
}

// find returns the slot of k, or nil. Both groups are searched as one: which of
// them holds a key is a coin toss that no branch predictor foresees.
func (t *table) find(k *Key, p place) *slot {
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

// matches returns a bit for each byte of tags that equals tag. Bits above the
// lowest may be false, and fail the comparison of keys.
func matches(tags, tag uint64) uint64 {
	x := tags ^ tag
	m := (x - lowBits) &^ x & highBits
	return m >> 7 * 0x0102040810204080 >> 56 // the high bits of the bytes, side by side
}

// get returns the slot of k, making room for it if it has none.
func (t *table) get(k *Key, p place, now leaky.Time) *slot {
	if s := t.find(k, p); s != nil {
		return s
	}
	i := t.roomiest(p, now)
	s := &t.slots[i]
	group, shift := i/groupSize, i%8*8
	tags := &t.tags[group][i%groupSize/8]
	switch {
	case *tags>>shift&0xff == 0:
		t.entries++
	case s.bucket.Drained(now):
		t.evictedDrained++
	default:
		t.evictedIndebted++
		t.floors[group].Inherit(s.bucket)
	}
	*s = slot{key: *k, bucket: t.newcomer(k, p, now)}
	*tags = *tags&^(0xff<<shift) | p.tag&(0xff<<shift)
	return s
}

// roomiest returns the slot to put a new key of place p into: the one that drains
// first in the group with more room.
func (t *table) roomiest(p place, now leaky.Time) uint32 {
	first, room1 := t.room(p.first, now)
	second, room2 := t.room(p.second, now)
	if room2 > room1 || room2 == 0 && room1 == 0 && t.slots[second].bucket.Until() < t.slots[first].bucket.Until() {
		return second
	}
	return first
}

// room returns the slot of a group that drains first, and how many have drained.
// Empty ones have.
func (t *table) room(group uint32, now leaky.Time) (soonest uint32, room int) {
	soonest = group * groupSize
	for i := soonest; i < (group+1)*groupSize; i++ {
		if t.slots[i].bucket.Drained(now) {
			room++
		}
		if t.slots[i].bucket.Until() < t.slots[soonest].bucket.Until() {
			soonest = i
		}
	}
	return soonest, room
}

// newcomer returns the bucket of a key that is not in the table.
func (t *table) newcomer(k *Key, p place, now leaky.Time) leaky.Bucket {
	b := t.floors[p.first]
	b.Merge(t.floors[p.second])
	if int(k.Limit) < len(t.shapes) && t.shapes[k.Limit] != nil {
		b.Bound(t.shapes[k.Limit], now)
	}
	return b
}

// hold notes the shape of the buckets of a limit.
func (t *table) hold(limit uint32, shape *leaky.Shape) {
	for int(limit) >= len(t.shapes) {
		t.shapes = append(t.shapes, nil)
	}
	t.shapes[limit] = shape
}

// remove takes k out of the table and returns its bucket.
func (t *table) remove(k *Key, p place, now leaky.Time) leaky.Bucket {
	s := t.find(k, p)
	if s == nil {
		return t.newcomer(k, p, now)
	}
	b := s.bucket
	i := uint32((uintptr(unsafe.Pointer(s)) - uintptr(unsafe.Pointer(&t.slots[0]))) / unsafe.Sizeof(*s))
	t.tags[i/groupSize][i%groupSize/8] &^= 0xff << (i % 8 * 8)
	*s = slot{}
	t.entries--
	return b
}

// each calls f for every key in the table.
func (t *table) each(f func(k *Key, b *leaky.Bucket)) {
	for t.settle() {
	}
	for g := range t.tags {
		t.eachOf(g, f)
	}
}

func (t *table) eachOf(group int, f func(k *Key, b *leaky.Bucket)) {
	for i := range groupSize {
		if t.tags[group][i/8]>>(i%8*8)&0xff != 0 {
			s := &t.slots[group*groupSize+i]
			f(&s.key, &s.bucket)
		}
	}
}
