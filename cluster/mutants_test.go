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
	"absent-floor":         fast,
	"any-params":           fast,
	"believe-has":          fast,
	"clock-ahead":          fast,
	"cold-unjoined":        fast,
	"count-cut":            fast,
	"count-ignorant":       fast,
	"count-unleased":       fast,
	"decrease-at-once":     fast,
	"floor-uncounted":      fast,
	"forget-counted":       fast,
	"forget-unsettled":     fast,
	"fresh-floor":          fast,
	"gone-anyway":          fast,
	"gone-in-strict":       split,
	"good-from-request":    fast,
	"ignore-resync":        fast,
	"increase-unbooked":    fast,
	"join-sure":            fast,
	"join-unsettled":       fast,
	"known-while-live":     fast,
	"late-replies":         fast,
	"leased-unsure":        fast,
	"leaving-floor":        fast,
	"lend-before-known":    fast,
	"lend-in-use":          fast,
	"lend-unsettled":       fast,
	"no-epoch":             fast,
	"no-grace":             fast,
	"no-islands":           fast,
	"no-quarantine":        fast,
	"no-resync":            fast,
	"no-resync-at-start":   fast,
	"old-calls":            fast,
	"over-unsettled":       fast,
	"params-at-once":       fast,
	"parts-in-grace":       fast,
	"repeated-epoch":       split,
	"resync-once":          fast,
	"short-regrant":        fast,
	"slots-expire":         fast,
	"slots-fresh-floor":    fast,
	"slots-no-reserve":     fast,
	"slots-untold":         fast,
	"spoken-uncounted":     fast,
	"stood-still":          fast,
	"strict-at-once":       split,
	"tell-at-once":         fast,
	"tell-once":            fast,
	"tickets-before-known": fast,
	"tickets-no-islands":   fast,
	"tickets-survive":      fast,
}

var mutantSchedules = flag.Int("mutants.schedules", 600, "number of schedules in which a mutant must be found")

// TestMutants leaves out each rule, and looks for a schedule that violates an invariant. Which one is found, and how
// many schedules that takes, does not depend on the machine.
func TestMutants(t *testing.T) {
	listed := slices.Sorted(maps.Keys(mutants))
	all := append(slices.Clone(listed), cluster.SearchMutants...)
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
