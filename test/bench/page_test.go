package main

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/net/html"
)

// render renders a report as a page and parses it.
func render(t *testing.T, r, earlier *report) (string, *html.Node) {
	t.Helper()
	text, err := r.page(earlier)
	if err != nil {
		t.Fatal(err)
	}
	root, err := html.Parse(strings.NewReader(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return string(text), root
}

// texts returns the text of each element with the given name.
func texts(root *html.Node, element string) (list []string) {
	for n := range root.Descendants() {
		if n.Type != html.ElementNode || n.Data != element {
			continue
		}
		var b strings.Builder
		for d := range n.Descendants() {
			if d.Type == html.TextNode {
				b.WriteString(d.Data)
			}
		}
		list = append(list, strings.Join(strings.Fields(b.String()), " "))
	}
	return list
}

func attribute(n *html.Node, name string) string {
	for _, a := range n.Attr {
		if a.Key == name {
			return a.Val
		}
	}
	return ""
}

func TestPage(t *testing.T) {
	text, root := render(t, example(), nil)
	body := strings.Join(texts(root, "body"), "")
	for _, want := range []string{
		"4 May 2026, 03:02 UTC", "Example CPU, 2 CPUs", "bench -repeat 2", "nginx 2",
		"toxiproxy shares no rate", "✗ 1.25 % failed", "nginx: a quarter for each", "a library",
		"In ratios, less than 1.5 counts as 1.5 kB", "2 repetitions", "1 repetition.",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("%q is missing", want)
		}
	}
	for _, p := range programs {
		if !strings.Contains(body, p.name) {
			t.Errorf("%s is missing", p.name)
		}
	}
	want := "W1 10 MB/s, 4 connections, sigma, kB: shaperd 10.1; nginx 5.0 (0.50 ▼)"
	found := false
	for _, item := range texts(root, "li") {
		found = found || item == want
		if strings.Contains(item, ceiling) {
			t.Errorf("%q is not a loss", item)
		}
	}
	if !found {
		t.Errorf("the loss to nginx is not listed: %q", texts(root, "li"))
	}
	rows := strings.Join(texts(root, "tr"), "\n")
	for _, want := range []string{"250.0~25 ▲ better", "5.00.50 ▼ worse", "250.0100.0 to 400.0~25 ▲ better"} {
		if !strings.Contains(rows, want) {
			t.Errorf("%q: the rows are\n%s", want, rows)
		}
	}
	if strings.Contains(text, "Compared with") {
		t.Error("the page has a comparison without an earlier report")
	}
}

func TestPage_LoadsNothingExternal(t *testing.T) {
	r := example()
	r.Versions["haproxy"] = "HAProxy - https://haproxy.org/"
	text, root := render(t, r, r)
	for n := range root.Descendants() {
		switch n.Data {
		case "script", "link", "img", "iframe", "object", "embed":
			if n.Type == html.ElementNode {
				t.Errorf("the page has an element %s", n.Data)
			}
		}
		for _, a := range n.Attr {
			if strings.Contains(a.Val, "//") || strings.HasPrefix(a.Key, "on") || a.Key == "src" {
				t.Errorf("%s has %s=%q", n.Data, a.Key, a.Val)
			}
		}
	}
	for _, bad := range []string{"url(", "@import", "ZgotmplZ"} {
		if strings.Contains(text, bad) {
			t.Errorf("the page contains %s", bad)
		}
	}
}

func TestPageAnchors(t *testing.T) {
	_, root := render(t, example(), example())
	ids := map[string]int{}
	for n := range root.Descendants() {
		if id := attribute(n, "id"); id != "" {
			ids[id]++
		}
	}
	for id, n := range ids {
		if n > 1 {
			t.Errorf("%d elements have the ID %s", n, id)
		}
	}
	links := 0
	for n := range root.Descendants() {
		if name, ok := strings.CutPrefix(attribute(n, "href"), "#"); ok {
			links++
			if ids[name] == 0 {
				t.Errorf("no element has the ID %s", name)
			}
		}
	}
	if links < 6 {
		t.Errorf("only %d links", links)
	}
}

// TestPage_EscapesText puts markup in each text of a report that has an external origin.
func TestPage_EscapesText(t *testing.T) {
	const evil = `"><script>alert(1)</script><b x='`
	r := example()
	r.Command, r.Machine.CPU, r.Versions[subject] = evil, evil, evil
	for _, c := range r.Cells {
		c.Name, c.Load = c.Name+evil, evil
		for _, o := range c.Outcomes {
			if o.Program != subject {
				o.Program += evil
			}
			if o.Cannot != "" {
				o.Cannot = evil
			}
			o.Setting = evil
			if o.Series != nil {
				o.Series.Unit = evil
			}
		}
	}
	text, root := render(t, r, r)
	if n := len(texts(root, "script")); n > 0 || strings.Contains(text, "<script") {
		t.Errorf("%d scripts", n)
	}
	if !strings.Contains(strings.Join(texts(root, "dd"), ""), evil) {
		t.Error("the text is not shown unchanged")
	}
}

func TestPictures(t *testing.T) {
	for _, c := range example().Cells {
		pictures := append(c.arrivalCharts(), c.ratioChart(), c.waitChart())
		for _, picture := range pictures {
			if picture == "" {
				continue
			}
			d := xml.NewDecoder(strings.NewReader(picture))
			for {
				_, err := d.Token()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatalf("%s: %v in %s", c.Name, err, picture)
				}
			}
			if strings.Contains(picture, "NaN") || strings.Contains(picture, "Inf") || !strings.Contains(picture, `aria-label="`) {
				t.Errorf("%s: %s", c.Name, picture)
			}
		}
	}
	w1, w6 := example().Cells[0], example().Cells[1]
	plots := w1.arrivalCharts()
	if len(plots) != 2 || !strings.Contains(plots[1], "off the scale") || strings.Contains(plots[0], "off the scale") ||
		!strings.Contains(plots[1], "up to 1,000 kB in 1 ms; the rate is 10") {
		t.Errorf("the arrivals are %q", plots)
	}
	if got := w1.ratioChart(); !strings.Contains(got, "haproxy ~25 better; nginx 0.50 worse.") {
		t.Errorf("the bars are %s", got)
	}
	if got := w6.waitChart(); !strings.Contains(got, "naive median 2,001, 99th percentile 2,101, longest 2,200, 1.25 % failed.") {
		t.Errorf("the waits are %s", got)
	}
	if got := w1.waitChart(); got != "" {
		t.Errorf("unexpected wait chart: %s", got)
	}
}

func TestPictures_ZeroValues(t *testing.T) {
	c := &cell{Headline: "cpu", Outcomes: []*outcome{
		{Program: subject, Figures: map[string]stat{"cpu": {[]float64{0, 0}}}, Series: &series{BinMillis: 1, Unit: "bytes", Bins: []int{0}}},
		{Program: "naive", Figures: map[string]stat{"cpu": {[]float64{0, 5}}}, Series: &series{BinMillis: 1, Unit: "packets", Bins: []int{7}}},
	}}
	for _, picture := range append(c.arrivalCharts(), c.ratioChart()) {
		if strings.Contains(picture, "NaN") || strings.Contains(picture, "Inf") {
			t.Error(picture)
		}
	}
}

func TestSeries_Rebin(t *testing.T) {
	for _, test := range []struct {
		nominal, millis float64
		unit            string
	}{
		{100_000, 1, "bytes"},
		{10_000, 1, "bytes"},
		{1000, 5, "bytes"},
		{100, 50, "bytes"},
		{1, 5, "packets"},
		{0, 1, "bytes"},
	} {
		s := &series{BinMillis: 1, Nominal: test.nominal, Unit: test.unit}
		for range 2000 {
			s.Bins = append(s.Bins, 3)
		}
		got := s.rebin()
		if got.BinMillis != test.millis || got.Nominal != test.nominal*test.millis || float64(got.Bins[0]) != 3*test.millis || len(got.Bins) > shownBins {
			t.Errorf("%v %s in 1 ms became %v in %v ms, %d bins of %d", test.nominal, test.unit, got.Nominal, got.BinMillis, len(got.Bins), got.Bins[0])
		}
	}
}

func TestWriteAndRead(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	if err := example().write(dir, nil); err != nil {
		t.Fatal(err)
	}
	r, err := readReport(filepath.Join(dir, "report.json"))
	if err != nil {
		t.Fatal(err)
	}
	want, _ := render(t, r, nil)
	page, err := os.ReadFile(filepath.Join(dir, "report.html"))
	if err != nil || string(page) != want {
		t.Errorf("the page of the report read back differs: %v", err)
	}
}
