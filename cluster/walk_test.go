package cluster

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

var walks = flag.Int("walks", 300, "number of walks in TestWalk, for each kind of group")

// TestWalk takes random steps in groups of three hosts, in which time goes to the instants at which something ends, and
// to those just before: what random schedules meet once in 20,000 of them, it meets within some thousands of walks.
func TestWalk(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"db", "#db"} {
		for _, strict := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, strict %v", key, strict), func(t *testing.T) {
				t.Parallel()
				began := time.Now()
				above := 0
				for seed := range uint64(*walks) {
					n, lent := walk(seed, key, strict)
					if wrong := n.check(); wrong != "" {
						t.Fatalf("seed %d: %s%s", seed, wrong, n.path())
					}
					above += lent
				}
				t.Logf("%d walks in %.1f s; %d times a host could use more than its floor", *walks, time.Since(began).Seconds(), above)
				if above == 0 {
					t.Error("nothing was lent")
				}
			})
		}
	}
}

// walk returns where a random walk ends, early if something is wrong there, and how often a host could use more than its
// floor.
func walk(seed uint64, key string, strict bool) (n *node, above int) {
	const steps = 60
	r := rand.New(rand.NewPCG(seed, 7))
	n = newNode(3, key, seed%4 == 3)
	n.params.Strict = strict
	for i := range n.hosts {
		n.start(i, 1)
	}
	if r.IntN(2) == 0 {
		n.drain = n.params.Lease / 4
	}
	wants := make([]int64, len(n.hosts))
	for i := range wants {
		wants[i] = Whole * r.Int64N(2)
	}
	for range 1 + 2*truth(strict) { // until hosts that may be at another ledger are no matter
		n.group(wants...)
	}
	faults, calm := 1+r.IntN(8), 40+r.IntN(60)
	for n.depth < steps {
		var quiet, other []func()
		n.steps(func(name string, f int, do func(*node)) {
			if n.faults+f > faults {
				return
			}
			list := &other
			if strings.HasSuffix(name, " calls") || strings.HasPrefix(name, "time") || strings.HasPrefix(name, "all call") {
				list = &quiet
			}
			*list = append(*list, func() {
				n.before = &node{before: n.before, now: n.now, step: n.step, uses: append([]int64(nil), n.uses...)}
				n.step, n.faults, n.depth = name, n.faults+f, n.depth+1
				do(n)
			})
		})
		list := other
		if len(other) == 0 || r.IntN(100) < calm {
			list = quiet
		}
		list[r.IntN(len(list))]()
		if n.check() != "" {
			break
		}
		for _, use := range n.uses {
			if use > n.params.Floor() {
				above++
			}
		}
	}
	return n, above
}
