package shaper

import (
	"encoding/binary"
	"iter"
)

// The tables that [Policy.Route] searches, for a plane that classifies by itself.
// Addresses and ports are cut into segments: each is yielded with its start, the first
// at 0, and ends before the next start. Adjacent segments differ in value.

// Sources4 yields the segments of IPv4 source addresses, in host byte order.
func (p *Policy) Sources4() iter.Seq2[uint32, Class] { return p.sources.all4 }

// Sources6 yields the segments of IPv6 source addresses, in network byte order.
func (p *Policy) Sources6() iter.Seq2[[16]byte, Class] { return p.sources.all6 }

// Destinations4 yields the segments of IPv4 destination addresses, in host byte order.
func (p *Policy) Destinations4() iter.Seq2[uint32, Set] { return setsOf(p.destinations.all4) }

// Destinations6 yields the segments of IPv6 destination addresses, in network byte
// order.
func (p *Policy) Destinations6() iter.Seq2[[16]byte, Set] { return setsOf(p.destinations.all6) }

// HasDestinations reports whether any limit matches destinations; if none does, all of
// them are in one segment.
func (p *Policy) HasDestinations() bool { return p.withDestination != 0 }

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

// ProtocolSet returns the limits that match a protocol.
func (p *Policy) ProtocolSet(protocol Protocol) Set { return p.protocol[protocol] }

// OriginSet returns the limits that match a listener or an attachment, by its index from
// [Policy.ListenerIndex] or [Policy.AttachmentIndex].
func (p *Policy) OriginSet(index uint16) Set { return p.origins[index].set }

// Paced returns the limits with Rate or Packets.
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
