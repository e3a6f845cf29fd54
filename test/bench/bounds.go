package main

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"strings"
)

// A bound is the allowed range of a figure of the subject in each repetition, in the
// figure's unit. Bounds suit a shared machine with two processors: they detect breakage,
// not regressions in speed.
type bound struct {
	work, figure string
	min, max     float64
}

var bounds = []bound{
	// shaperd is never faster than the rate. It may be slower on a machine that is short of CPU time.
	{"W1", "error", -50, 5},
	{"W1", "sigma", 0, 500},
	{"W2", "w100", 0, 2},
	{"W3", "error", -50, 10},
	{"W4", "throughput", 0.1, math.MaxFloat64},
	{"W5", "connections", 20, math.MaxFloat64},
	{"W5", "failed", 0, 1},
	{"W6", "inflight", 0, slots},
	{"W6", "p50", 0, 1000},
	{"W7", "packets", 5, math.MaxFloat64},
	{"W9", "per-connection", -100, 100},
}

// checkBounds returns an error that lists all problems of the report: cells where the
// subject has no figures, or missing or non-finite ones, cells where all peers failed, and
// violated bounds.
func (r *report) checkBounds() error {
	var list []error
	problem := func(c *cell, format string, args ...any) {
		list = append(list, fmt.Errorf("%s %s: %s", c.Work, c.Name, fmt.Sprintf(format, args...)))
	}
	for _, c := range r.Cells {
		// A single peer may fail. When all fail, the harness is at fault.
		var failed, succeeded int
		for _, o := range c.Outcomes {
			if o.Peer && strings.HasPrefix(o.Cannot, failure) {
				failed++
			} else if o.Peer && len(o.Figures) > 0 {
				succeeded++
			}
		}
		if failed > 0 && succeeded == 0 {
			problem(c, "all peers failed")
		}
		ours := c.baseline()
		if ours == nil || len(ours.Figures) == 0 {
			problem(c, "%s has no figures", cmp.Or(c.Baseline, subject))
			continue
		}
		if len(ours.Figures[c.Headline].Samples) == 0 {
			problem(c, "%s has no headline figure %s", ours.Program, figureOf(c.Headline).title)
		}
		for _, f := range c.measuredFigures() {
			samples := ours.Figures[f.key].Samples
			if len(samples) == 0 && f.key != c.Headline && c.Baseline == "" {
				problem(c, "%s has no %s, but others have", ours.Program, f.title)
			}
			for _, x := range samples {
				if math.IsNaN(x) || math.IsInf(x, 0) {
					problem(c, "%s is %v", f.title, x)
				}
			}
		}
		for _, b := range bounds {
			if b.work != c.Work {
				continue
			}
			f := figureOf(b.figure)
			for _, x := range ours.Figures[b.figure].Samples {
				if x < b.min || x > b.max {
					problem(c, "%s is %s, must be %s", f.title, strings.TrimSpace(f.format(x)+" "+f.unit), b)
				}
			}
		}
	}
	switch len(list) {
	case 0:
		return nil
	case 1:
		return fmt.Errorf("1 problem: %w", list[0])
	}
	return fmt.Errorf("%d problems:\n%w", len(list), errors.Join(list...))
}

func (b bound) String() string {
	if b.max == math.MaxFloat64 {
		return fmt.Sprintf("at least %g", b.min)
	}
	return fmt.Sprintf("between %g and %g", b.min, b.max)
}
