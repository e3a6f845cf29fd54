package main

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
)

// svgStyle is the style of all pictures. It uses the colors of the page.
const svgStyle = `
.fig text { font: 11.5px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  fill: var(--soft); font-variant-numeric: tabular-nums; }
.fig .name { font-size: 13px; font-weight: 600; fill: var(--ink); }
.fig .ink { fill: var(--ink); }
.fig .grid { stroke: var(--line); fill: none; }
.fig .axis { stroke: var(--soft); fill: none; }
.fig .rate { stroke: var(--ink); stroke-dasharray: 5 4; fill: none; }
.fig .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
.fig .ours { fill: var(--ours); }
.fig .better { fill: var(--good); } .fig .worse { fill: var(--bad); } .fig .theirs { fill: var(--theirs); }
`

// pictureWidth is the width of all pictures in pixels: it fits the screen of a phone.
const pictureWidth = 360.0

// A drawing is the inside of an SVG picture.
type drawing struct {
	strings.Builder
	height float64
}

func (d *drawing) text(x, y float64, class, anchor, s string) {
	fmt.Fprintf(d, "<text x=%q y=%q class=%q text-anchor=%q>%s</text>\n",
		num(x), num(y), class, anchor, html.EscapeString(s))
}

func (d *drawing) line(x1, y1, x2, y2 float64, class string) {
	fmt.Fprintf(d, "<path d=\"M%s %sL%s %s\" class=%q/>\n", num(x1), num(y1), num(x2), num(y2), class)
}

func (d *drawing) rect(x, y, w, h float64, class string) {
	fmt.Fprintf(d, "<rect x=%q y=%q width=%q height=%q class=%q/>\n", num(x), num(y), num(w), num(h), class)
}

func (d *drawing) dot(x, y, r float64, class string) {
	fmt.Fprintf(d, "<circle cx=%q cy=%q r=%q class=%q/>\n", num(x), num(y), num(r), class)
}

// svg returns the complete picture, with label as its accessible description.
func (d *drawing) svg(label string) string {
	return fmt.Sprintf("<svg class=\"fig\" viewBox=\"0 0 %s %s\" role=\"img\" aria-label=\"%s\">\n%s</svg>\n",
		num(pictureWidth), num(d.height), html.EscapeString(label), d.String())
}

// num formats a coordinate to a tenth of a pixel.
func num(v float64) string {
	return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64)
}

// formatNumber formats a number with three significant digits.
func formatNumber(v float64) string {
	switch a := math.Abs(v); {
	case math.IsInf(v, 0):
		return "∞"
	case a >= 1000:
		return grouped(int(math.Round(v)))
	case a >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// niceStep returns the smallest of 1, 2 and 5 times a power of ten that is at least v.
func niceStep(v float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if v <= m*power*(1+1e-9) {
			return m * power
		}
	}
	return 10 * power
}

// A logScale maps values to pixels, logarithmically.
type logScale struct{ min, max, x, w float64 }

// at returns the position of a value. Values out of range are at the ends.
func (l logScale) at(v float64) float64 {
	v = min(max(v, l.min), l.max)
	return l.x + l.w*math.Log(v/l.min)/math.Log(l.max/l.min)
}

// ticks returns powers of ten, and 2 and 5 times them if there is room.
func (l logScale) ticks() (list []float64) {
	decades := math.Log10(l.max / l.min)
	factors := []float64{1, 2, 5}
	if decades > 2 {
		factors = factors[:1]
	}
	every := max(1, int(math.Ceil(decades/6)))
	first := int(math.Floor(math.Log10(l.min)))
	for e := first; math.Pow(10, float64(e)) <= l.max*1.001; e++ {
		if e%every != 0 {
			continue
		}
		for _, f := range factors {
			if v := f * math.Pow(10, float64(e)); v >= l.min*0.999 && v <= l.max*1.001 {
				list = append(list, v)
			}
		}
	}
	return list
}
