package main

import (
	_ "embed"
	"fmt"
	"html/template"
	"os"
	"path/filepath"
	"strings"
)

//go:embed report.html.tmpl
var pageText string

var page = template.Must(template.New("report").Parse(pageText))

// Widths of the pictures, in pixels: for a screen, and for a phone.
const (
	wide   = 920.0
	narrow = 350.0
)

// arrivalsPath is where the main picture goes: beside the page.
func arrivalsPath(pagePath string) string {
	return filepath.Join(filepath.Dir(pagePath), "arrivals.svg")
}

func writeReport(path string, before, after figures, promises []promise) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	text, err := render(before, after, promises)
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return err
	}
	return os.WriteFile(arrivalsPath(path), []byte(arrivals(before, after, wide, true)), 0o644)
}

func render(before, after figures, promises []promise) (string, error) {
	var b strings.Builder
	failedBefore, ofBefore := before.politeFailed()
	failedAfter, ofAfter := after.politeFailed()
	err := page.Execute(&b, map[string]any{
		"Style":          template.CSS(svgStyle),
		"ArrivalsWide":   template.HTML(arrivals(before, after, wide, false)),
		"ArrivalsNarrow": template.HTML(arrivals(before, after, narrow, false)),
		"OpenWide":       template.HTML(connections(before, after, wide)),
		"OpenNarrow":     template.HTML(connections(before, after, narrow)),
		"Rows":           rows(before, after),
		"Promises":       promises,
		"Kept":           broken(promises) == nil,
		"Refusals":       refusalLines(after.refusals),
		"FailedBefore":   grouped(failedBefore), "OfBefore": grouped(ofBefore),
		"FailedAfter": grouped(failedAfter), "OfAfter": grouped(ofAfter),
		"WorstBefore": grouped(before.worst), "WorstAfter": grouped(after.worst),
		"TotalRate": bytesPerSecond(totalRate), "SourceRate": bytesPerSecond(sourceRate),
		"Cap": maxConnections, "Workers": workers, "Backlog": backlog,
		"Service": service, "Slowdown": slowdown, "PerDatagram": perDatagram,
		"PoliteBody": grouped(politeBody), "PolitePause": politePause, "Patience": politePatience,
		"Greedy": greedyConnections, "GreedyBody": grouped(greedyBody), "GreedyBurst": greedyBurst, "GreedyEvery": greedyEvery,
		"Length":        before.length,
		"Configuration": configuration(),
	})
	return b.String(), err
}

func refusalLines(list []refusal) (lines []string) {
	for _, r := range list {
		lines = append(lines, fmt.Sprintf("%s %s by the limit %q: %s",
			grouped(r.count), r.what, r.limit, strings.ReplaceAll(r.reason, "_", " ")))
	}
	return lines
}

const (
	left   = 40.0 // of a plot, for its labels
	right  = 10.0
	margin = 46.0 // above a plot, for its name
	foot   = 24.0 // below, for the seconds
)

// arrivals draws what came to the downstream in each window, by source: direct,
// through the daemon at the same scale, and that again enlarged.
func arrivals(before, after figures, width float64, alone bool) string {
	const kB = 1000.0
	d := &drawing{width: width}
	y := 0.0
	if alone {
		d.text(12, 28, "title", "start", "What arrives at a fragile server in each 10 ms, with one greedy source")
		y = 34
	}
	y = d.legend(y, left)
	rate := totalRate * window.Seconds() / kB
	scale := max(highest(before.arrived), highest(after.arrived)) / kB * 1.08
	enlarged := max(highest(after.arrived)/kB, rate) * 1.35
	label := fmt.Sprintf("configured: %s", bytesPerSecond(totalRate))
	for _, plot := range []struct {
		name   string
		of     figures
		h, top float64
		steps  int
	}{
		{"Direct", before, 210, scale, 5},
		{"Through shaperd, at the same scale", after, 210, scale, 5},
		{"Through shaperd, enlarged", after, 130, enlarged, 4},
	} {
		y += margin
		p := panel{drawing: d, x: left, y: y, w: width - left - right, h: plot.h, seconds: plot.of.length.Seconds(), top: plot.top}
		d.text(left, y-9, "name", "start", plot.name)
		p.axes("kB per 10 ms", plot.steps)
		p.stack(plot.of, kB)
		p.limit(rate, label)
		if !plot.of.shaped {
			p.start(plot.of)
		}
		y += plot.h + foot
	}
	d.height = y + 6
	return d.svg(fmt.Sprintf("Bytes that arrived at the downstream in each 10 ms. Direct: up to %s bytes. Through shaperd: up to %s bytes, at a configured rate of %s.",
		grouped(int(highest(before.arrived))), grouped(int(highest(after.arrived))), bytesPerSecond(totalRate)), alone)
}

// stack fills one area for each source, the polite ones at the bottom.
func (p panel) stack(f figures, unit float64) {
	for _, layer := range []struct {
		upTo  int
		class string
	}{{greedy, "g"}, {1, "b"}, {0, "a"}} {
		values := make([]float64, len(f.arrived))
		for i, bin := range f.arrived {
			for _, n := range bin[:layer.upTo+1] {
				values[i] += float64(n) / unit
			}
		}
		p.area(values, layer.class)
	}
}

// start marks when the greedy source began.
func (p panel) start(f figures) {
	x := p.atX(f.greedyAt.Seconds())
	p.line(x, p.y, x, p.y+p.h, "start")
	p.text(x-5, p.y+12, "halo", "end", "greedy starts")
}

// legend explains the colours of the sources. It returns where it ends.
func (d *drawing) legend(y, x float64) float64 {
	for i, class := range []string{"a", "b", "g"} {
		d.rect(x, y+10, 11, 11, class)
		d.text(x+16, y+20, "", "start", sources[i].name)
		x += 86
	}
	return y + 20
}

// highest is the most bytes of all sources in one window.
func highest(list [][len(sources)]int) (most float64) {
	for _, bin := range list {
		sum := 0
		for _, n := range bin {
			sum += n
		}
		most = max(most, float64(sum))
	}
	return most
}

// connections draws how many connections the downstream had at each time.
func connections(before, after figures, width float64) string {
	d := &drawing{width: width, height: 20 + margin + 200 + foot + 6}
	x := left
	for i, class := range []string{"direct", "shaped"} {
		d.rect(x, 10, 11, 11, class)
		d.text(x+16, 20, "", "start", [...]string{"direct", "through shaperd"}[i])
		x += 72
	}
	p := panel{drawing: d, x: left, y: 20 + margin, w: width - left - right, h: 200,
		seconds: before.length.Seconds(), top: float64(max(before.most, after.most, maxConnections)) * 1.12}
	p.axes("connections", 5)
	for _, f := range []figures{before, after} {
		values := make([]float64, len(f.connected))
		for i, n := range f.connected {
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
		before.most, after.most, maxConnections), false)
}
