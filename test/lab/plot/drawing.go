// Package plot draws the pictures of the reports, as SVG.
package plot

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
)

// Style is the style of all pictures. A page defines the colors --ink, --soft and --line, and the
// classes that are its own.
const Style = `
.fig text { font: 12px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  fill: var(--soft); font-variant-numeric: tabular-nums; }
.fig .name { font-size: 13.5px; font-weight: 600; fill: var(--ink); }
.fig .ink { fill: var(--ink); }
.fig .grid { stroke: var(--line); fill: none; }
.fig .axis { stroke: var(--soft); fill: none; }
.fig .limit { stroke: var(--ink); stroke-dasharray: 5 4; stroke-width: 1.25; fill: none; }
`

// A Drawing is the inside of a picture, with its size in pixels.
type Drawing struct {
	strings.Builder
	Width, Height float64
}

// Text draws a line of text. anchor is "start", "middle" or "end".
func (d *Drawing) Text(x, y float64, class, anchor, s string) {
	fmt.Fprintf(d, "<text x=%q y=%q class=%q text-anchor=%q>%s</text>\n",
		coordinate(x), coordinate(y), class, anchor, html.EscapeString(s))
}

// Line draws a straight line.
func (d *Drawing) Line(x1, y1, x2, y2 float64, class string) {
	fmt.Fprintf(d, "<path d=\"M%s %sL%s %s\" class=%q/>\n", coordinate(x1), coordinate(y1), coordinate(x2), coordinate(y2), class)
}

// Rect fills a rectangle.
func (d *Drawing) Rect(x, y, w, h float64, class string) {
	fmt.Fprintf(d, "<rect x=%q y=%q width=%q height=%q class=%q/>\n", coordinate(x), coordinate(y), coordinate(w), coordinate(h), class)
}

// Dot fills a circle.
func (d *Drawing) Dot(x, y, r float64, class string) {
	fmt.Fprintf(d, "<circle cx=%q cy=%q r=%q class=%q/>\n", coordinate(x), coordinate(y), coordinate(r), class)
}

// SVG returns the picture for a page that has the style. label is its accessible description.
func (d *Drawing) SVG(label string) string { return d.svg("", label, "") }

// Standalone returns the picture as a file, with a style and a background of the class "paper".
func (d *Drawing) Standalone(label, style string) string {
	return d.svg(` xmlns="http://www.w3.org/2000/svg"`, label,
		fmt.Sprintf("<style>%s</style>\n<rect width=\"100%%\" height=\"100%%\" class=\"paper\"/>\n", style))
}

func (d *Drawing) svg(namespace, label, head string) string {
	w, h := coordinate(d.Width), coordinate(d.Height)
	return fmt.Sprintf("<svg%s class=\"fig\" viewBox=\"0 0 %s %s\" width=%q height=%q role=\"img\" aria-label=\"%s\">\n%s%s</svg>\n",
		namespace, w, h, w, h, html.EscapeString(label), head, d.String())
}

// coordinate formats a number of pixels to a tenth.
func coordinate(v float64) string {
	return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64)
}
