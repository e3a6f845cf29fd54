package shaper

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper/asn"
	"shaperd.dev/shaperd/shaper/segments"
)

// richPolicy is a limit by source, with groups, exceptions, and values for this many prefixes, in up to distinct different ones.
func richPolicy(prefixes, distinct int) ([]Limit, []Group) {
	l := Limit{Name: "per-source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 10e6, MaxDelay: 200 * time.Millisecond}
	if prefixes == 0 {
		return []Limit{l}, nil
	}
	gold, monitoring := Group{Name: "gold"}, Group{Name: "monitoring"}
	for i := range prefixes {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 14), byte(i >> 6), byte(i << 2)}), 30)
		v := l.Values()
		v.Rate = 1e6 * uint64(1+i%distinct)
		l.BySource = append(l.BySource, SourceValues{p, v})
		if i%3 == 0 {
			gold.Source = append(gold.Source, netip.PrefixFrom(p.Addr(), 31))
		}
		if i%100 == 0 {
			monitoring.Source = append(monitoring.Source, netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 14), byte(i >> 6), 0}), 24))
		}
	}
	v := l.Values()
	v.Rate = 100e6
	l.For = []Tier{{"gold", v}}
	l.Except.Group = []string{"monitoring"}
	return []Limit{l}, []Group{gold, monitoring}
}

// BenchmarkDecide_Tiers times classification and one decision for random sources, without and with groups, exceptions, and values for
// 100,000 prefixes, in turns: ratio is that of the medians.
func BenchmarkDecide_Tiers(b *testing.B) {
	const keys, prefixes = 32_000, 100_000
	type side struct {
		s      *Shaper
		p      *Policy
		random indexRNG
		ns     []float64
	}
	var sides [2]side
	// The other one knows the AS of each of these prefixes instead, which a policy could do before.
	for i := range sides {
		limits, groups := richPolicy(prefixes, 1000)
		var table *asn.Table
		if i == 0 {
			var ranges []asn.Range
			for n, v := range limits[0].BySource {
				ranges = append(ranges, asn.Range{First: v.Source.Addr(), Last: segments.LastAddr(v.Source), ASN: uint32(1 + n%1000)})
			}
			limits[0].Key |= KeyASN
			limits[0].BySource, limits[0].For, limits[0].Except = nil, nil, Sources{}
			var err error
			if table, err = asn.New(ranges); err != nil {
				b.Fatal(err)
			}
		}
		s := New(keys)
		p, err := s.Compile(limits, []Listener{{Name: "l", Addresses: []Address{{Protocol: TCP}}}}, nil, table, false, groups...)
		if err != nil {
			b.Fatal(err)
		}
		s.Swap(p, leaky.Second)
		sides[i] = side{s: s, p: p}
	}
	const batch = 20_000
	flow := Flow{Port: 80, Protocol: TCP}
	now := leaky.Second
	for b.Loop() {
		for i := range sides {
			d := &sides[i]
			start := time.Now()
			for range batch {
				n := d.random.below(keys)
				flow.Source = netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
				r := d.p.Route(&flow)
				d.s.Decide(d.p, &flow, r, r.ToDownstream, 1, 1, now)
				now += 100
			}
			d.ns = append(d.ns, float64(time.Since(start).Nanoseconds())/batch)
		}
	}
	without, with := median(sides[0].ns), median(sides[1].ns)
	b.ReportMetric(without, "ns/without")
	b.ReportMetric(with, "ns/with")
	b.ReportMetric(with/without, "ratio")
}

func median(all []float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}

// BenchmarkCompile_Tiers compiles a policy with values for 100,000 prefixes, and reports the memory that it takes.
func BenchmarkCompile_Tiers(b *testing.B) {
	for _, distinct := range []int{3, 1000, 100_000} {
		b.Run(fmt.Sprint("distinct=", distinct), func(b *testing.B) {
			limits, groups := richPolicy(100_000, distinct)
			s := New(16)
			var p *Policy
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			for b.Loop() {
				p, _ = s.Compile(limits, nil, nil, nil, false, groups...)
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/1e6, "MB")
			runtime.KeepAlive(p)
		})
	}
}
