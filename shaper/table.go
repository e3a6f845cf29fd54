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
// A key may stand in one of two groups of eight slots, and goes to the emptier
// one (Azar, Broder, Karlin and Upfal, "Balanced allocations", 1999), which fills
// nearly all slots before a group overflows. A byte of each key's hash stands in
// a word a group: the words of a million keys stay in cache, and a search reads
// one slot.
//
// When both groups are full the key takes the place of the one that drains
// first. If that has drained already, nothing is lost: it equals a fresh one. If
// not, the newcomer inherits its debt, as the smallest counter is inherited in
// Space-Saving (Metwally, Agrawal and El Abbadi, ICDT 2005): a key that is not
// in the table never owes more than any in its groups, so a flood of keys can
// slow newcomers, but cannot buy anybody a fresh bucket.
type table struct {
	tags    []uint64 // a byte a slot; 0 is empty
	slots   []slot
	seed    maphash.Seed
	entries int

	evictedDrained, evictedIndebted uint64
}

type slot struct {
	key    Key
	bucket leaky.Bucket
	_      [8]byte
}

const (
	groupSize = 8
	lowBits   = 0x0101010101010101
	highBits  = 0x8080808080808080

	// spare is the share of slots beyond the promised number of keys: with so
	// many, a million random keys found place without one eviction.
	spare = 6
)

func newTable(keys int) *table {
	groups := (keys + keys/spare + groupSize - 1) / groupSize
	return &table{
		tags:  make([]uint64, groups),
		slots: make([]slot, groups*groupSize),
		seed:  maphash.MakeSeed(),
	}
}

// place is where a key may stand.
type place struct {
	first, second uint32 // groups
	tag           uint64 // in all eight bytes
}

func (t *table) place(k *Key) place {
	h := maphash.Bytes(t.seed, unsafe.Slice((*byte)(unsafe.Pointer(k)), unsafe.Sizeof(*k)))
	n := uint64(len(t.tags))
	return place{
		first:  uint32((h & (1<<32 - 1)) * n >> 32),
		second: uint32((h * 0x9e3779b97f4a7c15 >> 32) * n >> 32),
		tag:    (h>>57 | 0x80) * lowBits,
	}
}

// find returns the slot of k, or nil.
func (t *table) find(k *Key, p place) *slot {
	if s := t.findIn(p.first, k, p.tag); s != nil {
		return s
	}
	return t.findIn(p.second, k, p.tag)
}

func (t *table) findIn(group uint32, k *Key, tag uint64) *slot {
	x := t.tags[group] ^ tag
	// The lowest match is exact; others may be false, and fail the comparison.
	for m := (x - lowBits) &^ x & highBits; m != 0; m &= m - 1 {
		if s := &t.slots[group*groupSize+uint32(bits.TrailingZeros64(m))/8]; s.key == *k {
			return s
		}
	}
	return nil
}

// vacancy returns where k, which is not in the table, would be put, and whether
// another key stands there.
func (t *table) vacancy(p place) (index uint32, taken bool) {
	free1, free2 := ^t.tags[p.first]&highBits, ^t.tags[p.second]&highBits
	if free1|free2 != 0 {
		group, free := p.first, free1
		if bits.OnesCount64(free2) > bits.OnesCount64(free1) {
			group, free = p.second, free2
		}
		return group*groupSize + uint32(bits.TrailingZeros64(free))/8, false
	}
	index = p.first * groupSize
	for _, group := range [...]uint32{p.first, p.second} {
		for i := group * groupSize; i < (group+1)*groupSize; i++ {
			if t.slots[i].bucket.Until() < t.slots[index].bucket.Until() {
				index = i
			}
		}
	}
	return index, true
}

// get returns the slot of k, making room for it if it has none.
func (t *table) get(k *Key, p place, now leaky.Time) *slot {
	if s := t.find(k, p); s != nil {
		return s
	}
	i, taken := t.vacancy(p)
	s := &t.slots[i]
	switch {
	case !taken:
		t.entries++
	case s.bucket.Drained(now):
		t.evictedDrained++
	default:
		t.evictedIndebted++
	}
	var debt leaky.Bucket
	if taken {
		debt.Inherit(s.bucket)
	}
	*s = slot{key: *k, bucket: debt}
	shift := i % groupSize * 8
	word := &t.tags[i/groupSize]
	*word = *word&^(0xff<<shift) | p.tag&(0xff<<shift)
	return s
}

// remove takes k out of the table and returns its bucket.
func (t *table) remove(k *Key, p place) leaky.Bucket {
	s := t.find(k, p)
	if s == nil {
		i, taken := t.vacancy(p)
		if !taken {
			return leaky.Bucket{}
		}
		var debt leaky.Bucket
		debt.Inherit(t.slots[i].bucket)
		return debt
	}
	b := s.bucket
	i := uint32((uintptr(unsafe.Pointer(s)) - uintptr(unsafe.Pointer(&t.slots[0]))) / unsafe.Sizeof(*s))
	t.tags[i/groupSize] &^= 0xff << (i % groupSize * 8)
	*s = slot{}
	t.entries--
	return b
}

// each calls f for every key in the table.
func (t *table) each(f func(k *Key, b *leaky.Bucket)) {
	for g, tags := range t.tags {
		for m := tags & highBits; m != 0; m &= m - 1 {
			s := &t.slots[g*groupSize+bits.TrailingZeros64(m)/8]
			f(&s.key, &s.bucket)
		}
	}
}
