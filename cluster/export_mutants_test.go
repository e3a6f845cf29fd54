//go:build mutants

package cluster

import (
	"testing"
	"time"
)

// SetMutant leaves a rule out, or none if name is "".
func SetMutant(name string) { currentMutant = name }

// SearchMutants are rules that no call of TestSearch may do without.
var SearchMutants = []string{
	"cold-unjoined", "decrease-at-once", "fresh-floor", "increase-unbooked", "lease-from-reply", "lend-in-use", "lend-unsettled", "no-grace",
	"no-quarantine", "parts-in-grace", "quarantine-without-step", "short-regrant",
}

// TestMutants_Search leaves out each of these rules, and searches.
func TestMutants_Search(t *testing.T) {
	defer SetMutant("")
	for _, name := range SearchMutants {
		began := time.Now()
		states, found := searchWithout(name)
		if found == "" {
			t.Errorf("%s is not found in %d states", name, states)
			continue
		}
		t.Logf("%-24s | %7d states | %.1f s", name, states, time.Since(began).Seconds())
	}
}

func searchWithout(name string) (states int, found string) {
	for _, begin := range beginnings {
		SetMutant(name)
		s := newSearch(*searchDepth, *searchFaults)
		found = s.run(begin.node())
		states += len(s.seen)
		if found != "" {
			return states, found
		}
	}
	return states, ""
}

// WalkMutants are rules that random schedules almost never need, and random walks do.
var WalkMutants = []string{"floor-only-counted", "quarantine-without-drain"}

// TestMutants_Walk leaves out each of these rules, and walks.
func TestMutants_Walk(t *testing.T) {
	const most = 50_000
	defer SetMutant("")
	for _, name := range WalkMutants {
		SetMutant(name)
		began, seed, found := time.Now(), uint64(0), ""
		for ; seed < most && found == ""; seed++ {
			n, _ := walk(seed, "db", false)
			found = n.check()
		}
		if found == "" {
			t.Errorf("%s is not found in %d walks", name, most)
		}
		t.Logf("%-24s | %7d walks | %.1f s | %s", name, seed, time.Since(began).Seconds(), found)
	}
}

// ScriptMutants are rules that random schedules almost never need, and what does. It returns what is wrong, or "".
var ScriptMutants = map[string]func() string{"known-while-live": lendBesideOneAway}

// TestMutants_Script leaves out each of these rules.
func TestMutants_Script(t *testing.T) {
	defer SetMutant("")
	for name, script := range ScriptMutants {
		SetMutant(name)
		if found := script(); found == "" {
			t.Errorf("%s is not found", name)
		} else {
			t.Logf("%-20s | %s", name, found)
		}
	}
}
