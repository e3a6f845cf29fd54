package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// A difference is the same ratio in two runs.
type difference struct {
	work, cell, program string
	figure              figure
	then, now           ratio
}

// agrees reports whether the ratios differ by at most the factor agreement.
func (d difference) agrees() bool {
	return d.then.value == d.now.value || math.Abs(math.Log(d.then.value/d.now.value)) <= math.Log(agreement)
}

// noisy reports whether a disagreement of the two runs proves nothing.
func (d difference) noisy() bool { return d.then.noisy() || d.now.noisy() }

func (d difference) String() string {
	return fmt.Sprintf("%s %s: %s to %s: %s, then %s", d.work, d.cell, d.figure.title, d.program, d.then, d.now)
}

// A comparison compares the ratios of two runs.
type comparison struct {
	agree       int
	disagree    []difference
	noisy       []difference // that disagree, but are too noisy to judge
	unmatched   int          // ratios in only one of the runs
	differences []string     // how the runs themselves differ
}

// compareReports compares each ratio of two reports.
func compareReports(earlier, now *report) (c comparison) {
	then := earlier.ratios()
	for key, d := range now.ratios() {
		old, ok := then[key]
		if !ok {
			c.unmatched++
			continue
		}
		delete(then, key)
		d.then = old.now
		switch {
		case d.agrees():
			c.agree++
		case d.noisy():
			c.noisy = append(c.noisy, d)
		default:
			c.disagree = append(c.disagree, d)
		}
	}
	c.unmatched += len(then)
	now.sort(c.disagree)
	now.sort(c.noisy)
	if earlier.Machine != now.Machine {
		c.differences = append(c.differences, "the machine")
	}
	if earlier.Short != now.Short {
		c.differences = append(c.differences, "-short")
	}
	for _, p := range programs {
		if earlier.Versions[p.name] != now.Versions[p.name] {
			c.differences = append(c.differences, "the version of "+p.name)
		}
	}
	return c
}

// ratioKey identifies a ratio of a report.
type ratioKey struct{ work, cell, program, figure string }

// ratios returns all ratios of a report, each in the field now.
func (r *report) ratios() map[ratioKey]difference {
	all := map[ratioKey]difference{}
	for _, c := range r.Cells {
		for _, o := range c.Outcomes {
			for _, key := range c.Figures {
				if x, ok := c.ratioTo(o, key); ok {
					all[ratioKey{c.Work, c.Name, o.Program, key}] = difference{c.Work, c.Name, o.Program, figureOf(key), ratio{}, x}
				}
			}
		}
	}
	return all
}

// sort sorts differences in the order of the report.
func (r *report) sort(list []difference) {
	pos := map[[2]string]int{}
	for i, c := range r.Cells {
		pos[[2]string{c.Work, c.Name}] = i
	}
	slices.SortFunc(list, func(a, b difference) int {
		if d := pos[[2]string{a.work, a.cell}] - pos[[2]string{b.work, b.cell}]; d != 0 {
			return d
		}
		if d := strings.Compare(a.program, b.program); d != 0 {
			return d
		}
		return strings.Compare(a.figure.key, b.figure.key)
	})
}

// summary returns the counts as a sentence.
func (c comparison) summary() string {
	return fmt.Sprintf("%d of %d ratios agree within 15 %%; %d disagree; %d disagree but are noisy.",
		c.agree, c.agree+len(c.disagree)+len(c.noisy), len(c.disagree), len(c.noisy))
}

// A noisyWork is a work with ratios that are too noisy to judge.
type noisyWork struct {
	Work    string
	Ratios  int
	Figures string // with counts
}

// noisyWorks summarizes the noisy ratios that disagree.
func (c comparison) noisyWorks() (list []noisyWork) {
	var names []string
	counts := map[string]map[string]int{}
	for _, d := range c.noisy {
		if counts[d.work] == nil {
			names = append(names, d.work)
			counts[d.work] = map[string]int{}
		}
		counts[d.work][d.figure.key]++
	}
	for _, name := range names {
		w := noisyWork{Work: name}
		var parts []string
		for _, f := range figures {
			if n := counts[name][f.key]; n > 0 {
				w.Ratios += n
				parts = append(parts, fmt.Sprintf("%s (%d)", f.title, n))
			}
		}
		w.Figures = strings.Join(parts, ", ")
		list = append(list, w)
	}
	return list
}

// writeComparison prints the disagreements of two reports.
func writeComparison(w io.Writer, earlier, now *report) {
	c := compareReports(earlier, now)
	fmt.Fprintf(w, "\nCompared with the run of %s\n  %s\n", earlier.Began.Format("2006-01-02 15:04"), c.summary())
	for _, d := range c.disagree {
		fmt.Fprintf(w, "  differs    %s\n", d)
	}
	for _, n := range c.noisyWorks() {
		fmt.Fprintf(w, "  too noisy  %s: %s\n", n.Work, n.Figures)
	}
	if c.unmatched > 0 {
		fmt.Fprintf(w, "  %d ratios are in only one of the runs\n", c.unmatched)
	}
	if len(c.differences) > 0 {
		fmt.Fprintf(w, "  The runs differ in %s\n", strings.Join(c.differences, ", "))
	}
}
