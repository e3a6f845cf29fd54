package main

import (
	_ "embed"
	"fmt"
	"html/template"
	"os"
	"path/filepath"
	"strings"
	"time"

	"shaperd.dev/shaperd/test/lab/plot"
)

//go:embed report.html.tmpl
var templateText string

var reportTemplate = template.Must(template.New("report").Parse(templateText))

// A size is a picture's width in pixels, and the part of a run that it shows where single windows must be visible.
type size struct {
	width float64
	shown time.Duration
}

var (
	wide   = size{920, 5 * time.Second} // for a screen
	narrow = size{350, 3 * time.Second} // for a phone
)

// arrivalsPath returns the path of the main picture, next to the report.
func arrivalsPath(reportPath string) string {
	return filepath.Join(filepath.Dir(reportPath), "arrivals.svg")
}

func writeReport(path string, before, after figures, checks []check) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	text, err := render(before, after, checks)
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return err
	}
	return os.WriteFile(arrivalsPath(path), []byte(bytesFigure(before, after).draw(wide, true)), 0o644)
}

func render(before, after figures, checks []check) (string, error) {
	var b strings.Builder
	failedBefore, ofBefore := before.politeFailed()
	failedAfter, ofAfter := after.politeFailed()
	err := reportTemplate.Execute(&b, map[string]any{
		"Style":        template.CSS(svgStyle),
		"Bytes":        pageHTML(bytesFigure(before, after).draw),
		"Datagrams":    pageHTML(datagramsFigure(before, after).draw),
		"Connections":  pageHTML(func(s size, _ bool) string { return connectionsFigure(before, after, s.width) }),
		"Rows":         rows(before, after),
		"Checks":       checks,
		"Refusals":     refusalLines(after.refusals),
		"FailedBefore": plot.Grouped(failedBefore), "FailedAfter": plot.Grouped(failedAfter),
		"WorstBefore": plot.Grouped(before.bytes.worst), "WorstAfter": plot.Grouped(after.bytes.worst),
		"TotalRate": bytesPerSecond(totalRate), "SourceRate": bytesPerSecond(sourceRate),
		"Cap": maxConnections, "Workers": workers, "Backlog": backlog,
		"Service": serviceTime, "Slowdown": slowdown, "PerDatagram": perDatagram,
		"PoliteBody": plot.Grouped(politeBody), "PolitePause": politePause, "Timeout": politeTimeout,
		"Greedy": greedyConnections, "GreedyBody": plot.Grouped(greedyBody), "GreedyBurst": greedyBurst, "GreedyInterval": greedyInterval,
		"AnsweredBefore": plot.Grouped(ofBefore - failedBefore), "AnsweredAfter": plot.Grouped(ofAfter - failedAfter),
		"Length":        before.length,
		"Configuration": configuration(),
	})
	return b.String(), err
}

func refusalLines(list []refusal) (lines []string) {
	for _, r := range list {
		lines = append(lines, fmt.Sprintf("%s %s by limit %q: %s",
			plot.Grouped(r.count), r.unit, r.limit, strings.ReplaceAll(r.reason, "-", " ")))
	}
	return lines
}

// pageHTML returns the picture in two sizes, for a screen and for a phone. The page's style shows one.
func pageHTML(draw func(s size, alone bool) string) template.HTML {
	return template.HTML(fmt.Sprintf("<div class=\"wide\">%s</div><div class=\"narrow\">%s</div>",
		draw(wide, false), draw(narrow, false)))
}
