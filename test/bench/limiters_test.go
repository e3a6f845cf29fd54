package main

import (
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"
)

// BenchmarkDecide measures decisions with the usual Go code, a map of rate.Limiter behind
// a mutex. It measures like the benchmark of the same name in package shaper: the same
// keys, in the same random order.
func BenchmarkDecide(b *testing.B) {
	for _, bb := range []struct {
		name string
		keys uint32
	}{{"1", 1}, {"1k", 1000}, {"32k", 32_000}, {"1M", 1_000_000}} {
		b.Run(fmt.Sprint("keys=", bb.name), func(b *testing.B) {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			var mu sync.Mutex
			limiters := map[netip.Addr]*rate.Limiter{}
			now := time.Now()
			decide := func(i uint32) {
				source := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
				mu.Lock()
				l := limiters[source]
				if l == nil {
					l = rate.NewLimiter(10e6/8, 250_000)
					limiters[source] = l
				}
				mu.Unlock()
				l.AllowN(now, 1)
			}
			for i := range bb.keys {
				decide(i)
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			gc := time.Hour
			for range 5 {
				start := time.Now()
				runtime.GC()
				gc = min(gc, time.Since(start))
			}
			b.ReportAllocs()
			var draw uint64
			for b.Loop() {
				now = now.Add(150)
				draw = draw*6364136223846793005 + 1442695040888963407
				decide(uint32(draw >> 32 * uint64(bb.keys) >> 32))
			}
			b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(bb.keys), "B/key")
			b.ReportMetric(float64(gc.Microseconds())/1e3, "gc-ms")
			runtime.KeepAlive(limiters)
		})
	}
}
