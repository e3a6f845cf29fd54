package main

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// example returns plausible figures of a phase.
func example(shaped bool) figures {
	var bytes flow
	bytes.add(0, lab.Event{At: 20 * time.Millisecond, N: 2000})
	bytes.add(greedy, lab.Event{At: 2 * time.Second, N: 30000})
	f := figures{
		title: "Direct", shaped: shaped, length: 3 * time.Second, greedyAt: time.Second,
		answered: [3]int{20, 30, 50}, acked: 5, sent: 5, peakConnections: 10,
		bytes:          newTraffic(bytes, totalRate, 3*time.Second),
		datagrams:      newTraffic(flow{}, messageRate, 3*time.Second),
		connectionBins: levelBins([]lab.Event{{At: time.Second, N: 10}}, window, 3*time.Second),
		refusals:       []refusal{{"per<source>", "queue-full", "datagrams", 12345}},
	}
	return f
}

func TestPicturesAreXML(t *testing.T) {
	before, after := example(false), example(true)
	empty := figures{length: 3 * time.Second, bytes: newTraffic(flow{}, totalRate, 3*time.Second), connectionBins: make([]int, 300)}
	for name, picture := range map[string]string{
		"bytes":       bytesFigure(before, after).draw(wide, true),
		"bytes small": bytesFigure(before, after).draw(narrow, false),
		"nothing":     bytesFigure(empty, empty).draw(wide, true),
		"datagrams":   datagramsFigure(before, after).draw(wide, true),
		"connections": connectionsFigure(before, after, narrow.width),
	} {
		d := xml.NewDecoder(strings.NewReader(picture))
		for {
			_, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		for _, bad := range []string{"NaN", "Inf", "http://", "https://"} {
			if strings.Contains(strings.Replace(picture, "http://www.w3.org/2000/svg", "", 1), bad) {
				t.Errorf("%s has %s", name, bad)
			}
		}
	}
}

func TestPage(t *testing.T) {
	got, err := render(example(false), example(true), checks(example(true)))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"12,345 datagrams by limit &#34;per&lt;source&gt;&#34;: queue full", "max_connections = 10", "<svg", "prefers-color-scheme: dark"} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is missing", want)
		}
	}
	for _, bad := range []string{"ZgotmplZ", "src=", "@import", "url(", "<script"} {
		if strings.Contains(got, bad) {
			t.Errorf("the page contains %s", bad)
		}
	}
}

func TestChecks(t *testing.T) {
	if err := failedChecks(checks(example(true))); err != nil {
		t.Errorf("all checks passed, but: %v", err)
	}
	for name, modify := range map[string]func(*figures){
		"connections at once":     func(f *figures) { f.peakConnections = maxConnections + 1 },
		"2 MB/s":                  func(f *figures) { f.bytes.sigma = sigmaBytes + 1 },
		"1.75 MB/s":               func(f *figures) { f.sigmas[greedy] = sigmaBytes + 1 },
		"datagrams a second":      func(f *figures) { f.datagrams.sigma = sigmaDatagrams + 1 },
		"1 overflows":             func(f *figures) { f.losses.overflows = 1 },
		"1 datagrams":             func(f *figures) { f.losses.datagrams = 1 },
		"requests 1 failed":       func(f *figures) { f.failed[1] = 1 },
		"requests 0 failed":       func(f *figures) { f.answered[0] = 0 },
		"5 datagrams 1 were lost": func(f *figures) { f.acked-- },
		"0 responses":             func(f *figures) { f.answered[greedy] = 0 },
	} {
		f := example(true)
		modify(&f)
		err := failedChecks(checks(f))
		if err == nil || !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), ";") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestTerminalFigures(t *testing.T) {
	if got := spark([]int64{0, 1, 50, 100}, 100); !strings.HasPrefix(got, " ▁▄█") || len([]rune(got)) != sparkWidth {
		t.Errorf("the bars are %q", got)
	}
	if got := bytesPerSecond(sourceRate); got != "1.75 MB/s" {
		t.Errorf("got %s", got)
	}
}
