package shaper

import (
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/shaper/asn"
	"shaperd.dev/shaperd/shaper/segments"
)

// Class is the classification of an address.
type Class struct {
	ASN uint32 // of a source; 0 for destinations
	Set Set    // limits that match the address
}

// addresses maps an address to its class: one binary search covers all limits and the whole
// ASN table.
type addresses struct {
	segments.Map // to indexes of classes
	classes      []Class
}

func (s *addresses) class(addr netip.Addr) Class {
	if len(s.classes) == 1 { // no limit matches addresses
		return s.classes[0]
	}
	return s.classes[s.Lookup(addr)]
}

// buildSources classifies source addresses by prefix and ASN.
func buildSources(limits []Limit, table *asn.Table) addresses {
	b := newAddressBuilder(limits, func(m *Match) []netip.Prefix { return m.Source })
	for i := range limits {
		for _, n := range limits[i].Match.ASN {
			b.anyASN &^= 1 << i
			b.asns[n] |= 1 << i
		}
	}
	if table != nil && usesASN(limits) {
		for r := range table.All() {
			b.add(r.First, r.Last, edge{limit: -1, asn: r.ASN})
		}
	}
	return b.build()
}

// buildDestinations classifies destination addresses by prefix.
func buildDestinations(limits []Limit) addresses {
	b := newAddressBuilder(limits, func(m *Match) []netip.Prefix { return m.Destination })
	return b.build()
}

// addressBuilder turns prefixes and ranges into edges, and those into segments.
type addressBuilder struct {
	v4, v6  []edge
	anyAddr Set // limits that match every address
	anyASN  Set // limits that match every ASN
	asns    map[uint32]Set
	index   map[Class]uint32
	classes []Class
}

// edge is an address at which the class may change: the first one of a limit's prefix
// or of an ASN's range, or the one after its last.
type edge struct {
	at    segments.Addr6 // an IPv4 address in the low 32 bits
	limit int8           // limit of the prefix; -1 for the range of an ASN
	delta int8           // 1 at the begin, -1 after the end
	asn   uint32         // ASN of the range
}

func newAddressBuilder(limits []Limit, prefixes func(*Match) []netip.Prefix) *addressBuilder {
	b := &addressBuilder{anyASN: ^Set(0), asns: map[uint32]Set{}, index: map[Class]uint32{}}
	for i := range limits {
		all := prefixes(&limits[i].Match)
		for _, p := range all {
			if p.Addr().Is4In6() && p.Bits() >= 96 {
				p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
			}
			p = p.Masked()
			b.add(p.Addr(), segments.LastAddr(p), edge{limit: int8(i)})
		}
		if len(all) == 0 {
			b.anyAddr |= 1 << i
		}
	}
	return b
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
		return int(x.delta) - int(y.delta) // a range ends before the next begins
	})
	var inside [MaxLimits]int // number of prefixes of a limit around the current address; they may nest
	var asn uint32
	setClass := func(at segments.Addr6) {
		limits := b.anyAddr
		for i, n := range inside {
			if n > 0 {
				limits |= 1 << i
			}
		}
		set(at, b.classIndex(Class{ASN: asn, Set: limits & (b.anyASN | b.asns[asn])}))
	}
	at := segments.Addr6{}
	for _, e := range edges {
		if e.at != at {
			setClass(at)
			at = e.at
		}
		switch {
		case e.limit >= 0:
			inside[e.limit] += int(e.delta)
		case e.delta > 0:
			asn = e.asn
		default:
			asn = 0
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

func usesASN(limits []Limit) bool {
	return slices.ContainsFunc(limits, func(l Limit) bool {
		return len(l.Match.ASN) > 0 || l.Key&KeyASN != 0
	})
}
