package shaper

import (
	"iter"

	"shaperd.dev/shaperd/shaper/segments"
)

// The tables that [Policy.Route] searches, for a plane that classifies by itself.
// Addresses and ports are cut into segments: each is yielded with its start, the first
// at 0, and ends before the next start. Adjacent segments differ in value. Tiers and classes are left out, and countries are apart.

// Sources4 yields the segments of IPv4 source addresses, in host byte order.
func (p *Policy) Sources4() iter.Seq2[uint32, Class] { return p.sources.all4 }

// Sources6 yields the segments of IPv6 source addresses.
func (p *Policy) Sources6() iter.Seq2[segments.Addr6, Class] { return p.sources.all6 }

// Destinations4 yields the segments of IPv4 destination addresses, in host byte order.
func (p *Policy) Destinations4() iter.Seq2[uint32, Set] { return setsOf(p.destinations.all4) }

// Destinations6 yields the segments of IPv6 destination addresses.
func (p *Policy) Destinations6() iter.Seq2[segments.Addr6, Set] { return setsOf(p.destinations.all6) }

// CountryKeys returns the limits that have the country of the source in their key.
func (p *Policy) CountryKeys() (set Set) {
	for i := range p.limits {
		if p.limits[i].Key&KeyCountry != 0 {
			set |= 1 << i
		}
	}
	return set
}

// Countries4 yields the segments of IPv4 source addresses with their countries, as far as limits have to do with them.
func (p *Policy) Countries4() iter.Seq2[uint32, Country] {
	return func(yield func(uint32, Country) bool) {
		yieldCountries(&p.sources, p.sources.V4.All(), func(start segments.Addr4, c Country) bool { return yield(uint32(start), c) })
	}
}

// Countries6 yields those of IPv6, like Countries4.
func (p *Policy) Countries6() iter.Seq2[segments.Addr6, Country] {
	return func(yield func(segments.Addr6, Country) bool) { yieldCountries(&p.sources, p.sources.V6.All(), yield) }
}

func yieldCountries[A any](s *addresses, all iter.Seq2[A, uint32], yield func(A, Country) bool) {
	first, last := true, Country(0)
	for start, i := range all {
		if c := s.classes[i].Country; first || c != last {
			if !yield(start, c) {
				return
			}
			first, last = false, c
		}
	}
}

// Ports yields the segments of destination ports.
func (p *Policy) Ports() iter.Seq2[uint16, Set] {
	return func(yield func(uint16, Set) bool) {
		for i, start := range p.ports {
			if i > 0 && p.portSets[i] == p.portSets[i-1] { // their classes differ
				continue
			}
			if !yield(start, p.portSets[i]) {
				return
			}
		}
	}
}

// ProtocolSet returns the limits that match a protocol.
func (p *Policy) ProtocolSet(protocol Protocol) Set { return p.protocol[protocol] }

// OriginSet returns the limits that match a listener or an attachment, by its index from
// [Policy.ListenerIndex] or [Policy.AttachmentIndex].
func (p *Policy) OriginSet(index uint16) Set { return p.origins[index].set }

// Paced returns the limits with Rate or Packets.
func (p *Policy) Paced() Set { return p.paced }

func (s *addresses) all4(yield func(uint32, Class) bool) {
	yieldAll(s, s.V4.All(), func(start segments.Addr4, c Class) bool { return yield(uint32(start), c) })
}

func (s *addresses) all6(yield func(segments.Addr6, Class) bool) { yieldAll(s, s.V6.All(), yield) }

// yieldAll yields segments with their classes without rows.
func yieldAll[A any](s *addresses, all iter.Seq2[A, uint32], yield func(A, Class) bool) {
	last := Class{Row: 1} // none
	for start, i := range all {
		class := s.classes[i]
		class.Row, class.Country, class.excepted = 0, 0, 0
		if class == last {
			continue
		}
		if !yield(start, class) {
			return
		}
		last = class
	}
}

// setsOf yields segments with the sets of their classes.
func setsOf[K any](segments iter.Seq2[K, Class]) iter.Seq2[K, Set] {
	return func(yield func(K, Set) bool) {
		for start, c := range segments {
			if !yield(start, c.Set) {
				return
			}
		}
	}
}
