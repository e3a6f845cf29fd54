package main

import (
	"fmt"

	"shaperd.dev/shaperd/test/lab/plot"
)

const (
	left   = 40.0 // of a plot, for labels
	right  = 10.0
	margin = 46.0 // above a plot, for the name
	foot   = 24.0 // below a plot, for the time axis
)

// An arrivalsFigure shows the arrivals at the downstream in each window, by source.
type arrivalsFigure struct {
	title, unit   string
	before, after figures
	traffic       func(figures) traffic
	unitSize      float64 // arrivals per axis unit
	rate          float64 // configured, per window
	limit         string
}

func bytesFigure(before, after figures) arrivalsFigure {
	return arrivalsFigure{
		title: "What arrives at a fragile server in each 10 ms, with one greedy source",
		unit:  "kB per 10 ms", unitSize: 1000, rate: totalRate * window.Seconds(),
		before: before, after: after, traffic: func(f figures) traffic { return f.bytes },
		limit: "configured: " + bytesPerSecond(totalRate),
	}
}

func datagramsFigure(before, after figures) arrivalsFigure {
	return arrivalsFigure{
		title: "Datagrams that arrive in each 10 ms",
		unit:  "datagrams per 10 ms", unitSize: 1, rate: messageRate * window.Seconds(),
		before: before, after: after, traffic: func(f figures) traffic { return f.datagrams },
		limit: fmt.Sprintf("configured: %d a second", messageRate),
	}
}

// draw draws the direct phase, the shaped phase on the same scale, and the shaped phase enlarged.
func (a arrivalsFigure) draw(s size, alone bool) string {
	d := &plot.Drawing{Width: s.width}
	y := 0.0
	if alone {
		d.Text(left, 30, "title", "start", a.title)
		y = 34
	}
	y = legend(d, y, left)
	before, after := peak(a.traffic(a.before)), peak(a.traffic(a.after))
	scale := max(before, after, a.rate) / a.unitSize * 1.08
	enlarged := max(after, a.rate) / a.unitSize * 1.4
	shown := min(s.shown, a.before.length)
	for _, part := range []struct {
		name   string
		of     figures
		h, top float64
		steps  int
	}{
		{"Direct", a.before, 200, scale, 5},
		{"Through shaperd", a.after, 200, scale, 5},
		{"Through shaperd, enlarged", a.after, 120, enlarged, 4},
	} {
		y += margin
		p := panel{plot.Panel{Drawing: d, X: left, Y: y, W: s.width - left - right, H: part.h, XMax: shown.Seconds(), XUnit: "s", YMax: part.top}}
		d.Text(left, y-9, "name", "start", part.name)
		p.axes(a.unit, part.steps)
		p.stack(a.traffic(part.of).windows[:shown/window], a.unitSize)
		p.Limit(a.rate/a.unitSize, a.limit)
		if !part.of.shaped {
			p.start(part.of)
		}
		y += part.h + foot
	}
	d.Text(left+(s.width-left-right)/2, y+14, "", "middle", fmt.Sprintf("seconds (first %v of %v)", shown.Seconds(), a.before.length.Seconds()))
	d.Height = y + 24
	label := fmt.Sprintf("%s. Direct: up to %.1f %s. Through shaperd: up to %.1f; %s.",
		a.title, before/a.unitSize, a.unit, after/a.unitSize, a.limit)
	if alone {
		return d.Standalone(label, svgStyle)
	}
	return d.SVG(label)
}

// A panel is a plot over the seconds of a phase.
type panel struct{ plot.Panel }

// axes draws the axes, with the unit above the plot.
func (p panel) axes(unit string, steps int) {
	p.Axes(steps)
	p.Text(p.X+p.W, p.Y-9, "", "end", unit)
}

// stack fills one area per source, the polite ones at the bottom.
func (p panel) stack(windows [][len(sources)]int, per float64) {
	for _, layer := range []struct {
		upTo  int
		class string
	}{{greedy, "third"}, {1, "second"}, {0, "first"}} {
		values := make([]float64, len(windows))
		for i, bin := range windows {
			for _, n := range bin[:layer.upTo+1] {
				values[i] += float64(n) / per
			}
		}
		p.Area(values, window.Seconds(), layer.class)
	}
}

// start marks the start of the greedy source.
func (p panel) start(f figures) {
	x := p.AtX(f.greedyAt.Seconds())
	p.Line(x, p.Y, x, p.Y+p.H, "start")
	p.Text(x-5, p.Y+12, "halo", "end", "greedy starts")
}

// legend draws the colors of the sources. It returns its bottom edge.
func legend(d *plot.Drawing, y, x float64) float64 {
	for i, class := range []string{"first", "second", "third"} {
		d.Rect(x, y+10, 11, 11, class)
		d.Text(x+16, y+20, "", "start", sources[i].name)
		x += 86
	}
	return y + 20
}

// peak returns the largest sum over all sources in one window.
func peak(t traffic) (highest float64) {
	for _, bin := range t.windows {
		sum := 0
		for _, n := range bin {
			sum += n
		}
		highest = max(highest, float64(sum))
	}
	return highest
}

// connectionsFigure draws the number of open connections at the downstream over time.
func connectionsFigure(before, after figures, width float64) string {
	d := &plot.Drawing{Width: width, Height: 20 + margin + 200 + foot + 6}
	x := left
	for i, class := range []string{"direct", "shaped"} {
		d.Rect(x, 10, 11, 11, class)
		d.Text(x+16, 20, "", "start", [...]string{"direct", "through shaperd"}[i])
		x += 72
	}
	p := panel{plot.Panel{
		Drawing: d, X: left, Y: 20 + margin, W: width - left - right, H: 200,
		XMax: before.length.Seconds(), XUnit: "s", YMax: float64(max(before.peakConnections, after.peakConnections, maxConnections)) * 1.12,
	}}
	p.axes("connections", 5)
	for _, f := range []figures{before, after} {
		values := make([]float64, len(f.connectionBins))
		for i, n := range f.connectionBins {
			values[i] = float64(n)
		}
		class := "direct"
		if f.shaped {
			class = "shaped"
		}
		p.Area(values, window.Seconds(), class)
	}
	p.Limit(maxConnections, fmt.Sprintf("configured: %d", maxConnections))
	return d.SVG(fmt.Sprintf("Connections open at the downstream. Direct: up to %d. Through shaperd: up to %d, at a cap of %d.",
		before.peakConnections, after.peakConnections, maxConnections))
}
