package cluster_test

import (
	"flag"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/internal/world"
)

var (
	schedules = flag.Int("check.schedules", 500, "number of schedules in TestCheck; 10 of them make an hour of a group")
	firstSeed = flag.Uint64("check.seed", 1, "seed of the first schedule")
	seconds   = flag.Int("check.seconds", 120, "length of a schedule")
	printLog  = flag.Bool("check.log", false, "print what happens in the first schedule that fails")
)

// slowdown is how many times fewer schedules there are under the race detector.
var slowdown = 1

// TestCheck looks for an instant at which hosts together may use more than there is, in random
// schedules of faults. To see one schedule: -check.seed=N -check.schedules=1 -check.log.
func TestCheck(t *testing.T) {
	t.Parallel()
	for _, alive := range []struct {
		name      string
		share     int // of the schedules
		configure func(*world.Options)
	}{
		{"fast", 1, fast},
		{"small", 5, small},
		{"strict", 5, strict},
		{"strict, two ledgers", 5, split},
	} {
		t.Run(alive.name, func(t *testing.T) {
			n := *schedules / alive.share / slowdown
			began := time.Now()
			found := check(n, 5, alive.configure)
			t.Logf("%d schedules in %.0f s: %s", n, time.Since(began).Seconds(), found.sum.String())
			for _, violation := range found.violations {
				t.Error(violation)
			}
			if len(found.violations) > 0 {
				if *printLog {
					replay(t, found.seeds[0], alive.configure)
				}
				return
			}
			expectWork(t, n, &found.sum)
		})
	}
}

func fast(*world.Options)     {}
func small(o *world.Options)  { o.Small = true }
func strict(o *world.Options) { o.Strict = true }
func split(o *world.Options)  { o.Strict, o.Split = true, true }

// expectWork fails if schedules were safe because nothing happened in them.
func expectWork(t *testing.T, n int, r *world.Result) {
	t.Helper()
	if n < 50 {
		return
	}
	each := func(total int64) float64 { return float64(total) / float64(n) }
	if mean := r.Sum / float64(r.Samples); mean < 0.35 {
		t.Errorf("hosts may use %.2f on average", mean)
	}
	if each(r.Epochs) < 5 || each(r.Joins) < 8 || each(r.Leaves) < 0.5 || each(r.AboveFloor) < 1000 {
		t.Errorf("too little happened: %s", r)
	}
	if each(r.SlotsLent) < 500 || each(r.Departed) < 10 {
		t.Errorf("few slots were lent, or few tickets used: %s", r)
	}
	if r.Demotions == 0 || r.Forgotten == 0 {
		t.Errorf("no bucket became cold, or no host was forgotten: %s", r)
	}
}

// finding is what a run of many schedules found.
type finding struct {
	sum        world.Result
	violations []string // of the first schedules
	seeds      []uint64 // of all
	broken     map[uint64]world.Invariant
}

// check runs n schedules on all processors, from the first seed, until so many have failed.
func check(n, failures int, configure func(*world.Options)) finding {
	var mu sync.Mutex
	var wg sync.WaitGroup
	found := finding{broken: map[uint64]world.Invariant{}}
	next := *firstSeed
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				mu.Lock()
				seed := next
				next++
				done := seed >= *firstSeed+uint64(n) || len(found.seeds) >= failures
				mu.Unlock()
				if done {
					return
				}
				r := world.Run(options(seed, configure))
				mu.Lock()
				found.sum.Add(&r)
				if r.Violation != "" {
					found.seeds = append(found.seeds, seed)
					found.broken[seed] = r.Broken
					if len(found.violations) < 10 {
						found.violations = append(found.violations, r.Violation)
					}
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return found
}

func options(seed uint64, configure func(*world.Options)) world.Options {
	o := world.Options{Seed: seed, Length: cluster.Time(*seconds) * cluster.Second, New: world.NewMemory}
	configure(&o)
	if !o.Split {
		o.After = func(l world.Ledger, now cluster.Time) string { return l.(*world.Memory).Overbooked(now) }
	}
	return o
}

// replay runs a schedule again and prints what happens.
func replay(t *testing.T, seed uint64, configure func(*world.Options)) {
	o := options(seed, configure)
	o.Log = func(line string) { fmt.Println(line) }
	world.Run(o)
	t.Logf("that was seed %d", seed)
}
