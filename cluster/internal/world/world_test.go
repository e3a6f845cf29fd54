package world

import (
	"testing"

	"shaperd.dev/shaperd/cluster"
)

// TestRun_WithoutFaults has hosts find together, one follow its demand, and buckets become cold again.
func TestRun_WithoutFaults(t *testing.T) {
	for seed := range uint64(20) {
		r := Run(Options{Seed: seed, Length: 2 * cluster.Second, New: NewMemory})
		if r.Violation != "" {
			t.Error(r.Violation)
		}
		if r.Joins < 2 || r.AboveFloor == 0 || r.Calls < 100 {
			t.Errorf("seed %d showed nothing: %+v", seed, r)
		}
	}
}
