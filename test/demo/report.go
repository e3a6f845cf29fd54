package main

import (
	_ "embed"
	"fmt"
	"html/template"
	"os"
	"path/filepath"
	"strings"
	"time"
)

//go:embed report.html.tmpl
var pageText string

var page = template.Must(template.New("report").Parse(pageText))

// A size is a picture's width in pixels, and how much of a run it shows where each
// window of time is to be seen by itself.
type size struct {
	width float64
	shown time.Duration
}

var (
	wide   = size{920, 5 * time.Second} // for a screen
	narrow = size{350, 3 * time.Second} // for a phone
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
	return os.WriteFile(arrivalsPath(path), []byte(bytesFigure(before, after).draw(wide, true)), 0o644)
}

func render(before, after figures, promises []promise) (string, error) {
	var b strings.Builder
	failedBefore, ofBefore := before.politeFailed()
	failedAfter, ofAfter := after.politeFailed()
	err := page.Execute(&b, map[string]any{
		"Style":        template.CSS(svgStyle),
		"Bytes":        inPage(bytesFigure(before, after).draw),
		"Datagrams":    inPage(datagramsFigure(before, after).draw),
		"Connections":  inPage(func(s size, _ bool) string { return connections(before, after, s.width) }),
		"Rows":         rows(before, after),
		"Promises":     promises,
		"Kept":         broken(promises) == nil,
		"Refusals":     refusalLines(after.refusals),
		"FailedBefore": grouped(failedBefore), "FailedAfter": grouped(failedAfter),
		"WorstBefore": grouped(before.bytes.worst), "WorstAfter": grouped(after.bytes.worst),
		"TotalRate": bytesPerSecond(totalRate), "SourceRate": bytesPerSecond(sourceRate),
		"Cap": maxConnections, "Workers": workers, "Backlog": backlog,
		"Service": service, "Slowdown": slowdown, "PerDatagram": perDatagram,
		"PoliteBody": grouped(politeBody), "PolitePause": politePause, "Patience": politePatience,
		"Greedy": greedyConnections, "GreedyBody": grouped(greedyBody), "GreedyBurst": greedyBurst, "GreedyEvery": greedyEvery,
		"AnsweredBefore": grouped(ofBefore - failedBefore), "AnsweredAfter": grouped(ofAfter - failedAfter),
		"Length":        before.length,
		"Configuration": configuration(),
	})
	return b.String(), err
}

func refusalLines(list []refusal) (lines []string) {
	for _, r := range list {
		lines = append(lines, fmt.Sprintf("%s %s by the limit %q: %s",
			grouped(r.count), r.what, r.limit, strings.ReplaceAll(r.reason, "-", " ")))
	}
	return lines
}

// inPage returns the picture that draw makes, for a screen and for a phone. The
// page's style shows one.
func inPage(draw func(s size, alone bool) string) template.HTML {
	return template.HTML(fmt.Sprintf("<div class=\"wide\">%s</div><div class=\"narrow\">%s</div>",
		draw(wide, false), draw(narrow, false)))
}
