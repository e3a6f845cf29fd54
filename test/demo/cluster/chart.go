package main

import (
	"fmt"
	"strings"
	"time"

	"shaperd.dev/shaperd/test/lab"
	"shaperd.dev/shaperd/test/lab/plot"
)

// svgStyle is the style of the picture.
const svgStyle = plot.Theme + `
.fig .fault { fill: var(--soft); opacity: .13; }
`

// Sizes in pixels.
const (
	width  = 920.0
	left   = 40.0 // of a plot, for labels
	right  = 10.0
	above  = 50.0  // a plot, for its name
	height = 130.0 // of a plot
	below  = 22.0  // a plot, for the time axis
)

const bin = 50 * time.Millisecond

// draw returns a picture of what arrived in each bin: a plot per program, with the gateways stacked.
// It leaves out programs that had no faults.
func draw(list []outcome) string {
	d := &plot.Drawing{Width: width}
	title := "What three gateways together pass to one server, each 50 ms"
	d.Text(left, 30, "title", "start", title)
	x := left
	for i, class := range []string{"first", "second", "third"} {
		d.Rect(x, 44, 11, 11, class)
		d.Text(x+16, 54, "", "start", gatewayName(i))
		x += 64
	}
	d.Text(width-right, 54, "", "end", "Mbit/s")
	top := 0.0
	for _, o := range list {
		for _, v := range stacked(o.flow, gateways, o.end()) {
			top = max(top, v)
		}
	}
	y := 40.0
	var worst []string
	plotOf := func(o outcome, name, note string, top float64) {
		y += above
		p := plot.Panel{Drawing: d, X: left, Y: y, W: width - left - right, H: height, XMax: o.end().Seconds(), XUnit: "s", YMax: top}
		d.Text(left, y-9, "name", "start", name)
		d.Text(width-right, y-9, "", "end", note)
		fault(p, killAt, restartAt, "no store")
		fault(p, cutAt, mendAt, gatewayName(cutOff)+" is cut off")
		p.Axes(4)
		for i, class := range []string{"third", "second", "first"} {
			p.Area(stacked(o.flow, gateways-i, o.end()), bin.Seconds(), class)
		}
		p.Limit(megabits(rate), fmt.Sprintf("%.0f Mbit/s", megabits(rate)))
		y += height + below
	}
	for i, o := range list {
		if !o.faults {
			continue
		}
		excess := "at most " + size(o.worst()) + " beyond the rate"
		worst = append(worst, o.name+": "+excess)
		plotOf(o, o.name, excess, max(top, megabits(rate))*1.05)
		if i == 0 {
			plotOf(o, o.name+", enlarged", "", megabits(rate)*1.5)
		}
	}
	d.Height = y + 8
	return d.Standalone(title+". "+strings.Join(worst, "; ")+".", svgStyle)
}

// size formats bytes.
func size(bytes float64) string {
	if bytes < 1e6 {
		return plot.Number(bytes/1e3) + " kB"
	}
	return plot.Number(bytes/1e6) + " MB"
}

// fault marks a time in which something does not work.
func fault(p plot.Panel, from, to time.Duration, label string) {
	p.Rect(p.AtX(from.Seconds()), p.Y, p.AtX(to.Seconds())-p.AtX(from.Seconds()), p.H, "fault")
	p.Text(p.AtX((from+to).Seconds()/2), p.Y+13, "halo", "middle", label)
}

// stacked returns what the first n gateways passed, in Mbit/s in each bin.
func stacked(f flow, n int, end time.Duration) []float64 {
	values := make([]float64, end/bin)
	for _, events := range f.byGateway[:n] {
		for _, e := range lab.Between(events, 0, end) {
			values[e.At/bin] += megabits(float64(e.N)) / bin.Seconds()
		}
	}
	return values
}

func megabits(bytes float64) float64 { return bytes * 8 / 1e6 }

// end returns when the measurement ended.
func (o outcome) end() time.Duration { return o.phases[len(o.phases)-1].end }
