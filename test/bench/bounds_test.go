package main

import (
	"math"
	"strings"
	"testing"
)

func TestBounds(t *testing.T) {
	if err := example().checkBounds(); err != nil {
		t.Errorf("no problem, but: %v", err)
	}
	ours := func(r *report, cell int) map[string]stat { return r.Cells[cell].outcome(subject).Figures }
	for _, test := range []struct {
		name   string
		modify func(*report)
		want   string
	}{
		{"too fast", func(r *report) { ours(r, 0)["error"] = stat{[]float64{0, 6}} }, "W1 10 MB/s, 4 connections: rate error is 6.00 %, must be between -50 and 5"},
		{"one bad repetition", func(r *report) { ours(r, 1)["inflight"] = stat{[]float64{10, 11, 10}} }, "W6 a hog: peak connections is 11, must be between 0 and 10"},
		{"not a number", func(r *report) { ours(r, 0)["cpu"] = stat{[]float64{math.NaN()}} }, "CPU is NaN"},
		{"infinite", func(r *report) { ours(r, 0)["w1"] = stat{[]float64{math.Inf(1)}} }, "worst 1 ms is +Inf"},
		{"no headline", func(r *report) { delete(ours(r, 1), "p50") }, "shaperd has no headline figure p50"},
		{"a figure is missing", func(r *report) { delete(ours(r, 1), "p99") }, "shaperd has no p99, but others have"},
		{"no subject", func(r *report) { r.Cells[1].Outcomes = r.Cells[1].Outcomes[1:] }, "shaperd has no figures"},
		{"all peers failed", func(r *report) {
			o := r.Cells[1].outcome("naive")
			o.Cannot, o.Figures = failure+"no such file", nil
		}, "W6 a hog: all peers failed"},
	} {
		r := example()
		test.modify(r)
		err := r.checkBounds()
		if err == nil || !strings.Contains(err.Error(), test.want) || !strings.HasPrefix(err.Error(), "1 problem:") {
			t.Errorf("%s: got %v", test.name, err)
		}
	}
	r := example()
	r.Cells[0].outcome("toxiproxy").Cannot = failure + "no such file"
	if err := r.checkBounds(); err != nil {
		t.Errorf("one of several peers failed: %v", err)
	}
	r = example()
	ours(r, 0)["sigma"] = stat{[]float64{900}}
	ours(r, 1)["p50"] = stat{[]float64{5000}}
	if err := r.checkBounds(); err == nil || strings.Count(err.Error(), "\n") != 2 || !strings.HasPrefix(err.Error(), "2 problems:") {
		t.Errorf("want two problems, got %v", err)
	}
}

// TestBounds_NameMeasuredFigures checks that each bound applies to a figure of a short load.
func TestBounds_NameMeasuredFigures(t *testing.T) {
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
		if b.min >= b.max {
			t.Errorf("%s %s: empty range: %s", b.work, b.figure, b)
		}
	}
}
