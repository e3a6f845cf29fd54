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

	"shaperd.dev/shaperd/shaper/segments"
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
// It takes about 8 bytes per IPv4 range and 20 bytes per IPv6 range, of AS and of countries, gaps between ranges
// included, at most 256 KiB per family for an index, and about 55 bytes per name: 5 MB for
// the names of the Internet.
type Table struct {
	addrs     segments.Map // 0 for a gap
	countries segments.Map // of Country; empty unless loaded

	names map[uint32]nameRef // by ASN, positions in text
	text  string
}

// The highest addresses.
const highest4 = ^segments.Addr4(0)

var highest6 = segments.Addr6{Hi: ^uint64(0), Lo: ^uint64(0)}

// New builds a table of ranges in any order. An IPv4-mapped IPv6 address counts
// as IPv4, a range of ASN 0 is ignored, and adjacent ranges of one ASN are merged.
//
// It is an error if an address is invalid or has a zone, if a range is reversed or mixes
// families, or if any two ranges overlap, even with the same ASN; and so for countries.
func New(ranges []Range, countries ...CountryRange) (*Table, error) {
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
	c := builder{strict: true, noun: "country"}
	for i, r := range countries {
		if err := c.add(r.First, r.Last, uint32(r.Country), source{line: uint32(i), file: noFile}); err != nil {
			return nil, fmt.Errorf("build table of countries: range %d: %w", i, err)
		}
	}
	in, err := c.build()
	if err != nil {
		return nil, fmt.Errorf("build table of countries: %w", err)
	}
	t.countries = in.addrs
	return t, nil
}

// Lookup returns the AS number of addr, or 0 if it is unknown: if no range contains addr,
// addr is the zero Addr, or t is nil. An IPv4-mapped IPv6 address is looked up as IPv4; a
// zone is ignored. It does not allocate.
func (t *Table) Lookup(addr netip.Addr) uint32 {
	if t == nil {
		return 0
	}
	if !addr.IsValid() {
		return 0
	}
	return t.addrs.Lookup(addr.Unmap())
}

// All yields the ranges of t: IPv4, then IPv6, each family in ascending order, without
// overlaps or ASN 0, and adjacent ones with different ASNs. No address is IPv4-mapped. New
// of these ranges equals t, without its names.
func (t *Table) All() iter.Seq[Range] {
	return func(yield func(Range) bool) {
		if t == nil {
			return
		}
		_ = eachRange(&t.addrs.V4, highest4, yield) && eachRange(&t.addrs.V6, highest6, yield)
	}
}

// eachRange yields the ranges of a family, the last of which may end at highest. It returns false
// if yield did.
func eachRange[A segments.Address[A]](f *segments.Family[A], highest A, yield func(Range) bool) bool {
	var first A
	asn := uint32(0)
	for start, next := range f.All() {
		if asn != 0 && !yield(Range{first.Addr(), start.Prev().Addr(), asn}) {
			return false
		}
		first, asn = start, next
	}
	return asn == 0 || yield(Range{first.Addr(), highest.Addr(), asn})
}
