package shaper

import (
	"net/netip"

	"shaperd/leaky"
)

// who ranks sources over all limits, by address, by prefix and by autonomous system.
type who struct {
	sources  Ranking[netip.Addr]
	prefixes Ranking[netip.Prefix]
	asns     Ranking[uint32]
}

// Prefixes by which sources are ranked.
const (
	whoPrefix4 = 24
	whoPrefix6 = 48
)

// Note takes in what a source did, but where somebody else is at a ranking just now: whoever
// moves packets does not wait for who looks.
func (s *Shaper) Note(source netip.Addr, did Tally, now leaky.Time) {
	bits := whoPrefix6
	if source.Is4() {
		bits = whoPrefix4
	}
	prefix, _ := source.Prefix(bits)
	s.who.sources.TryAdd(source, did, now)
	s.who.prefixes.TryAdd(prefix, did, now)
	if n := s.Policy().ASN(source); n != 0 {
		s.who.asns.TryAdd(n, did, now)
	}
}

// HeavySources returns the at most n heaviest source addresses by a trait.
func (s *Shaper) HeavySources(by Trait, n int, now leaky.Time) []Heavy[netip.Addr] {
	return s.who.sources.Heaviest(by, n, now)
}

// HeavyPrefixes returns the at most n heaviest prefixes of sources by a trait: /24 of
// IPv4, /48 of IPv6.
func (s *Shaper) HeavyPrefixes(by Trait, n int, now leaky.Time) []Heavy[netip.Prefix] {
	return s.who.prefixes.Heaviest(by, n, now)
}

// HeavyASNs returns the at most n heaviest autonomous systems of sources by a trait.
func (s *Shaper) HeavyASNs(by Trait, n int, now leaky.Time) []Heavy[uint32] {
	return s.who.asns.Heaviest(by, n, now)
}
