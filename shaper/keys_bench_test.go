package shaper

import (
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper/asn"
)

// BenchmarkDecide_Keys times classification and one decision under keys and matches other than the source, in turns with the
// same under a limit by source, or by AS for countries: ratio is that of the medians.
func BenchmarkDecide_Keys(b *testing.B) {
	const keys, batch = 32_000, 20_000
	limit := func(l Limit) Limit {
		l.Name, l.Rate, l.MaxDelay, l.IPv4Prefix, l.IPv6Prefix = "l", 10e6, 200*time.Millisecond, 32, 64
		return l
	}
	address := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}) }
	var ranges []asn.Range
	var countries []asn.CountryRange
	for n := 0; n < keys; n += 8 {
		ranges = append(ranges, asn.Range{First: address(n), Last: address(n + 7), ASN: uint32(1 + n/8)})
		countries = append(countries, asn.CountryRange{First: address(n), Last: address(n + 7), Country: asn.Country(1 + n/8)})
	}
	table, err := asn.New(ranges, countries...)
	if err != nil {
		b.Fatal(err)
	}
	bySource, byAS, attached := limit(Limit{Key: KeySource}), limit(Limit{Key: KeyASN}), Match{Attach: []string{"a"}}
	hashes := make([][]TLV, keys)
	for n := range hashes {
		hashes[n] = []TLV{{0xe1, 1}, {0xe0, HashTLV(0xe0, address(n).AsSlice())}}
	}
	for _, bm := range []struct {
		name          string
		before, after Limit
		set           func(f *Flow, n int)
	}{
		{"destination", bySource, limit(Limit{Key: KeyDestination}), func(f *Flow, n int) { f.Source, f.Destination = address(n), address(n) }},
		{"downstream", bySource, limit(Limit{Key: KeyDownstream}), func(f *Flow, n int) { f.Source, f.Downstream = address(n), uint16(n) }},
		{"country", byAS, limit(Limit{Key: KeyCountry}), func(f *Flow, n int) { f.Source = address(n) }},
		{"tlv", bySource, limit(Limit{Key: KeyTLV, TLV: 0xe0}), func(f *Flow, n int) { f.Source, f.TLVs = address(n), append(f.TLVs[:0], hashes[n]...) }},
		{"dscp and mark", limit(Limit{Key: KeySource, Match: attached}), limit(Limit{Key: KeySource, Match: Match{
			Attach: attached.Attach, DSCP: []DSCP{0, 46}, Mark: []Mark{{1, 0xff}, {2, 0xff}, {3, 0xff}, {7, AnyMark}},
		}}), func(f *Flow, n int) { f.Source, f.Mark = address(n), uint32(1+n%3) }},
	} {
		b.Run(bm.name, func(b *testing.B) {
			type side struct {
				s      *Shaper
				p      *Policy
				flow   Flow
				random indexRNG
				ns     []float64
			}
			var sides [2]side
			for i, l := range []Limit{bm.before, bm.after} {
				s := New(keys)
				p, err := s.Compile([]Limit{l}, []Listener{{Name: "l", Addresses: []Address{{Protocol: TCP}}}}, []Attachment{{Name: "a"}}, table, false)
				if err != nil {
					b.Fatal(err)
				}
				s.Swap(p, leaky.Second)
				sides[i] = side{s: s, p: p, flow: Flow{Port: 80, Protocol: TCP}}
				if l.InPacketPlane() {
					sides[i].flow.Origin = p.AttachmentIndex("a")
				}
			}
			now := leaky.Second
			for b.Loop() {
				for i := range sides {
					d := &sides[i]
					start := time.Now()
					for range batch {
						bm.set(&d.flow, int(d.random.below(keys)))
						r := d.p.Route(&d.flow)
						if r.ToDownstream == 0 {
							b.Fatal("the limit does not match")
						}
						d.s.Decide(d.p, &d.flow, r, r.ToDownstream, 1, 1, now)
						now += 100
					}
					d.ns = append(d.ns, float64(time.Since(start).Nanoseconds())/batch)
				}
			}
			before, after := median(sides[0].ns), median(sides[1].ns)
			b.ReportMetric(before, "ns/before")
			b.ReportMetric(after, "ns/after")
			b.ReportMetric(after/before, "ratio")
		})
	}
}
