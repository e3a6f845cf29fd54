package shaper

import "testing"

// However many buckets sources wait for, each is reported now and then.
func TestHeaviestDemands_NoneLeftOutForLong(t *testing.T) {
	const waiting, n = 3 * MaxDemands, 4 * MaxDemands
	reported := map[uint32]bool{}
	for range 100 { // the chance that one is left out each time is 1 in 10^13
		all := make([]Demand, n)
		for i := range all {
			all[i].Key.Limit = uint32(i)
			if i < waiting {
				all[i].Waiting = 1
			}
		}
		heaviest := HeaviestDemands(all)
		if len(heaviest) != MaxDemands {
			t.Fatalf("%d demands, want %d", len(heaviest), MaxDemands)
		}
		for _, d := range heaviest {
			if d.Waiting == 0 {
				t.Fatal("there is one that nothing waits for")
			}
			reported[d.Key.Limit] = true
		}
	}
	if len(reported) != waiting {
		t.Errorf("%d of %d buckets were reported", len(reported), waiting)
	}
}

// All that are unsettled are reported, although others need more.
func TestHeaviestDemands_Unsettled(t *testing.T) {
	const unsettled = MaxDemands + 1
	all := make([]Demand, unsettled+2*MaxDemands)
	for i := range all {
		all[i].Waiting = 1
		if i%2 == 0 && i < 2*unsettled {
			all[i] = Demand{Unsettled: true}
		}
	}
	n := 0
	heaviest := HeaviestDemands(all)
	for _, d := range heaviest {
		if d.Unsettled {
			n++
		}
	}
	if n != unsettled || len(heaviest) != n+MaxDemands {
		t.Errorf("%d demands, of which %d are unsettled", len(heaviest), n)
	}
}
