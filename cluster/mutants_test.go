//go:build mutants

package cluster_test

import (
	"flag"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/internal/world"
)

// mutants are the rules that can be left out, and the schedules in which that is found.
var mutants = map[string]func(*world.Options){
	"absent-floor":         aim(world.Leave, world.Forget, world.CutOff),
	"any-params":           aim(world.Configure, world.FailOver),
	"believe-has":          aim(world.FailOver),
	"clock-ahead":          aim(world.StepClock),
	"cold-unjoined":        fast,
	"count-cut":            aim(world.FailOver),
	"count-ignorant":       aim(world.Crash, world.FailOver),
	"count-unleased":       fast,
	"decrease-at-once":     fast,
	"floor-uncounted":      aim(world.FailOver),
	"forget-counted":       fast,
	"forget-unsettled":     aim(world.Forget, world.FailOver),
	"fresh-floor":          fast,
	"gone-anyway":          aim(world.Leave, world.Replace, world.FailOver),
	"gone-in-strict":       smallSplit,
	"good-from-request":    fast,
	"ignore-resync":        aim(world.CutTo),
	"increase-unbooked":    fast,
	"join-sure":            fast,
	"join-unsettled":       fast,
	"late-replies":         fast,
	"leased-unsure":        fast,
	"leaving-floor":        small,
	"lend-before-known":    fast,
	"lend-in-use":          fast,
	"lend-unsettled":       fast,
	"no-epoch":             fast,
	"no-grace":             fast,
	"no-islands":           fast,
	"no-quarantine":        fast,
	"no-resync":            fast,
	"no-resync-at-start":   aim(world.Crash),
	"old-calls":            fast,
	"over-unsettled":       small,
	"params-at-once":       aim(world.Configure),
	"parts-in-grace":       fast,
	"repeated-epoch":       aim(world.FailOver),
	"resync-once":          aim(world.Stall),
	"short-regrant":        fast,
	"slots-expire":         fast,
	"slots-fresh-floor":    fast,
	"slots-no-reserve":     small,
	"slots-untold":         fast,
	"spoken-uncounted":     aim(world.FailOver),
	"stood-still":          aim(world.FreezeLedger),
	"strict-at-once":       split,
	"tell-at-once":         fast,
	"tell-once":            fast,
	"tickets-before-known": many,
	"tickets-no-islands":   fast,
	"tickets-survive":      aim(world.FailOver),
}

func many(o *world.Options) { o.Many = true }

func smallSplit(o *world.Options) {
	small(o)
	split(o)
}

// aim has faults of these kinds happen in a small group.
func aim(faults ...world.Fault) func(*world.Options) {
	return func(o *world.Options) { o.Small, o.Faults = true, faults }
}

var mutantSchedules = flag.Int("mutants.schedules", 3000, "number of schedules in which a mutant must be found")

// TestMutants leaves out each rule, and looks for a schedule that violates an invariant. Which one is found, and how
// many schedules that takes, does not depend on the machine.
func TestMutants(t *testing.T) {
	listed := slices.Sorted(maps.Keys(mutants))
	all := slices.Concat(listed, cluster.SearchMutants, cluster.WalkMutants, slices.Collect(maps.Keys(cluster.ScriptMutants)))
	slices.Sort(all)
	if diff := cmp.Diff(slices.Compact(all), mutantsOfCode(t)); diff != "" {
		t.Errorf("-table +code:\n%s", diff)
	}
	defer cluster.SetMutant("")
	t.Logf("%-20s | %-9s | schedules | s", "mutant", "found by")
	for _, name := range listed {
		cluster.SetMutant(name)
		began := time.Now()
		found := check(*mutantSchedules, 1, mutants[name])
		if len(found.seeds) == 0 {
			t.Errorf("%s is not found in %d schedules", name, *mutantSchedules)
			continue
		}
		first := slices.Min(found.seeds)
		t.Logf("%-20s | %-9s | %9d | %.1f", name, found.broken[first], first-*firstSeed+1, time.Since(began).Seconds())
	}
}

// mutantsOfCode returns the rules that the code can leave out.
func mutantsOfCode(t *testing.T) []string {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\bmutant\("([^"]*)"\)`).FindAllSubmatch(source, -1) {
			names[string(m[1])] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}
