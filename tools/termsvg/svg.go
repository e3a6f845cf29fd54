package main

import (
	"fmt"
	"html"
	"io"
	"math"
	"strconv"
	"strings"
	"time"
)

type options struct {
	title, label string
	speed        float64
	step, hold   time.Duration
}

// Of the picture, in pixels. The font's characters are 0.6 of its size wide.
const (
	fontSize  = 14
	column    = 0.6 * fontSize
	lineSpace = 19
	baseline  = 14 // below the top of a row
	margin    = 16
	titleBar  = 34
)

// svgStyle has the colors of a window and of a terminal, which follow the reader's color scheme.
// A selector is one class or element: what "use" shows is not inside the elements around it.
const svgStyle = `
.term { --ink: #1f2328; --soft: #656d76; --line: #d8dee4; --paper: #ffffff; --bar: #f6f8fa;
  --red: #c62a34; --green: #1a7f37; --yellow: #9a6700; --blue: #0969da; --magenta: #8250df; --cyan: #1b7c83; }
@media (prefers-color-scheme: dark) {
  .term { --ink: #e6edf3; --soft: #9198a1; --line: #30363d; --paper: #0d1117; --bar: #161b22;
    --red: #ff7b72; --green: #3fb950; --yellow: #d29922; --blue: #58a6ff; --magenta: #bc8cff; --cyan: #39c5cf; } }
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace;
  fill: var(--ink); white-space: pre; }
.window { fill: var(--paper); stroke: var(--line); } .bar { fill: var(--bar); } .edge { stroke: var(--line); }
.title { fill: var(--soft); font-size: 13px; } .back { fill: var(--ink); shape-rendering: crispEdges; }
.bold { font-weight: 600; } .faint { fill: var(--soft); } .underline { text-decoration: underline; } .reverse { fill: var(--paper); }
`

// colors are the names of the first eight colors. The next eight are the same.
var colors = [...]string{"soft", "red", "green", "yellow", "blue", "magenta", "cyan", "ink"}

// writeSVG writes a picture that shows the frames in a loop. They are one below the other in a
// film, which moves behind a window. Where motion is not wanted it shows the last one.
func writeSVG(to io.Writer, r *recording, frames []frame, o options) error {
	width, height := float64(r.columns)*column, float64(usedRows(frames)*lineSpace)
	all := frames[len(frames)-1].at.Seconds()/o.speed + o.hold.Seconds()

	var w strings.Builder
	fmt.Fprintf(&w, "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"term\" viewBox=\"0 0 %[1]s %[2]s\" width=\"%[1]s\" height=\"%[2]s\" role=\"img\" aria-label=\"%[3]s\" xml:space=\"preserve\">\n<style>%[4]s",
		number(width+2*margin), number(height+titleBar+2*margin), html.EscapeString(o.label), svgStyle)
	for i, name := range colors {
		fmt.Fprintf(&w, ".c%d { fill: var(--%s); }\n", i, name)
	}
	fmt.Fprintf(&w, ".film { transform: translateY(%spx); }\n", number(-height*float64(len(frames)-1)))
	fmt.Fprintf(&w, "@media (prefers-reduced-motion: no-preference) { .film { animation: film %ss step-end infinite; } }\n@keyframes film {\n", number(all))
	for i, f := range frames {
		fmt.Fprintf(&w, "%s%% { transform: translateY(%spx); }\n", strconv.FormatFloat(100*f.at.Seconds()/o.speed/all, 'f', 3, 64), number(height*float64(-i)))
	}
	w.WriteString("}\n</style>\n<defs>\n")

	var film strings.Builder
	ids := map[string]int{} // of rows, by their markup
	for i, f := range frames {
		fmt.Fprintf(&film, "<g transform=\"translate(0 %s)\">", number(height*float64(i)))
		for y, r := range f.rows {
			markup := r.markup()
			if markup == "" {
				continue
			}
			id, known := ids[markup]
			if !known {
				id = len(ids)
				ids[markup] = id
				fmt.Fprintf(&w, "<g id=\"r%d\">%s</g>\n", id, markup)
			}
			fmt.Fprintf(&film, "<use href=\"#r%d\" y=\"%d\"/>", id, y*lineSpace)
		}
		film.WriteString("</g>\n")
	}
	fmt.Fprintf(&w, "</defs>\n<rect x=\"0.5\" y=\"0.5\" width=\"%s\" height=\"%s\" rx=\"8\" class=\"window\"/>\n", number(width+2*margin-1), number(height+titleBar+2*margin-1))
	fmt.Fprintf(&w, "<path d=\"M1 %[1]dV9Q1 1 9 1H%[2]sQ%[3]s 1 %[3]s 9V%[1]dZ\" class=\"bar\"/>\n<path d=\"M1 %[1]dH%[3]s\" class=\"edge\"/>\n",
		titleBar, number(width+2*margin-9), number(width+2*margin-1))
	fmt.Fprintf(&w, "<text x=\"%d\" y=\"22\" class=\"title\">%s</text>\n", margin, html.EscapeString(o.title))
	fmt.Fprintf(&w, "<svg x=\"%d\" y=\"%d\" width=\"%s\" height=\"%s\" overflow=\"hidden\">\n<g class=\"film\">\n%s</g>\n</svg>\n</svg>\n",
		margin, titleBar+margin, number(width), number(height), film.String())
	_, err := io.WriteString(to, w.String())
	return err
}

// usedRows returns the number of rows until the last one that is used in any frame.
func usedRows(frames []frame) (n int) {
	for _, f := range frames {
		for y, r := range f.rows {
			if len(r) > 0 {
				n = max(n, y+1)
			}
		}
	}
	return n
}

// markup returns a row as SVG, with its upper edge at 0.
func (r row) markup() string {
	var w strings.Builder
	for _, t := range r {
		x, wide := number(float64(t.column)*column), number(float64(t.columns)*column)
		if t.style.reverse {
			fmt.Fprintf(&w, "<rect x=\"%s\" width=\"%s\" height=\"%d\" class=\"back%s\"/>", x, wide, lineSpace, t.style.colorClass())
		}
		fmt.Fprintf(&w, "<text x=\"%s\" y=\"%d\" textLength=\"%s\"%s>%s</text>", x, baseline, wide, t.style.class(), html.EscapeString(t.text))
	}
	return w.String()
}

// class returns the attribute for text of the style.
func (s style) class() string {
	names := ""
	if s.reverse {
		names = " reverse"
	} else {
		names = s.colorClass()
	}
	for _, c := range []struct {
		on   bool
		name string
	}{{s.bold, " bold"}, {s.faint, " faint"}, {s.underline, " underline"}} {
		if c.on {
			names += c.name
		}
	}
	if names == "" {
		return ""
	}
	return fmt.Sprintf(" class=%q", names[1:])
}

func (s style) colorClass() string {
	if s.color < 0 {
		return ""
	}
	return fmt.Sprintf(" c%d", s.color%len(colors))
}

// number formats a number of pixels or seconds.
func number(v float64) string { return strconv.FormatFloat(math.Round(v*100)/100, 'f', -1, 64) }
