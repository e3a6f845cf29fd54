package main

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// pageOnly are the figures that only the page shows: components and details of other figures.
var pageOnly = map[string]bool{
	"w1": true, "gap50": true, "gap99": true, "user": true, "system": true, "softirq": true,
}

// legend explains the marks in the tables.
const legend = "After each figure: how many times better shaperd is. ▲ better, ▼ worse, = even within 5 %.\n" +
	"~ noisy: two runs may disagree by more than 15 %."

// A grid is a text table. Each column except the first is a value followed by a remark.
type grid struct{ rows [][]string }

func (g *grid) add(row ...string) { g.rows = append(g.rows, row) }

func (g *grid) write(w io.Writer) {
	var widths []int
	for _, row := range g.rows {
		for i, text := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(text))
		}
	}
	for _, row := range g.rows {
		var line strings.Builder
		for i, text := range row {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(text))
			switch {
			case i == 0:
				line.WriteString("  " + text + pad)
			case i%2 == 1:
				line.WriteString("  " + pad + text)
			case widths[i] > 0:
				line.WriteString(" " + pad + text)
			}
		}
		fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
	}
}

// remark returns the ratio of the subject to a program, with its mark.
func (c *cell) remark(o *outcome, key string) string {
	r, ok := c.ratioTo(o, key)
	if !ok {
		return ""
	}
	return r.String() + o.verdict(r).Mark
}

// median formats the median of a figure, or a dash without one.
func (o *outcome) median(f figure) string {
	if o == nil || len(o.Figures[f.key].Samples) == 0 {
		return "-"
	}
	return f.format(o.Figures[f.key].median())
}

// writeCell prints a cell: one row of medians per program.
func writeCell(w io.Writer, c *cell) {
	fmt.Fprintf(w, "\n%s  %s\n", c.Work, c.Name)
	var g grid
	titles, units := []string{""}, []string{""}
	var shown []figure
	for _, f := range c.measuredFigures() {
		if pageOnly[f.key] {
			continue
		}
		shown = append(shown, f)
		titles, units = append(titles, f.title, ""), append(units, f.unit, "")
	}
	g.add(titles...)
	g.add(units...)
	var notes []string
	for _, o := range c.Outcomes {
		if o.Cannot != "" {
			notes = append(notes, o.Program+" not measured: "+o.Cannot)
		}
		if o.Setting != "" {
			notes = append(notes, o.Program+": "+o.Setting)
		}
		if len(o.Figures) == 0 {
			continue
		}
		row := []string{o.Program}
		for _, f := range shown {
			row = append(row, o.median(f), c.remark(o, f.key))
		}
		g.add(row...)
	}
	g.write(w)
	for _, note := range notes {
		fmt.Fprintf(w, "  %s\n", note)
	}
}

// writeSummary prints the headline figure of each cell, one table per work.
func (r *report) writeSummary(w io.Writer) {
	fmt.Fprintf(w, "\nSummary: the headline figure of each load, medians\n%s\n", legend)
	for _, work := range r.byWork() {
		fmt.Fprintf(w, "\n%s\n", strings.TrimSpace(work.name+"  "+work.title))
		var g grid
		var failures []string
		header := []string{""}
		for _, name := range work.programs {
			header = append(header, name, "")
		}
		g.add(header...)
		for _, c := range work.cells {
			f := figureOf(c.Headline)
			row := []string{c.Name + ": " + f.label()}
			for _, name := range work.programs {
				o := c.outcome(name)
				row = append(row, o.median(f), c.remark(o, f.key))
				if text := o.failures(); text != "" {
					failures = append(failures, fmt.Sprintf("%s, %s: %s", c.Name, name, text))
				}
			}
			g.add(row...)
		}
		g.write(w)
		for _, line := range failures {
			fmt.Fprintf(w, "  ✗ %s\n", line)
		}
		for _, a := range work.absences() {
			where := ""
			if a.Cells != nil {
				where = " in " + strings.Join(a.Cells, "; ")
			}
			fmt.Fprintf(w, "  %s not measured%s: %s\n", a.Program, where, a.Why)
		}
	}
	fmt.Fprintf(w, "\n%s\n", r.tally())
}

// label returns a figure's title with its unit.
func (f figure) label() string {
	text := f.title
	if f.unit != "" {
		text += ", " + f.unit
	}
	return text
}

// A tally counts the verdicts on the headline figures against peers.
type tally struct{ Better, Worse, Even, Noisy int }

func (r *report) tally() (t tally) {
	for _, c := range r.Cells {
		for _, o := range c.Outcomes {
			ratio, ok := c.ratioTo(o, c.Headline)
			if !ok {
				continue
			}
			switch o.verdict(ratio) {
			case ahead:
				t.Better++
			case behind:
				t.Worse++
			case even:
				t.Even++
			default:
				continue
			}
			if ratio.noisy() {
				t.Noisy++
			}
		}
	}
	return t
}

func (t tally) String() string {
	return fmt.Sprintf("Of %d headline ratios to peers, shaperd is better in %d, worse in %d and even in %d; %d of them are noisy.",
		t.Better+t.Worse+t.Even, t.Better, t.Worse, t.Even, t.Noisy)
}
