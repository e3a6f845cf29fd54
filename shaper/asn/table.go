// Package asn looks up the autonomous system (AS) that announces an IPv4 or IPv6
// address, in files on the local disk. It never uses the network.
//
// A [Table] is built once, by [Load] or [New], and is immutable: any number of goroutines
// may read it. To update the data, load another table and swap the pointer to it.
package asn

import (
	"fmt"
	"iter"
	"net/netip"
)

// Range is the range of addresses First to Last, inclusive and of one family, that belong
// to an AS. An ASN is 1 to 4294967295; 0 is unknown.
type Range struct {
	First, Last netip.Addr
	ASN         uint32
}

// Table maps addresses to AS numbers. The zero Table and a nil *Table are empty.
// A Table is immutable: all its methods may be called concurrently.
//
// It takes about 8 bytes per IPv4 range and 20 bytes per IPv6 range, gaps between ranges
// included, at most 256 KiB per family for an index, and about 55 bytes per name: 5 MB for
// the names of the Internet.
type Table struct {
	v4 segments[addr4]
	v6 segments[addr6]

	names map[uint32]nameRef // by ASN, positions in text
	text  string
}

// segments divides a family's address space: segment i goes from start[i] to the
// address before start[i+1], or to the end of the space, and belongs to asn[i],
// 0 for a gap. The space before start[0] is a gap too.
type segments[A key[A]] struct {
	start []A
	asn   []uint32
	known int // number of segments that are not gaps
	index index
}

// New builds a table of ranges in any order. An IPv4-mapped IPv6 address counts
// as IPv4, a range of ASN 0 is ignored, and adjacent ranges of one ASN are merged.
//
// It is an error if an address is invalid or has a zone, if a range is reversed or mixes
// families, or if any two ranges overlap, even with the same ASN.
func New(ranges []Range) (*Table, error) {
	var b builder
	for i, r := range ranges {
		if err := b.add(r.First, r.Last, r.ASN, source{line: uint32(i), file: noFile}); err != nil {
			return nil, fmt.Errorf("build ASN table: range %d: %w", i, err)
		}
	}
	b.strict = true
	t, err := b.build()
	if err != nil {
		return nil, fmt.Errorf("build ASN table: %w", err)
	}
	return t, nil
}

// Lookup returns the AS number of addr, or 0 if it is unknown: if no range contains addr,
// addr is the zero Addr, or t is nil. An IPv4-mapped IPv6 address is looked up as IPv4; a
// zone is ignored. It does not allocate.
func (t *Table) Lookup(addr netip.Addr) uint32 {
	if t == nil {
		return 0
	}
	switch addr = addr.Unmap(); {
	case addr.Is4():
		return t.lookup4(toAddr4(addr))
	case addr.Is6():
		return t.lookup6(toAddr6(addr))
	}
	return 0
}

// lookup4 and lookup6 are separate, since in one generic function every comparison
// would be a call. The result is the last segment that starts at or below a.
func (t *Table) lookup4(a addr4) uint32 {
	lo, hi := t.v4.index.find(a.top())
	for lo < hi {
		mid := lo + (hi-lo)/2
		if t.v4.start[mid] <= a {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == 0 {
		return 0
	}
	return t.v4.asn[lo-1]
}

func (t *Table) lookup6(a addr6) uint32 {
	lo, hi := t.v6.index.find(a.top())
	for lo < hi {
		mid := lo + (hi-lo)/2
		if s := t.v6.start[mid]; s.hi < a.hi || s.hi == a.hi && s.lo <= a.lo {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == 0 {
		return 0
	}
	return t.v6.asn[lo-1]
}

// All yields the ranges of t: IPv4, then IPv6, each family in ascending order, without
// overlaps or ASN 0, and adjacent ones with different ASNs. No address is IPv4-mapped. New
// of these ranges equals t, without its names.
func (t *Table) All() iter.Seq[Range] {
	return func(yield func(Range) bool) {
		if t == nil {
			return
		}
		_ = t.v4.each(^addr4(0), yield) && t.v6.each(addr6{^uint64(0), ^uint64(0)}, yield)
	}
}

// Len returns the number of ranges that All yields for each family.
func (t *Table) Len() (v4, v6 int) {
	if t == nil {
		return 0, 0
	}
	return t.v4.known, t.v6.known
}

// each yields the known segments, the last of which may end at highest. It
// returns false if yield did.
func (s *segments[A]) each(highest A, yield func(Range) bool) bool {
	for i, asn := range s.asn {
		if asn == 0 {
			continue
		}
		last := highest
		if i+1 < len(s.start) {
			last = s.start[i+1].prev()
		}
		if !yield(Range{s.start[i].addr(), last.addr(), asn}) {
			return false
		}
	}
	return true
}

// appendRange appends a range above all previous ones. highest is the family's
// highest address.
func (s *segments[A]) appendRange(first, last, highest A, asn uint32) {
	// The previous range was ended by a gap segment of ASN 0, which is removed if the
	// new range leaves no gap.
	if n := len(s.start); n > 0 && s.start[n-1] == first {
		s.start, s.asn = s.start[:n-1], s.asn[:n-1]
	}
	if n := len(s.asn); n == 0 || s.asn[n-1] != asn {
		s.start, s.asn = append(s.start, first), append(s.asn, asn)
		s.known++
	}
	if last != highest {
		s.start, s.asn = append(s.start, last.next()), append(s.asn, 0)
	}
}
