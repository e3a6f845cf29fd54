package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"strings"

	"shaperd.dev/shaperd/test/lab/plot"
)

//go:embed page.html.tmpl
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

// The data of the template.
type (
	pageView struct {
		Report     *report
		Style      template.CSS
		Date       string
		Length     string
		Versions   []named
		Tally      tally
		Losses     []loss
		Works      []workView
		Comparison *comparisonView
		Figures    []named
		Programs   []named
		Agreement  string
	}

	// named is a name with a description.
	named struct{ Name, Text string }

	// loss is a cell whose headline figure is worse for the subject than for a peer.
	loss struct {
		Anchor, Where, Figure, Ours string
		Than                        []entry
	}

	workView struct {
		Name, Title string
		Columns     []string
		Rows        []rowView
		Absences    []*absence
		Cells       []cellView
	}

	rowView struct {
		Anchor, Name, Unit string
		Entries            []entry
	}

	// entry is a figure of a program. Mark and Word are empty without a ratio.
	entry struct {
		Program, Value, Range string
		Ratio                 string
		Noisy                 bool
		Cannot, Failures      string
		verdict
	}

	cellView struct {
		Anchor, Name, Load, Repeated string
		Settings                     []named
		Arrivals                     []template.HTML
		Pictures                     []template.HTML
		Columns                      []string
		Rows                         []rowView
	}

	comparisonView struct {
		Earlier, Sentence string
		Disagree          []differenceView
		Noisy             []noisyWork
		Alone             int
		Other             string
	}

	differenceView struct{ Where, Figure, Program, Then, Now string }
)

// page renders the report, with a comparison unless earlier is nil.
func (r *report) page(earlier *report) ([]byte, error) {
	v := pageView{
		Report: r, Style: template.CSS(svgStyle),
		Date:   r.Began.UTC().Format("2 January 2006, 15:04 UTC"),
		Length: duration(r.Seconds),
		Tally:  r.tally(), Losses: r.losses(),
		Agreement: fmt.Sprintf("%.0f %%", 100*(agreement-1)),
	}
	for _, p := range programs {
		if text := r.Versions[p.name]; text != "" {
			v.Versions = append(v.Versions, named{p.name, text})
		}
		v.Programs = append(v.Programs, named{p.name, p.description})
	}
	used := map[string]bool{}
	for _, g := range r.byWork() {
		v.Works = append(v.Works, g.view())
		for _, c := range g.cells {
			for _, f := range c.measuredFigures() {
				used[f.key] = true
			}
		}
	}
	for _, f := range figures {
		if used[f.key] {
			v.Figures = append(v.Figures, named{f.label(), f.explanation()})
		}
	}
	if earlier != nil {
		v.Comparison = compareReports(earlier, r).view(earlier)
	}
	var b bytes.Buffer
	err := pageTemplate.Execute(&b, v)
	return b.Bytes(), err
}

// explanation describes a figure, and its use in ratios.
func (f figure) explanation() string {
	text := f.description + "."
	switch f.better {
	case less:
		text += " Lower is better."
	case more:
		text += " Higher is better."
	default:
		text += " Neither direction is better."
	}
	if f.floor > 0 {
		text += fmt.Sprintf(" In ratios, less than %s counts as %s.", plot.Number(f.floor), strings.TrimSpace(plot.Number(f.floor)+" "+f.unit))
	}
	return text
}

func duration(seconds float64) string {
	if seconds < 120 {
		return fmt.Sprintf("%.0f s", seconds)
	}
	return fmt.Sprintf("%.0f min", seconds/60)
}

// anchor returns the HTML ID of a cell.
func (c *cell) anchor() string {
	return strings.Trim(strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(c.Work+"-"+c.Name)), "-")
}

// losses returns the cells whose headline figure is worse for the subject than for a peer.
func (r *report) losses() (list []loss) {
	for _, g := range r.byWork() {
		for _, c := range g.cells {
			f := figureOf(c.Headline)
			var than []entry
			for _, e := range c.entries(f, g.programs) {
				if e.verdict == behind {
					than = append(than, e)
				}
			}
			if than != nil {
				list = append(list, loss{c.anchor(), c.Work + " " + c.Name, f.label(), c.baseline().median(f), than})
			}
		}
	}
	return list
}

func (g *group) view() workView {
	v := workView{Name: g.name, Title: g.title, Columns: g.programs, Absences: g.absences()}
	for _, c := range g.cells {
		f := figureOf(c.Headline)
		v.Rows = append(v.Rows, rowView{c.anchor(), c.Name, f.label(), c.entries(f, g.programs)})
		v.Cells = append(v.Cells, c.view(g.programs))
	}
	return v
}

// entries returns a figure of the given programs.
func (c *cell) entries(f figure, programs []string) (list []entry) {
	for _, name := range programs {
		o := c.outcome(name)
		e := entry{Program: name, Value: o.median(f), Failures: o.failures()}
		if o != nil {
			e.Cannot = o.Cannot
			if s := o.Figures[f.key]; len(s.Samples) > 1 {
				e.Range = f.format(s.min()) + " to " + f.format(s.max())
			}
		}
		if r, ok := c.ratioTo(o, f.key); ok {
			e.Ratio, e.Noisy, e.verdict = r.String(), r.noisy(), o.verdict(r)
		}
		list = append(list, e)
	}
	return list
}

func (c *cell) view(order []string) cellView {
	v := cellView{Anchor: c.anchor(), Name: c.Name, Load: c.Load}
	repeated := 0
	for _, name := range order {
		o := c.outcome(name)
		if o == nil || len(o.Figures) == 0 {
			continue
		}
		v.Columns = append(v.Columns, name)
		for _, s := range o.Figures {
			repeated = max(repeated, len(s.Samples))
		}
		if o.Setting != "" {
			v.Settings = append(v.Settings, named{name, o.Setting})
		}
	}
	v.Repeated = fmt.Sprintf("%d %s", repeated, plural(repeated, "repetition"))
	for _, f := range c.measuredFigures() {
		v.Rows = append(v.Rows, rowView{Name: f.title, Unit: f.unit, Entries: c.entries(f, v.Columns)})
	}
	for _, picture := range c.arrivalCharts() {
		v.Arrivals = append(v.Arrivals, template.HTML(picture))
	}
	for _, picture := range []string{c.ratioChart(), c.waitChart()} {
		if picture != "" {
			v.Pictures = append(v.Pictures, template.HTML(picture))
		}
	}
	return v
}

func (c comparison) view(earlier *report) *comparisonView {
	v := &comparisonView{
		Earlier:  earlier.Began.UTC().Format("2 January 2006, 15:04 UTC"),
		Sentence: c.summary(), Noisy: c.noisyWorks(), Alone: c.unmatched, Other: strings.Join(c.differences, ", "),
	}
	for _, d := range c.disagree {
		v.Disagree = append(v.Disagree, differenceView{d.work + " " + d.cell, d.figure.title, d.program, d.then.String(), d.now.String()})
	}
	return v
}
