package main

import (
	"math"
	"strings"
	"testing"
)

func TestBounds(t *testing.T) {
	if err := example().bounds(); err != nil {
		t.Errorf("nothing is wrong, but: %v", err)
	}
	ours := func(r *report, cell int) map[string]stat { return r.Cells[cell].outcome(subject).Figures }
	for _, test := range []struct {
		name  string
		spoil func(*report)
		want  string
	}{
		{"too fast", func(r *report) { ours(r, 0)["error"] = stat{[]float64{0, 6}} }, "W1 10 MB/s, 4 connections: mean off is 6.00 %, and has to be within -50 and 5"},
		{"one bad repetition", func(r *report) { ours(r, 1)["inflight"] = stat{[]float64{10, 11, 10}} }, "W6 a hog: most at once is 11, and has to be within 0 and 10"},
		{"not a number", func(r *report) { ours(r, 0)["cpu"] = stat{[]float64{math.NaN()}} }, "CPU is NaN"},
		{"infinite", func(r *report) { ours(r, 0)["w1"] = stat{[]float64{math.Inf(1)}} }, "worst 1 ms is +Inf"},
		{"no headline", func(r *report) { delete(ours(r, 1), "p50") }, "shaperd has no p50, which it is about"},
		{"a figure is missing", func(r *report) { delete(ours(r, 1), "p99") }, "shaperd has no p99, and others have"},
		{"no subject", func(r *report) { r.Cells[1].Outcomes = r.Cells[1].Outcomes[1:] }, "shaperd has no figures"},
		{"all peers failed", func(r *report) {
			o := r.Cells[1].outcome("naive")
			o.Cannot, o.Figures = failure+"no such file", nil
		}, "W6 a hog: all peers failed"},
	} {
		r := example()
		test.spoil(r)
		err := r.bounds()
		if err == nil || !strings.Contains(err.Error(), test.want) || !strings.HasPrefix(err.Error(), "1 thing is wrong:") {
			t.Errorf("%s: got %v", test.name, err)
		}
	}
	r := example()
	r.Cells[0].outcome("toxiproxy").Cannot = failure + "no such file"
	if err := r.bounds(); err != nil {
		t.Errorf("one of several peers failed: %v", err)
	}
	r = example()
	ours(r, 0)["sigma"] = stat{[]float64{900}}
	ours(r, 1)["p50"] = stat{[]float64{5000}}
	if err := r.bounds(); err == nil || strings.Count(err.Error(), "\n") != 2 || !strings.HasPrefix(err.Error(), "2 things are wrong:") {
		t.Errorf("two things are wrong, got %v", err)
	}
}

// TestBoundsAreOfFigures finds bounds that bind nothing.
func TestBoundsAreOfFigures(t *testing.T) {
	for _, b := range bounds {
		found := false
		for _, w := range works {
			if w.name != b.work {
				continue
			}
			for _, l := range w.loads(true) {
				for _, key := range l.figures {
					found = found || key == b.figure
				}
			}
		}
		if !found {
			t.Errorf("no short load of %s has the figure %s", b.work, b.figure)
		}
		if b.least >= b.most {
			t.Errorf("%s %s: nothing is %s", b.work, b.figure, b)
		}
	}
}
