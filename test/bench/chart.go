package main

import (
	"fmt"
	"math"
	"strings"
)

const (
	left  = 46.0 // of a plot, for its labels
	right = 8.0
)

// shownBins are the most that one picture of arrivals shows.
const shownBins = 300

// readable returns the series in bins wide enough to hold several units each: at
// 100 kB/s a segment comes every 14 ms. Of bytes the unit is a segment.
func (s *series) readable() *series {
	quantum := 1.0
	if s.Unit == "bytes" {
		quantum = segment
	}
	wide := 1
	if s.Nominal > 0 && s.Nominal < 3*quantum {
		wide = int(niceStep(3 * quantum / s.Nominal))
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

// highest is the most in one bin.
func (s *series) highest() float64 {
	most := 0
	for _, n := range s.Bins {
		most = max(most, n)
	}
	return float64(most)
}

// clip is how many times the nominal rate a picture of arrivals shows. What is higher
// is cut off, or a flood would leave no room for the others.
const clip = 8

// arrivals draws what arrived through each program of a cell, on the same scales.
func (c *cell) arrivals() (pictures []string) {
	type plot struct {
		program string
		*series
	}
	var plots []plot
	top, bins := 0.0, 0
	for _, o := range c.Outcomes {
		if o.Series == nil || len(o.Series.Bins) == 0 {
			continue
		}
		s := o.Series.readable()
		plots = append(plots, plot{o.Program, s})
		most := s.highest()
		if s.Nominal > 0 {
			most = min(most, clip*s.Nominal)
		}
		top, bins = max(top, most, 1.5*s.Nominal), max(bins, len(s.Bins))
	}
	for _, p := range plots {
		pictures = append(pictures, p.draw(p.program, top, bins))
	}
	return pictures
}

// draw draws a series in a plot that holds so many bins, and reaches from 0 to top.
func (s *series) draw(program string, top float64, bins int) string {
	const y, h = 40.0, 96.0
	w := pictureWidth - left - right
	d := &drawing{height: y + h + 34}
	per, unit := 1.0, s.Unit
	if unit == "bytes" {
		per, unit = 1000, "kB"
	}
	what := fmt.Sprintf("%s in %s ms", unit, short(s.BinMillis))
	atX := func(bin float64) float64 { return left + w*bin/float64(bins) }
	atY := func(v float64) float64 { return y + h*(1-min(v, top)/top) }

	d.text(0, 14, "name", "start", program)
	d.text(pictureWidth-right, 14, "", "end", fmt.Sprintf("most: %s %s", short(s.highest()/per), what))
	d.text(left, y-8, "", "start", what)
	step := niceStep(top / per / 4)
	for i := 0; float64(i)*step*per <= top; i++ {
		v := float64(i) * step
		d.line(left, atY(v*per), left+w, atY(v*per), "grid")
		d.text(left-6, atY(v*per)+4, "", "end", short(v))
	}
	class := "theirs"
	if program == subject {
		class = "ours"
	}
	s.area(d, atX, atY, class)
	d.line(left, y+h, left+w, y+h, "axis")
	millis := float64(bins) * s.BinMillis
	across := niceStep(millis / 4)
	for i := 0; float64(i)*across <= millis*1.001; i++ {
		at := float64(i) * across
		x := left + w*at/millis
		d.line(x, y+h, x, y+h+4, "axis")
		anchor := "middle"
		if x > left+w-8 {
			anchor = "end"
		}
		d.text(x, y+h+17, "", anchor, short(at))
	}
	d.text(left+w/2, y+h+31, "", "middle", "ms")
	if s.Nominal > 0 {
		d.line(left, atY(s.Nominal), left+w, atY(s.Nominal), "rate")
	}
	if s.highest() > top {
		d.text(left+w, y-8, "ink", "end", "▲ beyond the scale")
	}
	label := fmt.Sprintf("Arrivals through %s: up to %s %s", program, short(s.highest()/per), what)
	if s.Nominal > 0 {
		label += fmt.Sprintf("; the rate is %s", short(s.Nominal/per))
	}
	return d.svg(label)
}

// area fills from the bottom to each bin.
func (s *series) area(d *drawing, atX, atY func(float64) float64, class string) {
	var b strings.Builder
	bottom := num(atY(0))
	last := bottom
	fmt.Fprintf(&b, "M%s %s", num(atX(0)), bottom)
	for i, n := range s.Bins {
		if y := num(atY(float64(n))); y != last {
			fmt.Fprintf(&b, "H%sV%s", num(atX(float64(i))), y)
			last = y
		}
	}
	fmt.Fprintf(&b, "H%sV%sZ", num(atX(float64(len(s.Bins)))), bottom)
	fmt.Fprintf(d, "<path d=%q class=%q/>\n", b.String(), class)
}

// farthest is the ratio that bars go to; what is beyond is written beside them.
const farthest = 1000

// bars draws the ratios of a cell's headline figure, on a logarithmic scale: to the
// right the subject is better. It is empty when there are none.
func (c *cell) bars() string {
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
		for _, v := range []float64{r.value, r.least, r.most} {
			if v > 0 {
				reach = max(reach, v, 1/v)
			}
		}
	}
	if list == nil {
		return ""
	}
	reach = min(reach, farthest)
	f := figureOf(c.Headline)
	bottom := y + each*float64(len(list))
	d := &drawing{height: bottom + 36}
	scale := logScale{1 / reach, reach, 76, pictureWidth - 76 - 74}
	d.text(0, 14, "name", "start", "How many times better: "+f.title)
	for _, v := range scale.ticks() {
		d.line(scale.at(v), y-6, scale.at(v), bottom, "grid")
		d.text(scale.at(v), bottom+14, "", "middle", tick10(v))
	}
	label := "Ratios of " + f.title + ", above 1 shaperd is better:"
	for i, b := range list {
		top := y + each*float64(i)
		v := b.outcome.verdict(b.ratio)
		one, end := scale.at(1), scale.at(b.value)
		d.text(68, top+13, "ink", "end", b.Program)
		class := v.Word
		if v != ahead && v != behind {
			class = "theirs"
		}
		d.rect(min(one, end), top+2, max(math.Abs(end-one), 1), 14, class)
		d.line(scale.at(b.least), top+9, scale.at(b.most), top+9, "whisker")
		d.text(pictureWidth-right, top+13, "ink", "end", strings.TrimSpace(b.String()+" "+v.Mark))
		label += fmt.Sprintf(" %s %s;", b.Program, strings.TrimSpace(b.String()+" "+v.Word))
	}
	d.line(scale.at(1), y-6, scale.at(1), bottom, "axis")
	d.text(scale.at(1)-6, bottom+30, "", "end", "▼ shaperd is worse")
	d.text(scale.at(1)+6, bottom+30, "", "start", "shaperd is better ▲")
	return d.svg(strings.TrimSuffix(label, ";") + ".")
}

// tick10 writes a tick of ratios.
func tick10(v float64) string {
	if v < 1 {
		return "1/" + short(math.Round(1/v))
	}
	return short(v)
}

// waits draws how long one had to wait with each program: from the median on, over the
// 99th percentile, to the longest. It is empty where a cell has no such figures.
func (c *cell) waits() string {
	const y, each = 54.0, 24.0
	type wait struct {
		program string
		p50     float64
		p99     float64
		worst   float64 // that of p99 where it is not measured
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
	d := &drawing{height: bottom + 36}
	scale := logScale{least / 1.2, most * 1.2, 76, pictureWidth - 76 - 18}
	d.text(0, 14, "name", "start", "How long one waits")
	key := "● median   │ 99th percentile"
	if measuresWorst {
		key += "   ─ up to the longest"
	}
	d.text(0, 34, "", "start", key)
	for _, v := range scale.ticks() {
		d.line(scale.at(v), y-6, scale.at(v), bottom, "grid")
		d.text(scale.at(v), bottom+14, "", "middle", short(v))
	}
	d.text(scale.x+scale.w/2, bottom+30, "", "middle", "ms, logarithmic")
	label := "Waits in ms:"
	for i, w := range list {
		at := y + each*float64(i) + 9
		class := "theirs"
		if w.program == subject {
			class = "ours"
		}
		d.text(68, at+4, "ink", "end", w.program)
		d.line(scale.at(w.p50), at, scale.at(max(w.p99, w.worst)), at, "axis")
		d.line(scale.at(w.p99), at-6, scale.at(w.p99), at+6, "whisker")
		d.dot(scale.at(w.p50), at, 5, class)
		if w.failed != "" {
			// Beside the line, where there is more room.
			x, anchor := scale.at(max(w.p99, w.worst))+8, "start"
			if x > pictureWidth/2 {
				x, anchor = scale.at(w.p50)-10, "end"
			}
			d.text(x, at+4, "ink", anchor, "✗ "+w.failed)
		}
		label += fmt.Sprintf(" %s median %s, 99th percentile %s", w.program, short(w.p50), short(w.p99))
		if measuresWorst {
			label += fmt.Sprintf(", longest %s", short(w.worst))
		}
		if w.failed != "" {
			label += ", " + w.failed
		}
		label += ";"
	}
	return d.svg(strings.TrimSuffix(label, ";") + ".")
}
