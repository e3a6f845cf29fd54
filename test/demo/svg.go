package main

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
)

// svgStyle is the style of all pictures, in the page and standalone. It follows the reader's color scheme.
const svgStyle = `
.fig { --ink: #1f2328; --soft: #656d76; --grid: #d8dee4; --paper: #ffffff;
  --a: #2f6fdb; --b: #12a594; --g: #f0883e; --direct: #98a1ab; --shaped: #7a4fd0; }
@media (prefers-color-scheme: dark) {
  .fig { --ink: #e6edf3; --soft: #9198a1; --grid: #30363d; --paper: #0d1117;
    --a: #6ea8fe; --b: #3dd6c0; --g: #e0763a; --direct: #6e7681; --shaped: #b292f0; } }
.fig text { font: 12px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  fill: var(--soft); font-variant-numeric: tabular-nums; }
.fig .title { font-size: 17px; font-weight: 650; fill: var(--ink); }
.fig .name { font-size: 13.5px; font-weight: 600; fill: var(--ink); }
.fig .mark { fill: var(--ink); }
.fig .paper { fill: var(--paper); }
.fig .grid { stroke: var(--grid); fill: none; }
.fig .axis { stroke: var(--soft); fill: none; }
.fig .limit { stroke: var(--ink); stroke-dasharray: 5 4; stroke-width: 1.25; fill: none; }
.fig .start { stroke: var(--soft); stroke-dasharray: 1 3; fill: none; }
.fig .halo { stroke: var(--paper); stroke-width: 4px; paint-order: stroke; stroke-linejoin: round; }
.fig .a { fill: var(--a); } .fig .b { fill: var(--b); } .fig .g { fill: var(--g); }
.fig .direct { fill: var(--direct); } .fig .shaped { fill: var(--shaped); }
`

// A drawing is the inside of an SVG picture.
type drawing struct {
	strings.Builder
	width, height float64
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

// svg returns the complete picture, with label as its accessible description. A
// standalone picture includes its style and background.
func (d *drawing) svg(label string, alone bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"fig\" viewBox=\"0 0 %s %s\" width=%q height=%q role=\"img\" aria-label=%q>\n",
		num(d.width), num(d.height), num(d.width), num(d.height), html.EscapeString(label))
	if alone {
		fmt.Fprintf(&b, "<style>%s</style>\n<rect width=\"100%%\" height=\"100%%\" class=\"paper\"/>\n", svgStyle)
	}
	b.WriteString(d.String())
	b.WriteString("</svg>\n")
	return b.String()
}

// num formats a coordinate to a tenth of a pixel.
func num(v float64) string {
	return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64)
}

// A panel is one plot of a drawing: from 0 to seconds, and from 0 to top.
type panel struct {
	*drawing
	x, y, w, h   float64 // of the plot, without its labels
	seconds, top float64
}

func (p panel) atX(seconds float64) float64 { return p.x + p.w*seconds/p.seconds }
func (p panel) atY(value float64) float64   { return p.y + p.h*(1-value/p.top) }

// axes draws the axes of the plot, with about the given number of vertical steps.
func (p panel) axes(unit string, steps int) {
	step := niceStep(p.top / float64(steps))
	for v := 0.0; v <= p.top; v += step {
		class := "grid"
		if v == 0 {
			class = "axis"
		}
		p.line(p.x, p.atY(v), p.x+p.w, p.atY(v), class)
		p.text(p.x-7, p.atY(v)+4, "", "end", num(v))
	}
	p.text(p.x+p.w, p.y-9, "", "end", unit)
	across := niceStep(p.seconds / (p.w / 75))
	for s := 0.0; s <= p.seconds+1e-9; s += across {
		label := num(s)
		if s == 0 {
			label = "0 s"
		}
		p.line(p.atX(s), p.y+p.h, p.atX(s), p.y+p.h+4, "axis")
		p.text(p.atX(s), p.y+p.h+17, "", "middle", label)
	}
}

// limit draws a dashed line at value, labeled at the left end, where the pictures have little detail.
func (p panel) limit(value float64, label string) {
	p.line(p.x, p.atY(value), p.x+p.w, p.atY(value), "limit")
	p.text(p.x+4, p.atY(value)-6, "mark halo", "start", label)
}

// area fills the area below values, which are equally wide.
func (p panel) area(values []float64, class string) {
	var b strings.Builder
	wide := p.w / float64(len(values))
	bottom := num(p.y + p.h)
	last := bottom
	fmt.Fprintf(&b, "M%s %s", num(p.x), bottom)
	for i, v := range values {
		if y := num(p.atY(v)); y != last {
			fmt.Fprintf(&b, "H%sV%s", num(p.x+float64(i)*wide), y)
			last = y
		}
	}
	fmt.Fprintf(&b, "H%sV%sZ", num(p.x+p.w), bottom)
	fmt.Fprintf(p, "<path d=%q class=%q/>\n", b.String(), class)
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
