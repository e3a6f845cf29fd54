// Package asn answers which autonomous system (AS) announces an IPv4 or IPv6
// address, from files on the local disk. It never uses the network.
//
// A [Table] is built once, by [Load] or [New], and does not change after that:
// any number of goroutines may read it. To take in new data, load another table
// and swap the pointer to it.
package asn

import (
	"fmt"
	"iter"
	"net/netip"
)

// Range says that the addresses First to Last, both included and both of the
// same family, belong to ASN. An ASN is 1 to 4294967295; 0 stands for unknown.
type Range struct {
	First, Last netip.Addr
	ASN         uint32
}

// Table maps addresses to AS numbers. The zero Table and a nil *Table know no
// address. A Table is immutable: all its methods may be called concurrently.
//
// It costs about 8 bytes an IPv4 range and 20 bytes an IPv6 range, gaps between
// ranges counted as ranges, at most 256 KiB a family for an index, and about 55 bytes a
// name: 5 MB for those of the Internet.
type Table struct {
	v4 segments[addr4]
	v6 segments[addr6]

	names map[uint32]nameRef // in text, of ASNs that have one
	text  string
}

// segments cuts a family's address space: segment i goes from start[i] to the
// address before start[i+1], or to the end of the space, and belongs to asn[i],
// 0 for a gap. What lies before start[0] is a gap too.
type segments[A key[A]] struct {
	start []A
	asn   []uint32
	known int // segments whose asn is not 0
	index index
}

// New makes a table of ranges, in any order. An IPv4-mapped IPv6 address counts
// as the IPv4 address, a range of ASN 0 is left out, and adjacent ranges of one
// ASN become one.
//
// It is an error when an address is invalid or has a zone, when a range's ends
// are of different families or in the wrong order, and when any two ranges
// overlap, even with the same ASN.
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

// Lookup returns the AS number addr belongs to, or 0 when that is unknown: when
// no range holds addr, addr is the zero Addr, or t is nil. An IPv4-mapped IPv6
// address is looked up as IPv4; a zone is ignored. It does not allocate.
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

// lookup4 and lookup6 are written out: in one generic function every comparison
// would be a call. The answer is the last segment that starts at or below a.
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

// All yields the ranges of t: those of IPv4, then those of IPv6, each family in
// ascending order, none overlapping another, none of ASN 0, adjacent ones of
// different ASN. No address is IPv4-mapped. New of what All yields is t again, without
// its names.
func (t *Table) All() iter.Seq[Range] {
	return func(yield func(Range) bool) {
		if t == nil {
			return
		}
		_ = t.v4.each(^addr4(0), yield) && t.v6.each(addr6{^uint64(0), ^uint64(0)}, yield)
	}
}

// Len returns how many ranges of each family All yields.
func (t *Table) Len() (v4, v6 int) {
	if t == nil {
		return 0, 0
	}
	return t.v4.known, t.v6.known
}

// each yields the known segments, the last of which may end at highest. It
// reports whether yield asked for more.
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

// put appends a range above all those put before. highest is the family's
// highest address.
func (s *segments[A]) put(first, last, highest A, asn uint32) {
	// A gap's segment is the one of ASN 0 that ended the range before; it goes
	// again when the new range leaves no gap.
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
