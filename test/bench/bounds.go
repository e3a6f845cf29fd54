package main

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"strings"
)

// A bound is what each repetition of a figure of the subject has to keep, in the
// figure's unit. Bounds are for a machine of two processors that others use too: they
// find what is broken, not what has become slower.
type bound struct {
	work, figure string
	least, most  float64
}

var bounds = []bound{
	// Never faster is the promise. Slower is what a machine without time for it makes.
	{"W1", "error", -50, 5},
	{"W1", "sigma", 0, 500},
	{"W2", "w100", 0, 2},
	{"W3", "error", -50, 10},
	{"W4", "throughput", 0.1, math.MaxFloat64},
	{"W5", "connections", 100, math.MaxFloat64},
	{"W5", "failed", 0, 1},
	{"W6", "inflight", 0, slots},
	{"W6", "p50", 0, 1000},
	{"W7", "packets", 5, math.MaxFloat64},
	{"W9", "per-connection", -100, 100},
}

// bounds is an error that lists everything wrong with the report: cells without the
// subject or with figures of it that are missing or no numbers, peers that all failed, and
// bounds that are not kept.
func (r *report) bounds() error {
	var list []error
	wrong := func(c *cell, format string, args ...any) {
		list = append(list, fmt.Errorf("%s %s: %s", c.Work, c.Name, fmt.Sprintf(format, args...)))
	}
	for _, c := range r.Cells {
		// One peer may have a bad day. When all fail it is the harness that does.
		var failed, fine int
		for _, o := range c.Outcomes {
			if o.Peer && strings.HasPrefix(o.Cannot, failure) {
				failed++
			} else if o.Peer && len(o.Figures) > 0 {
				fine++
			}
		}
		if failed > 0 && fine == 0 {
			wrong(c, "all peers failed")
		}
		ours := c.baseline()
		if ours == nil || len(ours.Figures) == 0 {
			wrong(c, "%s has no figures", cmp.Or(c.Baseline, subject))
			continue
		}
		if len(ours.Figures[c.Headline].Samples) == 0 {
			wrong(c, "%s has no %s, which it is about", ours.Program, figureOf(c.Headline).title)
		}
		for _, f := range c.measured() {
			samples := ours.Figures[f.key].Samples
			if len(samples) == 0 && f.key != c.Headline && c.Baseline == "" {
				wrong(c, "%s has no %s, and others have", ours.Program, f.title)
			}
			for _, x := range samples {
				if math.IsNaN(x) || math.IsInf(x, 0) {
					wrong(c, "%s is %v", f.title, x)
				}
			}
		}
		for _, b := range bounds {
			if b.work != c.Work {
				continue
			}
			f := figureOf(b.figure)
			for _, x := range ours.Figures[b.figure].Samples {
				if x < b.least || x > b.most {
					wrong(c, "%s is %s, and has to be %s", f.title, strings.TrimSpace(f.format(x)+" "+f.unit), b)
				}
			}
		}
	}
	switch len(list) {
	case 0:
		return nil
	case 1:
		return fmt.Errorf("1 thing is wrong: %w", list[0])
	}
	return fmt.Errorf("%d things are wrong:\n%w", len(list), errors.Join(list...))
}

func (b bound) String() string {
	if b.most == math.MaxFloat64 {
		return fmt.Sprintf("at least %g", b.least)
	}
	return fmt.Sprintf("within %g and %g", b.least, b.most)
}
