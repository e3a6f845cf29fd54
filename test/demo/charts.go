package main

import "fmt"

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
	d := &drawing{width: s.width}
	y := 0.0
	if alone {
		d.text(left, 30, "title", "start", a.title)
		y = 34
	}
	y = d.legend(y, left)
	before, after := peak(a.traffic(a.before)), peak(a.traffic(a.after))
	scale := max(before, after, a.rate) / a.unitSize * 1.08
	enlarged := max(after, a.rate) / a.unitSize * 1.4
	shown := min(s.shown, a.before.length)
	for _, plot := range []struct {
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
		p := panel{drawing: d, x: left, y: y, w: s.width - left - right, h: plot.h, seconds: shown.Seconds(), top: plot.top}
		d.text(left, y-9, "name", "start", plot.name)
		p.axes(a.unit, plot.steps)
		p.stack(a.traffic(plot.of).windows[:shown/window], a.unitSize)
		p.limit(a.rate/a.unitSize, a.limit)
		if !plot.of.shaped {
			p.start(plot.of)
		}
		y += plot.h + foot
	}
	d.text(left+(s.width-left-right)/2, y+14, "", "middle", fmt.Sprintf("seconds (first %v of %v)", shown.Seconds(), a.before.length.Seconds()))
	d.height = y + 24
	return d.svg(fmt.Sprintf("%s. Direct: up to %.1f %s. Through shaperd: up to %.1f; %s.",
		a.title, before/a.unitSize, a.unit, after/a.unitSize, a.limit), alone)
}

// stack fills one area per source, the polite ones at the bottom.
func (p panel) stack(windows [][len(sources)]int, per float64) {
	for _, layer := range []struct {
		upTo  int
		class string
	}{{greedy, "g"}, {1, "b"}, {0, "a"}} {
		values := make([]float64, len(windows))
		for i, bin := range windows {
			for _, n := range bin[:layer.upTo+1] {
				values[i] += float64(n) / per
			}
		}
		p.area(values, layer.class)
	}
}

// start marks the start of the greedy source.
func (p panel) start(f figures) {
	x := p.atX(f.greedyAt.Seconds())
	p.line(x, p.y, x, p.y+p.h, "start")
	p.text(x-5, p.y+12, "halo", "end", "greedy starts")
}

// legend draws the colors of the sources. It returns its bottom edge.
func (d *drawing) legend(y, x float64) float64 {
	for i, class := range []string{"a", "b", "g"} {
		d.rect(x, y+10, 11, 11, class)
		d.text(x+16, y+20, "", "start", sources[i].name)
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
	d := &drawing{width: width, height: 20 + margin + 200 + foot + 6}
	x := left
	for i, class := range []string{"direct", "shaped"} {
		d.rect(x, 10, 11, 11, class)
		d.text(x+16, 20, "", "start", [...]string{"direct", "through shaperd"}[i])
		x += 72
	}
	p := panel{
		drawing: d, x: left, y: 20 + margin, w: width - left - right, h: 200,
		seconds: before.length.Seconds(), top: float64(max(before.peakConnections, after.peakConnections, maxConnections)) * 1.12,
	}
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
		p.area(values, class)
	}
	p.limit(maxConnections, fmt.Sprintf("configured: %d", maxConnections))
	return d.svg(fmt.Sprintf("Connections open at the downstream. Direct: up to %d. Through shaperd: up to %d, at a cap of %d.",
		before.peakConnections, after.peakConnections, maxConnections), false)
}
