package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseBenchmarks(t *testing.T) {
	const text = `goos: linux
pkg: shaperd/shaper
BenchmarkDecide/keys=1k-2         	1000	       41.5 ns/op	       0 B/op	       0 allocs/op
BenchmarkDecide/keys=1k-2         	1000	       39.25 ns/op	       1 B/op	       0 allocs/op
BenchmarkDecide/keys=1M,limits=3-2	1000	       60 ns/op	         1.5 gc-ms
BenchmarkPacket/1_limits          	20000	      114 ns/op
    bench_test.go:1: BenchmarkDecide is no result
PASS
ok  	shaperd/shaper	1.2s
`
	want := timings{
		"Decide/keys=1k":          {"ns/op": 39.25, "B/op": 0, "allocs/op": 0},
		"Decide/keys=1M,limits=3": {"ns/op": 60, "gc-ms": 1.5},
		"Packet/1_limits":         {"ns/op": 114},
	}
	got := parseBenchmarks(text)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	s, ok := got.sample("Decide/keys=1M,limits=3")
	if diff := cmp.Diff(map[string]float64{"ns": 60, "gc": 1.5}, s.figures); !ok || diff != "" {
		t.Error(ok, diff)
	}
	if _, err := got.samples([]benchRow{{"a row", "None"}}); err == nil {
		t.Error("a benchmark that did not run has samples")
	}
}
