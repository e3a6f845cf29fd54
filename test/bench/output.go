package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/test/lab/plot"
)

// publish writes the report to a directory and prints a summary. It compares the report
// with an earlier one unless that is nil.
func (r *report) publish(w io.Writer, dir string, earlier *report) error {
	if err := r.write(dir, earlier); err != nil {
		return err
	}
	r.writeSummary(w)
	if earlier != nil {
		writeComparison(w, earlier, r)
	}
	fmt.Fprintf(w, "\n%s and report.json: %d loads in %.0f s\n", filepath.Join(dir, "report.html"), len(r.Cells), r.Seconds)
	return nil
}

// write writes the report to a directory, as JSON and as an HTML page. The page includes
// a comparison with an earlier report unless that is nil.
func (r *report) write(dir string, earlier *report) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	text, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "report.json"), append(text, '\n'), 0o644); err != nil {
		return err
	}
	html, err := r.page(earlier)
	if err != nil {
		return fmt.Errorf("write the page: %w", err)
	}
	return os.WriteFile(filepath.Join(dir, "report.html"), html, 0o644)
}

func readReport(path string) (*report, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r := &report{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("%s is not a report of this harness: %w", path, err)
	}
	return r, nil
}

func (f figure) format(x float64) string {
	if f.digits < 0 {
		return plot.Grouped(int(x + 0.5))
	}
	text := strconv.FormatFloat(x, 'f', f.digits, 64)
	if strings.Trim(text, "-0.") == "" {
		text = strings.TrimPrefix(text, "-")
	}
	return text
}

// ceiling is the run without a program between the hosts. It is not a peer: its ratios
// show the cost of forwarding and do not count as better or worse.
const ceiling = "direct"

// measuredFigures returns the figures of a cell that at least one program has.
func (c *cell) measuredFigures() (list []figure) {
	for _, key := range c.Figures {
		for _, o := range c.Outcomes {
			if len(o.Figures[key].Samples) > 0 {
				list = append(list, figureOf(key))
				break
			}
		}
	}
	return list
}

// ratioTo compares the baseline with the program of an outcome. It returns false for the
// baseline itself and if there is nothing to compare.
func (c *cell) ratioTo(o *outcome, key string) (ratio, bool) {
	ours := c.baseline()
	if ours == nil || o == nil || o == ours {
		return ratio{}, false
	}
	return c.compare(key, ours, o)
}

// failures returns the share of failed attempts if it is 1 % or more, because the other
// figures cover successful attempts only and look better for it.
func (o *outcome) failures() string {
	if o == nil || len(o.Figures["failed"].Samples) == 0 || o.Figures["failed"].median() < 1 {
		return ""
	}
	return plot.Number(o.Figures["failed"].median()) + " % failed"
}

// A group is the cells of one work.
type group struct {
	name, title string
	cells       []*cell
	programs    []string // with figures, in column order
}

// byWork groups the cells of a report, in their order.
func (r *report) byWork() (list []*group) {
	groupOf := func(name string) *group {
		for _, g := range list {
			if g.name == name {
				return g
			}
		}
		g := &group{name: name}
		for _, w := range works {
			if w.name == name {
				g.title = w.title
			}
		}
		list = append(list, g)
		return g
	}
	for _, c := range r.Cells {
		g := groupOf(c.Work)
		g.cells = append(g.cells, c)
	}
	for _, g := range list {
		g.programs = g.order()
	}
	return list
}

// order returns the programs that have figures: first in the order of programs, then those known only to the cells.
func (g *group) order() (names []string) {
	var all []string
	for _, p := range programs {
		all = append(all, p.name)
	}
	for _, c := range g.cells {
		for _, o := range c.Outcomes {
			if !slices.Contains(all, o.Program) {
				all = append(all, o.Program)
			}
		}
	}
	for _, name := range all {
		if slices.ContainsFunc(g.cells, func(c *cell) bool {
			o := c.outcome(name)
			return o != nil && len(o.Figures) > 0
		}) {
			names = append(names, name)
		}
	}
	return names
}

// An absence is the reason why a program was not measured in some cells of a work.
type absence struct {
	Program, Why string
	Cells        []string // empty for all
}

// absences returns the absences of a work, one per program and reason.
func (g *group) absences() (list []*absence) {
	for _, c := range g.cells {
		for _, o := range c.Outcomes {
			if o.Cannot == "" {
				continue
			}
			i := slices.IndexFunc(list, func(a *absence) bool { return a.Program == o.Program && a.Why == o.Cannot })
			if i < 0 {
				i, list = len(list), append(list, &absence{Program: o.Program, Why: o.Cannot})
			}
			list[i].Cells = append(list[i].Cells, c.Name)
		}
	}
	for _, a := range list {
		if len(a.Cells) == len(g.cells) {
			a.Cells = nil
		}
	}
	return list
}
