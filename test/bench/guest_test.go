package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseGuest(t *testing.T) {
	all, err := parseGuest(`=== RUN   TestKernels/6.12/netns/TestCompareQdiscs/10/1/shaperd
    qdiscs_vm_test.go:80: bench: 10 Mbit/s, shaperd: error=-0.25 sigma=1.4
    qdiscs_vm_test.go:80: bench: 10 Mbit/s, fq maxrate: error=0.1 sigma=3
    qdiscs_vm_test.go:80: bench: 10 Mbit/s, shaperd: error=0.5 sigma=1.5
    qdiscs_vm_test.go:80: bench: 100 Mbit/s, shaperd: error=2
    qdiscs_vm_test.go:75: longest stall: 3ms
ok
`)
	if err != nil {
		t.Fatal(err)
	}
	type figures = map[string]float64
	got := map[int]map[string][]figures{}
	for rate, programs := range all {
		got[rate] = map[string][]figures{}
		for name, list := range programs {
			for _, s := range list {
				got[rate][name] = append(got[rate][name], s.figures)
			}
		}
	}
	want := map[int]map[string][]figures{
		10: {
			"shaperd":    {{"error": -0.25, "sigma": 1.4}, {"error": 0.5, "sigma": 1.5}},
			"fq maxrate": {{"error": 0.1, "sigma": 3}},
		},
		100: {"shaperd": {{"error": 2}}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, bad := range []string{"bench: 10 Mbit/s, shaperd: error=x\n", "bench: x Mbit/s, shaperd: error=1\n"} {
		if _, err := parseGuest(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}
