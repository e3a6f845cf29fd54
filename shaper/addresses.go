package shaper

import (
	"cmp"
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/shaper/asn"
	"shaperd.dev/shaperd/shaper/segments"
)

// Class is the classification of an address.
type Class struct {
	ASN     uint32      // of a source; 0 for destinations
	Country asn.Country // as ASN
	Row     uint32      // of a source: index of the tiers that its buckets have, and of the classes that match it
	Set     Set         // limits that match the address

	excepted Set // limits that would match a source if they did not except it
}

// addresses maps an address to its class: one binary search covers all limits and groups, and the
// whole ASN table.
type addresses struct {
	segments.Map // to indexes of classes
	classes      []Class
	rows         []uint32 // tiers of the limits with tiers, by row
	width        int      // number of these limits

	matching []Set // classes that match, by row; nil without classes
}

func (s *addresses) class(addr netip.Addr) Class {
	if len(s.classes) == 1 { // no limit matches addresses
		return s.classes[0]
	}
	return s.classes[s.Lookup(addr)]
}

// tier returns the tier in a row of the limit with this rank among those that have tiers.
func (s *addresses) tier(row uint32, rank int) uint32 { return s.rows[int(row)*s.width+rank] }

// buildDestinations classifies destination addresses by prefix.
func buildDestinations(limits []Limit) addresses {
	b := newAddressBuilder(len(limits))
	for i := range limits {
		b.addPrefixes(limits[i].Match.Destination, edge{kind: ofMatch, index: uint32(i)})
		if len(limits[i].Match.Destination) > 0 {
			b.matched |= 1 << i
		}
	}
	return b.build()
}

// addressBuilder turns prefixes and ranges into edges, and those into segments.
type addressBuilder struct {
	v4, v6  []edge
	all     Set // limits
	matched Set // limits that match some addresses only

	sources *sourceRules // nil for destinations

	index   map[Class]uint32
	classes []Class
}

// edge is an address at which the class may change: the first one of a prefix or of an ASN's range, or
// the one after its last.
type edge struct {
	at    segments.Addr6 // an IPv4 address in the low 32 bits
	index uint32         // limit, class, group, index of values, or ASN
	kind  edgeKind
	delta int8  // 1 at the begin, -1 after the end
	bits  uint8 // of a prefix
}

type edgeKind uint8

// What a prefix or a range is of, in the order in which those of equal length begin.
const (
	ofASN edgeKind = iota
	ofCountry
	ofMatch  // a limit
	ofExcept // a limit
	ofClass
	ofGroup
	ofValues
)

// place is what is known of the addresses of a segment.
type place struct {
	inside  [ofValues][MaxLimits]int // number of prefixes around it, by kind and index; they may nest
	in      [ofValues]uint64         // those that are not 0, as bits
	asn     uint32
	country asn.Country
	tiers   [][]placedTier // by rank of the limit: of the prefixes around it, the longest last
}

func newAddressBuilder(limits int) *addressBuilder {
	return &addressBuilder{all: 1<<limits - 1, index: map[Class]uint32{}}
}

// addPrefixes adds the edges of prefixes, which are otherwise as e.
func (b *addressBuilder) addPrefixes(prefixes []netip.Prefix, e edge) {
	for _, p := range prefixes {
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		p = p.Masked()
		e.bits = uint8(p.Bits())
		b.add(p.Addr(), segments.LastAddr(p), e)
	}
}

func (b *addressBuilder) add(first, last netip.Addr, e edge) {
	edges, number, end := &b.v6, segments.ToAddr6, segments.Addr6{Hi: 1<<64 - 1, Lo: 1<<64 - 1}
	if first.Is4() {
		edges, end = &b.v4, segments.Addr6{Lo: 1<<32 - 1}
		number = func(a netip.Addr) segments.Addr6 { return segments.Addr6{Lo: uint64(segments.ToAddr4(a))} }
	}
	e.at, e.delta = number(first), 1
	*edges = append(*edges, e)
	if e.at = number(last); e.at != end {
		e.at, e.delta = e.at.Next(), -1
		*edges = append(*edges, e)
	}
}

func (b *addressBuilder) build() (s addresses) {
	b.sweep(b.v4, func(at segments.Addr6, class uint32) { s.V4.Set(segments.Addr4(at.Lo), class) })
	b.sweep(b.v6, s.V6.Set)
	s.V4.Build()
	s.V6.Build()
	s.classes = b.classes
	return s
}

// sweep walks the edges of one family in order, and sets the class at each address with any.
func (b *addressBuilder) sweep(edges []edge, set func(at segments.Addr6, class uint32)) {
	slices.SortFunc(edges, func(x, y edge) int {
		if c := x.at.Compare(y.at); c != 0 {
			return c
		}
		if x.delta != y.delta {
			return int(x.delta) - int(y.delta) // a range ends before the next begins
		}
		return cmp.Or(int(x.bits)-int(y.bits), int(x.kind)-int(y.kind), cmp.Compare(x.index, y.index))
	})
	here := b.sources.newPlace()
	setClass := func(at segments.Addr6) {
		class := Class{Set: b.all&^b.matched | Set(here.in[ofMatch])}
		if b.sources != nil {
			class = b.sources.classify(&here)
		}
		set(at, b.classIndex(class))
	}
	at := segments.Addr6{}
	for i := range edges {
		e := &edges[i]
		if e.at != at {
			setClass(at)
			at = e.at
		}
		switch {
		case e.kind == ofASN && e.delta > 0:
			here.asn = e.index
		case e.kind == ofASN:
			here.asn = 0
		case e.kind == ofCountry && e.delta > 0:
			here.country = asn.Country(e.index)
		case e.kind == ofCountry:
			here.country = 0
		case e.kind < ofValues:
			if here.inside[e.kind][e.index] += int(e.delta); here.inside[e.kind][e.index] > 0 {
				here.in[e.kind] |= 1 << e.index
			} else {
				here.in[e.kind] &^= 1 << e.index
			}
		}
		if e.kind >= ofGroup {
			b.sources.changeTiers(&here, e)
		}
	}
	setClass(at)
}

// classIndex returns the index of c in classes, and adds it if it is new.
func (b *addressBuilder) classIndex(c Class) uint32 {
	i, ok := b.index[c]
	if !ok {
		i = uint32(len(b.classes))
		b.index[c] = i
		b.classes = append(b.classes, c)
	}
	return i
}
