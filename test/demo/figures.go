package main

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"shaperd.dev/shaperd/test/lab"
	"shaperd.dev/shaperd/test/lab/plot"
)

// figures are the results of one phase.
type figures struct {
	title           string
	shaped          bool
	length          time.Duration // from the first request to the last response
	greedyAt        time.Duration
	answered        [len(sources)]int
	failed          [len(sources)]int
	sent            int // datagrams from the polite sources
	acked           int
	p50, p99        time.Duration // of the polite sources' answered requests
	losses          losses
	peakConnections int     // peak number of open connections
	bytes           traffic // over TCP
	datagrams       traffic
	sigmas          [len(sources)]float64 // bytes in excess of the per-source rate
	refusals        []refusal
	connectionBins  []int // peak number of open connections in each window
}

// traffic is the arrivals at the downstream, in bytes or in datagrams.
type traffic struct {
	windows [][len(sources)]int // per window and source
	worst   int                 // in any interval of one window
	sigma   float64             // in excess of the rate of all sources
}

func newTraffic(f flow, rate float64, length time.Duration) traffic {
	return traffic{f.bins(window, length), lab.WorstWindow(f.all, window), lab.Sigma(f.all, rate)}
}

func measure(p *phase) figures {
	bytes, datagrams := attribute(p.result.arrivals)
	levels := lab.Levels(p.result.arrivals)
	f := figures{
		title: p.title, shaped: p.shaped, length: p.length, greedyAt: p.greedyAt,
		losses: p.result.losses, refusals: p.result.refusals,
		peakConnections: lab.MaxLevel(levels, 0, math.MaxInt64), connectionBins: levelBins(levels, window, p.length),
		bytes:     newTraffic(bytes, totalRate, p.length),
		datagrams: newTraffic(datagrams, messageRate, p.length),
	}
	var polite sourceStats
	for i, t := range p.stats {
		f.answered[i], f.failed[i] = int(t.answered.Load()), int(t.failed.Load())
		f.sigmas[i] = lab.Sigma(bytes.bySource[i], sourceRate)
		if i != greedy {
			f.sent += int(t.sent.Load())
			f.acked += int(t.acked.Load())
			polite.durations = append(polite.durations, t.durations...)
		}
	}
	latencies := polite.latencies()
	f.p50, f.p99 = lab.Percentile(latencies, 50), lab.Percentile(latencies, 99)
	return f
}

// greedyShare returns the greedy source's share of all responses.
func (f figures) greedyShare() float64 {
	all := 0
	for _, n := range f.answered {
		all += n
	}
	if all == 0 {
		return 0
	}
	return float64(f.answered[greedy]) / float64(all)
}

// politeFailed returns how many requests of the polite sources failed, of how many.
func (f figures) politeFailed() (failed, of int) {
	for i := range sources {
		if i != greedy {
			failed += f.failed[i]
			of += f.failed[i] + f.answered[i]
		}
	}
	return failed, of
}

// A row is a row of the result table.
type row struct{ Label, Before, After string }

func rows(before, after figures) []row {
	var list []row
	add := func(label string, cell func(figures) string) {
		list = append(list, row{label, cell(before), cell(after)})
	}
	for i, s := range sources {
		add(s.name+": requests answered / failed", func(f figures) string {
			return plot.Grouped(f.answered[i]) + " / " + plot.Grouped(f.failed[i])
		})
	}
	add("polite latency, p50 / p99", func(f figures) string {
		return fmt.Sprintf("%d / %d ms", f.p50.Milliseconds(), f.p99.Milliseconds())
	})
	add("polite datagrams acknowledged", func(f figures) string {
		return plot.Grouped(f.acked) + " of " + plot.Grouped(f.sent)
	})
	add("greedy share of all responses", func(f figures) string { return fmt.Sprintf("%.0f %%", 100*f.greedyShare()) })
	add("accept queue overflows", func(f figures) string { return plot.Grouped(f.losses.overflows) })
	add("datagrams lost, receive buffer full", func(f figures) string { return plot.Grouped(f.losses.datagrams) })
	add("peak connections", func(f figures) string { return plot.Grouped(f.peakConnections) })
	add("most bytes in any 10 ms", func(f figures) string { return plot.Grouped(f.bytes.worst) })
	add("sigma, bytes in excess of "+bytesPerSecond(totalRate), func(f figures) string { return plot.Grouped(int(f.bytes.sigma)) })
	add("most datagrams in any 10 ms", func(f figures) string { return plot.Grouped(f.datagrams.worst) })
	return list
}

// A check is an expectation of the shaped phase, and whether it was met.
type check struct {
	Text   string
	Passed bool
}

// The allowed excess over a rate. The daemon's own bounds are far smaller; a busy machine
// delivers late and in batches.
const (
	sigmaBytes     = 64 << 10
	sigmaDatagrams = 16
)

// checks evaluates the phase with the daemon.
func checks(f figures) []check {
	var list []check
	add := func(passed bool, format string, args ...any) {
		list = append(list, check{fmt.Sprintf(format, args...), passed})
	}
	add(f.peakConnections <= maxConnections, "never more than %d connections at once: peak %d", maxConnections, f.peakConnections)
	add(f.bytes.sigma <= sigmaBytes, "never faster than %s in total: at most %s bytes in excess",
		bytesPerSecond(totalRate), plot.Grouped(int(f.bytes.sigma)))
	add(f.sigmas[greedy] <= sigmaBytes, "no source faster than %s: greedy source at most %s bytes in excess",
		bytesPerSecond(sourceRate), plot.Grouped(int(f.sigmas[greedy])))
	add(f.datagrams.sigma <= sigmaDatagrams, "never more than %d datagrams a second: at most %d in excess",
		messageRate, int(f.datagrams.sigma))
	add(f.losses == losses{}, "no loss at the downstream: %s overflows, %s datagrams",
		plot.Grouped(f.losses.overflows), plot.Grouped(f.losses.datagrams))
	failed, of := f.politeFailed()
	add(failed == 0 && of > 0 && f.answered[0] > 0 && f.answered[1] > 0 && f.acked == f.sent,
		"no starvation: of the polite sources' %s requests %s failed, of %s datagrams %s were lost",
		plot.Grouped(of), plot.Grouped(failed), plot.Grouped(f.sent), plot.Grouped(f.sent-f.acked))
	add(f.answered[greedy] > 0, "the greedy source is served within its limits: %s responses", plot.Grouped(f.answered[greedy]))
	return list
}

// failedChecks returns an error that lists the failed checks.
func failedChecks(list []check) error {
	var texts []string
	for _, p := range list {
		if !p.Passed {
			texts = append(texts, p.Text)
		}
	}
	if len(texts) == 0 {
		return nil
	}
	return errors.New("check failed: " + strings.Join(texts, "; "))
}

func bytesPerSecond(rate int) string {
	return strconv.FormatFloat(float64(rate)/1e6, 'g', 4, 64) + " MB/s"
}
