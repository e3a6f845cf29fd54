package shaper

import (
	"net/netip"
	"slices"
	"sort"

	"shaperd.dev/shaperd/shaper/asn"
)

// Class is the classification of an address.
type Class struct {
	ASN uint32 // of a source; 0 for destinations
	Set Set    // limits that match the address
}

// addresses maps an address to its class. Each family's addresses are cut into
// segments of one class, from one start to the next, the first at the lowest
// address: one binary search covers all limits and the whole ASN table. An
// IPv4 segment takes 8 bytes, an IPv6 one 20.
type addresses struct {
	v4      []uint32
	v4Class []uint32 // index into classes
	v4Index []uint32 // number of starts below each /16; nil for a small table
	v6      []address
	v6Class []uint32
	classes []Class
}

// minIndexed is the number of IPv4 segments from which an index pays off: it takes
// 256 KiB, and saves most of the 19 steps that a full ASN table needs.
const minIndexed = 4096

func (s *addresses) lookup(addr netip.Addr) Class {
	if addr.Is4() {
		p := ipv4(addr)
		lo, hi := 1, len(s.v4)
		if s.v4Index != nil {
			lo, hi = int(max(s.v4Index[p>>16], 1)), int(s.v4Index[p>>16+1])
		}
		for lo < hi {
			if mid := int(uint(lo+hi) / 2); s.v4[mid] > p {
				hi = mid
			} else {
				lo = mid + 1
			}
		}
		return s.classes[s.v4Class[lo-1]]
	}
	a := addressOf(addr)
	i := sort.Search(len(s.v6), func(i int) bool { return a.less(s.v6[i]) })
	return s.classes[s.v6Class[i-1]]
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
	at    address
	limit int8   // limit of the prefix; -1 for the range of an ASN
	delta int8   // 1 at the begin, -1 after the end
	asn   uint32 // ASN of the range
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
			b.add(p.Addr(), lastAddr(p), edge{limit: int8(i)})
		}
		if len(all) == 0 {
			b.anyAddr |= 1 << i
		}
	}
	return b
}

func (b *addressBuilder) add(first, last netip.Addr, e edge) {
	edges, end := &b.v6, address{^uint64(0), ^uint64(0)}
	if first.Is4() {
		edges, end = &b.v4, address{0, 1<<32 - 1}
	}
	e.at, e.delta = addressOf(first), 1
	*edges = append(*edges, e)
	if e.at = addressOf(last); e.at != end {
		e.at, e.delta = e.at.next(), -1
		*edges = append(*edges, e)
	}
}

func (b *addressBuilder) build() addresses {
	var s addresses
	b.sweep(b.v4, func(at address, c uint32) {
		s.v4 = append(s.v4, uint32(at.lo))
		s.v4Class = append(s.v4Class, c)
	})
	b.sweep(b.v6, func(at address, c uint32) {
		s.v6 = append(s.v6, at)
		s.v6Class = append(s.v6Class, c)
	})
	s.classes = b.classes
	if len(s.v4) >= minIndexed {
		s.v4Index = make([]uint32, 1<<16+1)
		i := 0
		for hi := range s.v4Index {
			for i < len(s.v4) && uint64(s.v4[i]) < uint64(hi)<<16 {
				i++
			}
			s.v4Index[hi] = uint32(i)
		}
	}
	return s
}

// sweep walks the edges of one family in order and emits a segment wherever the
// class changes.
func (b *addressBuilder) sweep(edges []edge, emit func(at address, class uint32)) {
	slices.SortFunc(edges, func(x, y edge) int {
		switch {
		case x.at.less(y.at):
			return -1
		case y.at.less(x.at):
			return 1
		}
		return int(x.delta) - int(y.delta) // a range ends before the next begins
	})
	var inside [MaxLimits]int // number of prefixes of a limit around the current address; they may nest
	var asn uint32
	last := ^uint32(0)
	emitIfChanged := func(at address) {
		set := b.anyAddr
		for i, n := range inside {
			if n > 0 {
				set |= 1 << i
			}
		}
		c := b.classIndex(Class{ASN: asn, Set: set & (b.anyASN | b.asns[asn])})
		if c != last {
			emit(at, c)
			last = c
		}
	}
	at := address{}
	for _, e := range edges {
		if e.at != at {
			emitIfChanged(at)
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
	emitIfChanged(at)
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

// address is an IPv6 address as a number, or an IPv4 one in the low 32 bits.
type address struct{ hi, lo uint64 }

func addressOf(a netip.Addr) address {
	if a.Is4() {
		return address{lo: uint64(ipv4(a))}
	}
	b := a.As16()
	var v address
	for i := range 8 {
		v.hi = v.hi<<8 | uint64(b[i])
		v.lo = v.lo<<8 | uint64(b[8+i])
	}
	return v
}

func (a address) less(b address) bool { return a.hi < b.hi || a.hi == b.hi && a.lo < b.lo }

func (a address) next() address {
	a.lo++
	if a.lo == 0 {
		a.hi++
	}
	return a
}

func ipv4(a netip.Addr) uint32 {
	b := a.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

// lastAddr returns the last address of a masked prefix.
func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
