package bpf

import (
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/asn"
)

// randomLimits returns limits of one attachment, which match packets of a generator.
func randomLimits(m *generator) []shaper.Limit {
	limits := make([]shaper.Limit, 1+m.IntN(6))
	if m.IntN(20) == 0 {
		limits = make([]shaper.Limit, shaper.MaxLimits)
	}
	for i := range limits {
		l := shaper.Limit{
			Name: fmt.Sprint("l", i), IPv4Prefix: 1 + m.IntN(32), IPv6Prefix: 1 + m.IntN(128),
			Key:      m.key(),
			MaxDelay: time.Duration(m.Uint64N(uint64(time.Second))) * time.Duration(m.IntN(2)),
			ECNMark:  m.IntN(101),
			Observe:  m.IntN(8) == 0,
			Match:    shaper.Match{Attach: []string{"here"}},
		}
		if m.IntN(8) == 0 {
			l.Match.Attach = []string{"elsewhere"}
		}
		if m.IntN(3) == 0 {
			l.Match.Protocol = shaper.Protocol(m.IntN(4))
		}
		for range m.IntN(4) * m.IntN(2) {
			l.Match.Source = append(l.Match.Source, m.prefix())
		}
		for range m.IntN(4) * m.IntN(2) {
			l.Match.Destination = append(l.Match.Destination, m.prefix())
		}
		for range m.IntN(3) * m.IntN(2) {
			l.Match.ASN = append(l.Match.ASN, uint32(1+m.IntN(4)))
		}
		if l.Match.Protocol != shaper.ICMP {
			for range m.IntN(3) * m.IntN(2) {
				first := somePorts[m.IntN(len(somePorts))]
				l.Match.Port = append(l.Match.Port, shaper.PortRange{First: first, Last: first + uint16(m.Uint64N(uint64(min(math.MaxUint16-int(first), 20)+1)))})
			}
		}
		for range m.IntN(3) * m.IntN(2) / 2 {
			l.Match.Country = append(l.Match.Country, asn.Country(m.IntN(3)))
		}
		for range m.IntN(3) * m.IntN(2) {
			l.Match.DSCP = append(l.Match.DSCP, m.dscp())
		}
		for range m.IntN(3) * m.IntN(2) {
			mask := []uint32{shaper.AnyMark, 0xff, 0xf0, 1 << 31}[m.IntN(4)]
			l.Match.Mark = append(l.Match.Mark, shaper.Mark{Value: m.mark() & mask, Mask: mask})
		}
		kinds := 1 + m.IntN(3)
		if len(l.Match.Source) > 0 && m.IntN(4) == 0 {
			l.Block, l.Key, kinds = true, 0, 0
		}
		if kinds&1 != 0 {
			l.Rate = m.logUniform(1e5, 1e8)
			if m.IntN(4) == 0 {
				l.Rate = m.logUniform(shaper.MinRate, shaper.MaxRate)
			}
			l.Burst = m.Uint64N(3000) * m.Uint64N(2)
			l.Overhead = m.IntN(60) * m.IntN(2)
			if leaky.NewRate(l.Rate, 8*time.Second).Cost(l.Burst) > longestBurst {
				l.Burst = 0
			}
		}
		if kinds&2 != 0 {
			l.Packets = shaper.Frequency{N: m.logUniform(10, 1e5), Per: time.Second}
			if m.IntN(4) == 0 {
				l.Packets = shaper.Frequency{N: m.logUniform(1, 1e12), Per: time.Duration(1 + m.Int64N(int64(shaper.MaxPer)))}
			}
			l.BurstPackets = m.Uint64N(20) * m.Uint64N(2)
			if leaky.NewRate(l.Packets.N, l.Packets.Per).Cost(l.BurstPackets) > longestBurst {
				l.BurstPackets = 0
			}
		}
		limits[i] = l
	}
	return limits
}

// key draws the fields of a key at attachments.
func (m *generator) key() shaper.Fields {
	key := shaper.Fields(m.Uint64N(128)) &^ shaper.KeyListen
	if m.IntN(3) == 0 {
		key |= shaper.KeyCountry
	}
	if key&shaper.KeyDestination != 0 && m.IntN(2) == 0 {
		return key &^ shaper.KeySource
	}
	if key&shaper.KeySource != 0 {
		return key &^ shaper.KeyDestination
	}
	return key
}

// logUniform draws a number from a to b, with a uniform logarithm.
func (m *generator) logUniform(a, b float64) uint64 {
	return uint64(a * math.Exp(m.Float64()*math.Log(b/a)))
}

func (m *generator) prefix() netip.Prefix {
	a := m.address(m.IntN(2) == 0)
	p, _ := a.Prefix(m.IntN(a.BitLen() + 1))
	return p
}

func asnTable(t testing.TB, m *generator) *asn.Table {
	var ranges []asn.Range
	for i := range 4 {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(10 + i/2), byte(i % 2)}), 16)
		ranges = append(ranges, asn.Range{First: p.Addr(), Last: lastOf(p), ASN: uint32(1 + m.IntN(4))})
	}
	p := netip.MustParsePrefix("2001:db8::/56")
	ranges = append(ranges, asn.Range{First: p.Addr(), Last: lastOf(p), ASN: uint32(1 + m.IntN(4))})
	var countries []asn.CountryRange
	for _, r := range ranges {
		if m.IntN(3) > 0 {
			countries = append(countries, asn.CountryRange{First: r.First, Last: r.Last, Country: 1 + asn.Country(m.IntN(2))})
		}
	}
	table, err := asn.New(ranges, countries...)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// pause draws the time until the next packet, in whole ns like packet timestamps.
func (m *generator) pause() leaky.Time {
	switch m.IntN(1000) {
	case 0:
		return leaky.Time(m.Uint64N(1e9)) * 64 * 3600 // days
	case 1, 2:
		return leaky.Time(m.Uint64N(1e9)) * 64
	}
	return leaky.Time(m.Uint64N(1e6)) * 64 * leaky.Time(m.IntN(2))
}
