package shaper

import (
	"net/netip"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper/topk"
)

// talkers ranks sources over all limits, by address, by prefix and by AS.
type talkers struct {
	sources  topk.Ranking[netip.Addr]
	prefixes topk.Ranking[netip.Prefix]
	asns     topk.Ranking[uint32]
}

// Prefix lengths by which sources are ranked.
const (
	talkerPrefix4 = 24
	talkerPrefix6 = 48
)

// Record adds the usage of a source to the rankings. It skips rankings that are in use, so
// that traffic never waits for readers.
func (s *Shaper) Record(source netip.Addr, usage topk.Usage, now leaky.Time) {
	bits := talkerPrefix6
	if source.Is4() {
		bits = talkerPrefix4
	}
	prefix, _ := source.Prefix(bits)
	s.talkers.sources.TryAdd(source, usage, now)
	s.talkers.prefixes.TryAdd(prefix, usage, now)
	if n := s.Policy().ASN(source); n != 0 {
		s.talkers.asns.TryAdd(n, usage, now)
	}
}

// TopSources returns up to n heaviest source addresses by a sort key.
func (s *Shaper) TopSources(by topk.SortKey, n int, now leaky.Time) []topk.HeavyHitter[netip.Addr] {
	return s.talkers.sources.Heaviest(by, n, now)
}

// TopPrefixes returns up to n heaviest source prefixes by a sort key: /24 of IPv4, /48 of
// IPv6.
func (s *Shaper) TopPrefixes(by topk.SortKey, n int, now leaky.Time) []topk.HeavyHitter[netip.Prefix] {
	return s.talkers.prefixes.Heaviest(by, n, now)
}

// TopASNs returns up to n heaviest AS numbers of sources by a sort key.
func (s *Shaper) TopASNs(by topk.SortKey, n int, now leaky.Time) []topk.HeavyHitter[uint32] {
	return s.talkers.asns.Heaviest(by, n, now)
}
