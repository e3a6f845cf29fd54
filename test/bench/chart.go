package main

import (
	"fmt"
	"math"
	"strings"

	"shaperd.dev/shaperd/test/lab/plot"
)

const (
	left  = 46.0 // of a plot, for labels
	right = 8.0
)

// shownBins is the maximum number of bins in an arrival chart.
const shownBins = 300

// rebin returns the series with bins wide enough to contain several units each: at 100
// kB/s a segment arrives every 14 ms. The unit of a series of bytes is a segment.
func (s *series) rebin() *series {
	quantum := 1.0
	if s.Unit == "bytes" {
		quantum = segment
	}
	wide := 1
	if s.Nominal > 0 && s.Nominal < 3*quantum {
		wide = int(plot.NiceStep(3 * quantum / s.Nominal))
	}
	out := &series{BinMillis: s.BinMillis * float64(wide), Nominal: s.Nominal * float64(wide), Unit: s.Unit}
	for i := 0; i+wide <= len(s.Bins) && len(out.Bins) < shownBins; i += wide {
		sum := 0
		for _, n := range s.Bins[i : i+wide] {
			sum += n
		}
		out.Bins = append(out.Bins, sum)
	}
	return out
}

// maxBin returns the value of the highest bin.
func (s *series) maxBin() float64 {
	most := 0
	for _, n := range s.Bins {
		most = max(most, n)
	}
	return float64(most)
}

// clip is the upper end of an arrival chart, in multiples of the nominal rate. Higher
// values are cut off, because a flood would flatten the other charts.
const clip = 8

// arrivalCharts draws the arrivals through each program of a cell, on the same scales.
func (c *cell) arrivalCharts() (pictures []string) {
	type chart struct {
		program string
		*series
	}
	var charts []chart
	top, bins := 0.0, 0
	for _, o := range c.Outcomes {
		if o.Series == nil || len(o.Series.Bins) == 0 {
			continue
		}
		s := o.Series.rebin()
		charts = append(charts, chart{o.Program, s})
		most := s.maxBin()
		if s.Nominal > 0 {
			most = min(most, clip*s.Nominal)
		}
		top, bins = max(top, most, 1.5*s.Nominal), max(bins, len(s.Bins))
	}
	for _, p := range charts {
		pictures = append(pictures, p.draw(p.program, top, bins))
	}
	return pictures
}

// draw draws a series in a plot with the given number of bins and a range from 0 to top.
func (s *series) draw(program string, top float64, bins int) string {
	const y, h = 40.0, 96.0
	w := pictureWidth - left - right
	d := &plot.Drawing{Width: pictureWidth, Height: y + h + 34}
	per, unit := 1.0, s.Unit
	if unit == "bytes" {
		per, unit = 1000, "kB"
	}
	label := fmt.Sprintf("%s in %s ms", unit, plot.Number(s.BinMillis))
	d.Text(0, 14, "name", "start", program)
	d.Text(pictureWidth-right, 14, "", "end", fmt.Sprintf("max: %s %s", plot.Number(s.maxBin()/per), label))
	d.Text(left, y-8, "", "start", label)
	p := plot.Panel{Drawing: d, X: left, Y: y, W: w, H: h, XMax: float64(bins) * s.BinMillis, YMax: top / per}
	p.Axes(4)
	class := "theirs"
	if program == subject {
		class = "ours"
	}
	values := make([]float64, len(s.Bins))
	for i, n := range s.Bins {
		values[i] = float64(n) / per
	}
	p.Area(values, s.BinMillis, class)
	d.Text(left+w/2, y+h+31, "", "middle", "ms")
	if s.Nominal > 0 {
		p.Limit(s.Nominal/per, "")
	}
	if s.maxBin() > top {
		d.Text(left+w, y-8, "ink", "end", "▲ off the scale")
	}
	description := fmt.Sprintf("Arrivals through %s: up to %s %s", program, plot.Number(s.maxBin()/per), label)
	if s.Nominal > 0 {
		description += fmt.Sprintf("; the rate is %s", plot.Number(s.Nominal/per))
	}
	return d.SVG(description)
}

// maxRatio is the ratio at the end of the scale. Bars of larger ratios are cut off, and labeled with the value.
const maxRatio = 1000

// ratioChart draws the ratios of a cell's headline figure, on a logarithmic scale: to the
// right the subject is better. It is empty without ratios.
func (c *cell) ratioChart() string {
	const y, each = 34.0, 24.0
	type bar struct {
		*outcome
		ratio
	}
	var list []bar
	reach := 2.0
	for _, o := range c.Outcomes {
		r, ok := c.ratioTo(o, c.Headline)
		if !ok {
			continue
		}
		list = append(list, bar{o, r})
		for _, v := range []float64{r.value, r.min, r.max} {
			if v > 0 {
				reach = max(reach, v, 1/v)
			}
		}
	}
	if list == nil {
		return ""
	}
	reach = min(reach, maxRatio)
	f := figureOf(c.Headline)
	bottom := y + each*float64(len(list))
	d := &plot.Drawing{Width: pictureWidth, Height: bottom + 36}
	scale := plot.LogScale{Min: 1 / reach, Max: reach, X: 76, W: pictureWidth - 76 - 74}
	d.Text(0, 14, "name", "start", "How many times better: "+f.title)
	for _, v := range scale.Ticks() {
		d.Line(scale.At(v), y-6, scale.At(v), bottom, "grid")
		d.Text(scale.At(v), bottom+14, "", "middle", tick10(v))
	}
	label := "Ratios of " + f.title + ", above 1 shaperd is better:"
	for i, b := range list {
		top := y + each*float64(i)
		v := b.outcome.verdict(b.ratio)
		one, end := scale.At(1), scale.At(b.value)
		d.Text(68, top+13, "ink", "end", b.Program)
		class := v.Word
		if v != ahead && v != behind {
			class = "theirs"
		}
		d.Rect(min(one, end), top+2, max(math.Abs(end-one), 1), 14, class)
		d.Line(scale.At(b.min), top+9, scale.At(b.max), top+9, "whisker")
		d.Text(pictureWidth-right, top+13, "ink", "end", strings.TrimSpace(b.String()+" "+v.Mark))
		label += fmt.Sprintf(" %s %s;", b.Program, strings.TrimSpace(b.String()+" "+v.Word))
	}
	d.Line(scale.At(1), y-6, scale.At(1), bottom, "axis")
	d.Text(scale.At(1)-6, bottom+30, "", "end", "▼ shaperd is worse")
	d.Text(scale.At(1)+6, bottom+30, "", "start", "shaperd is better ▲")
	return d.SVG(strings.TrimSuffix(label, ";") + ".")
}

// tick10 formats a tick of the ratio scale.
func tick10(v float64) string {
	if v < 1 {
		return "1/" + plot.Number(math.Round(1/v))
	}
	return plot.Number(v)
}

// waitChart draws the wait distribution of each program: the median, the 99th percentile
// and the longest. It is empty if the cell has no such figures.
func (c *cell) waitChart() string {
	const y, each = 54.0, 24.0
	type wait struct {
		program string
		p50     float64
		p99     float64
		worst   float64 // p99 where it is not measured
		failed  string
	}
	var list []wait
	least, most := math.Inf(1), 0.0
	measuresWorst := false
	for _, o := range c.Outcomes {
		p50, p99, worst := o.Figures["p50"], o.Figures["p99"], o.Figures["worst"]
		if len(p50.Samples) == 0 || len(p99.Samples) == 0 {
			continue
		}
		w := wait{o.Program, p50.median(), p99.median(), p99.median(), o.failures()}
		if len(worst.Samples) > 0 {
			w.worst, measuresWorst = worst.median(), true
		}
		list = append(list, w)
		least, most = min(least, w.p50), max(most, w.p50, w.p99, w.worst)
	}
	if list == nil || least <= 0 {
		return ""
	}
	if most < 4*least {
		least, most = least/2, most*2
	}
	bottom := y + each*float64(len(list))
	d := &plot.Drawing{Width: pictureWidth, Height: bottom + 36}
	scale := plot.LogScale{Min: least / 1.2, Max: most * 1.2, X: 76, W: pictureWidth - 76 - 18}
	d.Text(0, 14, "name", "start", "Response times")
	key := "● median   │ 99th percentile"
	if measuresWorst {
		key += "   ─ up to the longest"
	}
	d.Text(0, 34, "", "start", key)
	for _, v := range scale.Ticks() {
		d.Line(scale.At(v), y-6, scale.At(v), bottom, "grid")
		d.Text(scale.At(v), bottom+14, "", "middle", plot.Number(v))
	}
	d.Text(scale.X+scale.W/2, bottom+30, "", "middle", "ms, logarithmic")
	label := "Response times in ms:"
	for i, w := range list {
		at := y + each*float64(i) + 9
		class := "theirs"
		if w.program == subject {
			class = "ours"
		}
		d.Text(68, at+4, "ink", "end", w.program)
		d.Line(scale.At(w.p50), at, scale.At(max(w.p99, w.worst)), at, "axis")
		d.Line(scale.At(w.p99), at-6, scale.At(w.p99), at+6, "whisker")
		d.Dot(scale.At(w.p50), at, 5, class)
		if w.failed != "" {
			// Next to the line, on the side with more room.
			x, anchor := scale.At(max(w.p99, w.worst))+8, "start"
			if x > pictureWidth/2 {
				x, anchor = scale.At(w.p50)-10, "end"
			}
			d.Text(x, at+4, "ink", anchor, "✗ "+w.failed)
		}
		label += fmt.Sprintf(" %s median %s, 99th percentile %s", w.program, plot.Number(w.p50), plot.Number(w.p99))
		if measuresWorst {
			label += fmt.Sprintf(", longest %s", plot.Number(w.worst))
		}
		if w.failed != "" {
			label += ", " + w.failed
		}
		label += ";"
	}
	return d.SVG(strings.TrimSuffix(label, ";") + ".")
}
