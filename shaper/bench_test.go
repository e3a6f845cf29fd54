package shaper

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper/asn"
	"shaperd.dev/shaperd/shaper/topk"
)

// indexRNG generates random indexes in a nanosecond and without cache misses.
type indexRNG uint64

func (d *indexRNG) below(n uint32) uint32 {
	*d = *d*6364136223846793005 + 1442695040888963407
	return uint32(uint64(*d>>32) * uint64(n) >> 32)
}

// missTime returns the ns of one dependent read of a random cache line, in as much
// memory as a table of this many keys takes: the lower bound of a decision on a random
// key, for comparison.
func missTime(keys int) float64 {
	lines := make([][8]uint64, keys+keys/spareDivisor)
	for i := range lines {
		lines[i][0] = uint64(i)
	}
	const reads = 500_000
	var d indexRNG
	best := time.Hour
	for range 3 {
		start := time.Now()
		for range reads {
			d += indexRNG(lines[d.below(uint32(len(lines)))][0])
		}
		best = min(best, time.Since(start))
	}
	return float64(best.Nanoseconds()) / reads
}

// BenchmarkDecide times classification and one decision in a filled table.
// With a thousand keys or more, in random order, it also reports the memory per key, the
// time of a garbage collection, and missTime of the same run.
func BenchmarkDecide(b *testing.B) {
	perSource := Limit{
		Name: "per-source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
		Rate: 10e6, MaxDelay: 200 * time.Millisecond,
	}
	for _, bb := range []struct {
		name   string
		keys   uint32
		limits []Limit
	}{
		{"keys=1", 1, []Limit{perSource}},
		{"keys=1k", 1000, []Limit{perSource}},
		{"keys=32k", 32_000, []Limit{perSource}},
		{"keys=1M", 1_000_000, []Limit{perSource}},
		{"keys=1k,limits=3", 1000, []Limit{
			perSource,
			{Name: "port", Key: KeyPort, Rate: 1e10, MaxDelay: time.Second},
			{Name: "all", Rate: 1e11, MaxDelay: time.Second},
		}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			s := New(int(bb.keys))
			p := mustCompile(b, s, bb.limits, []Listener{{Name: "l", Addresses: []Address{{Protocol: TCP}}}})
			now := leaky.Second
			s.Swap(p, now)
			flow := Flow{Port: 80, Protocol: TCP}
			decide := func(i uint32) {
				flow.Source = netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
				r := p.Route(&flow)
				s.Decide(p, &flow, r, r.ToDownstream, 1, 1, now)
			}
			for i := range bb.keys {
				decide(i)
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			gc := time.Hour // the minimum of a few: other processes' time slices count too
			for range 5 {
				start := time.Now()
				runtime.GC()
				gc = min(gc, time.Since(start))
			}
			b.ReportAllocs()
			var d indexRNG
			for b.Loop() {
				now += 64 * 150
				decide(d.below(bb.keys))
			}
			if got := s.TableUsage(); got.Entries < int(bb.keys) {
				b.Errorf("%d of %d keys are in the table; %+v", got.Entries, bb.keys, got)
			}
			if bb.keys >= 1000 {
				b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(bb.keys), "B/key")
				b.ReportMetric(float64(gc.Microseconds())/1e3, "gc-ms")
				b.ReportMetric(missTime(int(bb.keys)), "miss-ns")
			}
		})
	}
}

// BenchmarkDecideFlood times decisions that are each on a new key, in a table full of
// keys with a backlog.
func BenchmarkDecideFlood(b *testing.B) {
	const keys = 1_000_000
	s := New(keys)
	p := mustCompile(b, s, []Limit{{
		Name: "per-source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 8000, MaxDelay: time.Hour,
	}}, udpOnly)
	flow := Flow{Port: 53, Protocol: UDP}
	var n uint32
	decide := func() {
		n++
		flow.Source = ipv4Addr(n)
		r := p.Route(&flow)
		s.Decide(p, &flow, r, r.ToDownstream, 1000, 1, leaky.Second)
	}
	for range 3 * keys {
		decide()
	}
	b.ReportAllocs()
	for b.Loop() {
		decide()
	}
	if got := s.TableUsage(); got.EvictedBacklogged < uint64(b.N) {
		b.Errorf("%+v: the table was never full", got)
	}
}

// fullTable returns a table of the size of the Internet's in late 2025.
func fullTable(b *testing.B, rnd *rand.Rand) *asn.Table {
	const n4, n6, asns = 412_000, 103_000, 91_000
	var ranges []asn.Range
	for i := range uint32(n4) {
		const step = 0xdf000000 / n4 // up to multicast
		first := 0x01000000 + i*step
		ranges = append(ranges, asn.Range{First: ipv4Addr(first), Last: ipv4Addr(first + step - 1 - rnd.Uint32N(step/2)), ASN: 1 + rnd.Uint32N(asns)})
	}
	for i := range uint32(n6) {
		var first [16]byte
		first[0], first[1], first[2], first[3] = 0x20|byte(i>>16), byte(i>>8), byte(i), byte(rnd.Uint32())
		last := first
		for j := 4 + rnd.IntN(4); j < 16; j++ {
			last[j] = 0xff
		}
		ranges = append(ranges, asn.Range{First: netip.AddrFrom16(first), Last: netip.AddrFrom16(last), ASN: 1 + rnd.Uint32N(asns)})
	}
	table, err := asn.New(ranges)
	if err != nil {
		b.Fatal(err)
	}
	return table
}

// BenchmarkRoute times the classification of random sources, and reports the time to
// compile the policy.
func BenchmarkRoute(b *testing.B) {
	rnd := rand.New(rand.NewPCG(1, 2))
	many := make([]Limit, MaxLimits)
	for i := range many {
		base := ipv4Addr(rnd.Uint32())
		p4, _ := base.Prefix(8 + rnd.IntN(17))
		p6, _ := netip.AddrFrom16([16]byte{0x20, byte(i), byte(rnd.Uint32()), byte(rnd.Uint32())}).Prefix(16 + rnd.IntN(33))
		first := uint16(rnd.IntN(60000))
		many[i] = Limit{
			Name: fmt.Sprint(i), Rate: 8, Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
			Match: Match{Source: []netip.Prefix{p4, p6}, Port: []PortRange{{first, first + 1000}}},
		}
	}
	one := []Limit{{Name: "one", Rate: 8, Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64}}
	byASN := []Limit{{Name: "asn", Rate: 8, Key: KeyASN}, {Name: "some", Rate: 8, Match: Match{ASN: []uint32{13, 335, 64500}}}}
	table := fullTable(b, rnd)
	for _, bb := range []struct {
		name   string
		limits []Limit
		table  *asn.Table
		ipv6   bool
	}{
		{"limits=1", one, nil, false},
		{"limits=64", many, nil, false},
		{"limits=64,IPv6", many, nil, true},
		{"full ASN table", byASN, table, false},
		{"full ASN table,IPv6", byASN, table, true},
		{"full ASN table,limits=64", append(many[:62:62], byASN...), table, false},
	} {
		b.Run(bb.name, func(b *testing.B) {
			start := time.Now()
			p, err := New(1).Compile(bb.limits, udpOnly, nil, bb.table, false)
			if err != nil {
				b.Fatal(err)
			}
			compile := time.Since(start)
			flow := Flow{Protocol: UDP}
			b.ReportAllocs()
			var d indexRNG
			var seen Set
			for b.Loop() {
				n := d.below(1<<32 - 1)
				if bb.ipv6 {
					flow.Source = netip.AddrFrom16([16]byte{0x20 | byte(n>>31), byte(n >> 16), byte(n >> 8), byte(n), byte(n >> 24)})
				} else {
					flow.Source = ipv4Addr(n)
				}
				flow.Port = uint16(n)
				seen |= p.Route(&flow).ToDownstream
			}
			if b.N > 1_000_000 && seen == 0 {
				b.Error("no flow matched")
			}
			b.ReportMetric(float64(compile.Microseconds())/1e3, "compile-ms")
		})
	}
}

func BenchmarkRankingAdd(b *testing.B) {
	for name, keys := range map[string]uint32{"kept": 100, "flood": 1 << 30} {
		b.Run(name, func(b *testing.B) {
			var r topk.Ranking[Key]
			var usage topk.Usage
			for i := 0; b.Loop(); i++ {
				usage.Bytes = 1500
				r.Add(Key{ASN: uint32(i) * 2654435761 % keys}, usage, leaky.Second+leaky.Time(i)*1000)
			}
		})
	}
}
