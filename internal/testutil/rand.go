// Package testutil has what tests of several packages need. Importing it adds the flag -seed.
package testutil

import (
	"flag"
	"math/rand/v2"
	"testing"
	"time"
)

// Seed is the seed of the random tests: the time, unless the flag -seed sets it.
var Seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

// Rand returns a source of random numbers, and logs the flag that repeats them.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	t.Logf("-seed=%d", *Seed)
	return rand.New(rand.NewPCG(*Seed, 0))
}
