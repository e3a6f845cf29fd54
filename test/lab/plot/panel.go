package plot

import (
	"fmt"
	"strings"
)

// A Panel is one plot of a drawing, with axes from 0 to XMax and to YMax.
type Panel struct {
	*Drawing
	X, Y, W, H float64 // of the plot, without its labels
	XMax, YMax float64
	XUnit      string // after the 0; may be empty
}

// AtX returns the position of a value on the horizontal axis.
func (p Panel) AtX(v float64) float64 { return p.X + p.W*v/p.XMax }

// AtY returns the position of a value on the vertical axis. Values beyond it are at its end.
func (p Panel) AtY(v float64) float64 { return p.Y + p.H*(1-min(v, p.YMax)/p.YMax) }

// Axes draws the axes, with at most the given number of vertical steps.
func (p Panel) Axes(steps int) {
	step := NiceStep(p.YMax / float64(steps))
	for i := 0; float64(i)*step <= p.YMax; i++ {
		v, class := float64(i)*step, "grid"
		if i == 0 {
			class = "axis"
		}
		p.Line(p.X, p.AtY(v), p.X+p.W, p.AtY(v), class)
		p.Text(p.X-7, p.AtY(v)+4, "", "end", Number(v))
	}
	across := NiceStep(p.XMax / (p.W / 75))
	for i := 0; float64(i)*across <= p.XMax*1.001; i++ {
		v, anchor := float64(i)*across, "middle"
		x := p.AtX(v)
		if x > p.X+p.W-8 {
			anchor = "end"
		}
		p.Line(x, p.Y+p.H, x, p.Y+p.H+4, "axis")
		label := Number(v)
		if i == 0 && p.XUnit != "" {
			label += " " + p.XUnit
		}
		p.Text(x, p.Y+p.H+17, "", anchor, label)
	}
}

// Limit draws a dashed line at a value. A label is at its left end, where the pictures have
// little detail.
func (p Panel) Limit(v float64, label string) {
	p.Line(p.X, p.AtY(v), p.X+p.W, p.AtY(v), "limit")
	if label != "" {
		p.Text(p.X+4, p.AtY(v)-6, "ink halo", "start", label)
	}
}

// Area fills the area below values, each of which is wide units wide.
func (p Panel) Area(values []float64, wide float64, class string) {
	var b strings.Builder
	bottom := coordinate(p.Y + p.H)
	last := bottom
	fmt.Fprintf(&b, "M%s %s", coordinate(p.X), bottom)
	for i, v := range values {
		if y := coordinate(p.AtY(v)); y != last {
			fmt.Fprintf(&b, "H%sV%s", coordinate(p.AtX(float64(i)*wide)), y)
			last = y
		}
	}
	fmt.Fprintf(&b, "H%sV%sZ", coordinate(p.AtX(float64(len(values))*wide)), bottom)
	fmt.Fprintf(p, "<path d=%q class=%q/>\n", b.String(), class)
}
