package main

import (
	"strings"
	"testing"
)

// scale multiplies the samples of a figure.
func (r *report) scale(cell int, program, key string, by float64) {
	samples := r.Cells[cell].outcome(program).Figures[key].Samples
	for i := range samples {
		samples[i] *= by
	}
}

func TestComparison(t *testing.T) {
	earlier, now := example(), example()
	now.scale(0, "nginx", "sigma", 1.1)   // within 15 %, and above the floor
	now.scale(0, "haproxy", "sigma", 3)   // noisy
	now.scale(0, "haproxy", "cpu", 1.2)   // differs
	now.scale(0, "haproxy", "gap50", 100) // not comparable
	now.scale(1, "naive", "p50", 0.8)     // differs
	now.Cells[1].outcome("naive").Figures["worst"] = stat{}
	now.Versions["nginx"] = "nginx 3"
	var b strings.Builder
	writeComparison(&b, earlier, now)
	want := `
Compared with the run of 2026-05-04 03:02
  11 of 14 ratios agree within 15 %; 2 disagree; 1 disagree but are noisy.
  differs    W1 10 MB/s, 4 connections: CPU to haproxy: 0.50, then 0.60
  differs    W6 a hog: p50 to naive: 17, then 13
  too noisy  W1: sigma (1)
  1 ratios are in only one of the runs
  The runs differ in the version of nginx
`
	if got := b.String(); got != want {
		t.Errorf("got %swant %s", got, want)
	}
	text, root := render(t, now, earlier)
	for _, want := range []string{"11 of 14 ratios agree", "Compared with the run of 4 May 2026", "the version of nginx"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if rows := strings.Join(texts(root, "tr"), "\n"); !strings.Contains(rows, "W6 a hogp50naive1713") {
		t.Errorf("the rows are\n%s", rows)
	}
}

func TestComparisonWithItself(t *testing.T) {
	c := compareReports(example(), example())
	if c.agree != 15 || c.disagree != nil || c.noisy != nil || c.unmatched != 0 || c.differences != nil {
		t.Errorf("a report differs from itself: %+v", c)
	}
}

func TestAgreement(t *testing.T) {
	for _, test := range []struct {
		then, now float64
		want      bool
	}{{1, 1.149, true}, {1, 1.151, false}, {1.149, 1, true}, {1.151, 1, false}, {0, 0, true}, {0, 1, false}} {
		d := difference{then: ratio{value: test.then}, now: ratio{value: test.now}}
		if d.agrees() != test.want {
			t.Errorf("%v and %v: %v", test.then, test.now, d.agrees())
		}
	}
}
