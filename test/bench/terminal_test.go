package main

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestCellTable(t *testing.T) {
	var b strings.Builder
	writeCell(&b, example().Cells[0])
	want := `
W1  10 MB/s, 4 connections
           rate error        sigma         CPU
                    %           kB        s/GB
  shaperd        0.00         10.1        4.00
  haproxy        0.00 1.00=  250.0  ~25▲  2.00 0.50▼
  nginx          0.00 0.20▼    5.0 0.50▼  4.00 1.00=
  nginx: a quarter for each
  toxiproxy not measured: shares no rate
`
	if b.String() != want {
		t.Errorf("got %swant %s", b.String(), want)
	}
}

func TestSummaryTable(t *testing.T) {
	var b strings.Builder
	example().writeSummary(&b)
	for _, want := range []string{
		"\nW1  TCP under a rate limit\n",
		"  10 MB/s, 4 connections: sigma, kB     10.1    250.0 ~25▲    5.0 0.50▼\n",
		"toxiproxy not measured: shares no rate\n",
		"  ✗ a hog, naive: 1.25 % failed\n",
		"of an unknown work: time, ns",
		"Of 4 headline ratios to peers, shaperd is better in 3, worse in 1 and even in 0; 1 of them are noisy.",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing in\n%s", want, b.String())
		}
	}
}

// TestCellTable_Width checks that the widest possible cell fits a wide terminal.
func TestCellTable_Width(t *testing.T) {
	c := &cell{Headline: "sigma", Figures: shapedFigures}
	for _, p := range programs {
		o := &outcome{Program: p.name, Figures: map[string]stat{}}
		for _, key := range shapedFigures {
			o.Figures[key] = stat{[]float64{1234.5, 123.4}}
		}
		c.Outcomes = append(c.Outcomes, o)
	}
	var b strings.Builder
	writeCell(&b, c)
	for line := range strings.Lines(b.String()) {
		if n := utf8.RuneCountInString(line); n > 200 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

func TestNumbers(t *testing.T) {
	f := figure{digits: 2}
	for x, want := range map[float64]string{-0.001: "0.00", -0.01: "-0.01", 1234.567: "1234.57"} {
		if got := f.format(x); got != want {
			t.Errorf("%v was formatted as %s", x, got)
		}
	}
}
