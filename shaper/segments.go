package shaper

import (
	"net/netip"
	"slices"
	"sort"

	"shaperd/shaper/asn"
)

// class is what a source address tells: its ASN and the limits it may be under.
type class struct {
	asn uint32
	set Set
}

// sources maps a source address to its class. Each family's addresses are cut
// into segments of one class, from one start to the next, the first at the least
// address: one binary search answers for all limits and the whole ASN table. An
// IPv4 segment takes 8 bytes, an IPv6 one 20.
//
// The same segments, written as prefixes, are what the packet plane puts into
// its longest-prefix table.
type sources struct {
	v4      []uint32
	v4Class []uint32 // index into classes
	v4Index []uint32 // number of starts below each /16; nil for a small table
	v6      []address
	v6Class []uint32
	classes []class
}

// indexFrom is the number of IPv4 segments from which an index pays: it takes
// 256 KiB, and saves most of the 19 steps a full ASN table needs.
const indexFrom = 4096

func (s *sources) lookup(addr netip.Addr) class {
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

// edge is where the classes of addresses may change: at the first address of a
// limit's source prefix or of an ASN's range, and after its last one.
type edge struct {
	at    address
	limit int8 // whose prefix begins or ends; -1 for an ASN's range
	delta int8 // 1 begins, -1 ends
	asn   uint32
}

func buildSources(limits []Limit, table *asn.Table) sources {
	s := sources{}
	b := sourceBuilder{index: map[class]uint32{}, classes: &s.classes, asns: map[uint32]Set{}}
	var v4, v6 []edge
	add := func(first, last netip.Addr, e edge) {
		edges, end := &v6, address{^uint64(0), ^uint64(0)}
		if first.Is4() {
			edges, end = &v4, address{0, 1<<32 - 1}
		}
		e.at, e.delta = addressOf(first), 1
		*edges = append(*edges, e)
		if e.at = addressOf(last); e.at != end {
			e.at, e.delta = e.at.next(), -1
			*edges = append(*edges, e)
		}
	}
	for i := range limits {
		m := &limits[i].Match
		for _, p := range m.Source {
			if p.Addr().Is4In6() && p.Bits() >= 96 {
				p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
			}
			p = p.Masked()
			add(p.Addr(), lastAddr(p), edge{limit: int8(i)})
		}
		if len(m.Source) == 0 {
			b.anySource |= 1 << i
		}
		if len(m.ASN) == 0 {
			b.anyASN |= 1 << i
		}
		for _, n := range m.ASN {
			b.asns[n] |= 1 << i
		}
	}
	if table != nil && usesASN(limits) {
		for r := range table.All() {
			add(r.First, r.Last, edge{limit: -1, asn: r.ASN})
		}
	}
	b.sweep(v4, func(at address, c uint32) {
		s.v4 = append(s.v4, uint32(at.lo))
		s.v4Class = append(s.v4Class, c)
	})
	b.sweep(v6, func(at address, c uint32) {
		s.v6 = append(s.v6, at)
		s.v6Class = append(s.v6Class, c)
	})
	if len(s.v4) >= indexFrom {
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

// sourceBuilder turns edges into segments.
type sourceBuilder struct {
	anySource, anyASN Set // limits that take every source, every ASN
	asns              map[uint32]Set
	index             map[class]uint32
	classes           *[]class
}

// sweep walks the edges of one family in order and emits a segment wherever the
// class changes.
func (b *sourceBuilder) sweep(edges []edge, emit func(at address, class uint32)) {
	slices.SortFunc(edges, func(x, y edge) int {
		switch {
		case x.at.less(y.at):
			return -1
		case y.at.less(x.at):
			return 1
		}
		return int(x.delta) - int(y.delta) // a range ends before the next begins
	})
	var inside [MaxLimits]int // prefixes of a limit around the present address; they may nest
	var asn uint32
	last := ^uint32(0)
	put := func(at address) {
		set := b.anySource
		for i, n := range inside {
			if n > 0 {
				set |= 1 << i
			}
		}
		c := b.classOf(class{asn: asn, set: set & (b.anyASN | b.asns[asn])})
		if c != last {
			emit(at, c)
			last = c
		}
	}
	at := address{}
	for _, e := range edges {
		if e.at != at {
			put(at)
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
	put(at)
}

func (b *sourceBuilder) classOf(c class) uint32 {
	i, ok := b.index[c]
	if !ok {
		i = uint32(len(*b.classes))
		b.index[c] = i
		*b.classes = append(*b.classes, c)
	}
	return i
}

func usesASN(limits []Limit) bool {
	return slices.ContainsFunc(limits, func(l Limit) bool {
		return len(l.Match.ASN) > 0 || l.Key&KeyASN != 0
	})
}

// address is an IPv6 address, or an IPv4 one in the low 32 bits, as a number.
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
