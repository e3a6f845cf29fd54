package shaper

import (
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"shaperd/leaky"
)

// BenchmarkDecide times one decision among a million keys in random order, and
// reports what a key takes and how long a garbage collection lasts.
func BenchmarkDecide(b *testing.B) {
	const keys = 1_000_000
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	s := New(keys)
	p, err := s.Compile([]Limit{{
		Name: "per-source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
		Rate: 10e6, MaxDelay: 200 * time.Millisecond,
	}}, []Listener{{Name: "l", TCP: true}}, nil, false)
	if err != nil {
		b.Fatal(err)
	}
	now := leaky.Second
	s.Swap(p, now)
	flow := Flow{Port: 80, Protocol: TCP}
	decide := func(i uint32) {
		flow.Source = netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		r := p.Route(&flow)
		s.Decide(p, &flow, r, r.ToDownstream, 1, 1, now)
	}
	for i := range uint32(keys) {
		decide(i)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	start := time.Now()
	runtime.GC()
	gc := time.Since(start)
	order := make([]uint32, 1<<20)
	for i := range order {
		order[i] = rand.Uint32N(keys)
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		now += 64 * 150
		decide(order[i&(len(order)-1)])
		i++
	}
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/keys, "B/key")
	b.ReportMetric(float64(gc.Microseconds())/1e3, "gc-ms")
	if got := s.Buckets(); got.Entries < keys*999/1000 {
		b.Errorf("%d of %d keys are in the table; %+v", got.Entries, keys, got)
	}
}
