package shaper

import (
	"encoding/binary"
	"iter"
)

// What follows are the tables that [Policy.Route] searches, for a plane that
// classifies by itself. Addresses and ports are cut into segments: each is yielded
// as its start, the first at 0, and reaches to the next start. Neighbours differ.

// Sources4 yields the segments of IPv4 source addresses, by number.
func (p *Policy) Sources4() iter.Seq2[uint32, Class] { return p.sources.all4 }

// Sources6 yields the segments of IPv6 source addresses, in network byte order.
func (p *Policy) Sources6() iter.Seq2[[16]byte, Class] { return p.sources.all6 }

// Destinations4 yields the segments of IPv4 destination addresses, by number.
func (p *Policy) Destinations4() iter.Seq2[uint32, Set] { return sets(p.destinations.all4) }

// Destinations6 yields the segments of IPv6 destination addresses, in network byte
// order.
func (p *Policy) Destinations6() iter.Seq2[[16]byte, Set] { return sets(p.destinations.all6) }

// HasDestinations reports whether any limit names destinations; without one all of
// them are in one segment.
func (p *Policy) HasDestinations() bool { return p.destined != 0 }

// Ports yields the segments of destination ports.
func (p *Policy) Ports() iter.Seq2[uint16, Set] {
	return func(yield func(uint16, Set) bool) {
		for i, start := range p.ports {
			if !yield(start, p.portSets[i]) {
				return
			}
		}
	}
}

// ProtocolSet returns the limits that a flow of a protocol may be under.
func (p *Policy) ProtocolSet(protocol Protocol) Set { return p.protocol[protocol] }

// PlaceSet returns the limits that a flow may be under at a listener or an
// attachment, by what ListenIndex or AttachIndex returned.
func (p *Policy) PlaceSet(index uint16) Set { return p.places[index].set }

// Paced returns the limits with a rate or packets.
func (p *Policy) Paced() Set { return p.paced }

func (s *addresses) all4(yield func(uint32, Class) bool) {
	for i, start := range s.v4 {
		if !yield(start, s.classes[s.v4Class[i]]) {
			return
		}
	}
}

func (s *addresses) all6(yield func([16]byte, Class) bool) {
	for i, start := range s.v6 {
		var b [16]byte
		binary.BigEndian.PutUint64(b[:8], start.hi)
		binary.BigEndian.PutUint64(b[8:], start.lo)
		if !yield(b, s.classes[s.v6Class[i]]) {
			return
		}
	}
}

// sets yields the sets of classes alone.
func sets[K any](segments iter.Seq2[K, Class]) iter.Seq2[K, Set] {
	return func(yield func(K, Set) bool) {
		for start, c := range segments {
			if !yield(start, c.Set) {
				return
			}
		}
	}
}
