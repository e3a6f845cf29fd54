package main

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"shaperd/test/lab"
)

// figures are what one phase came to.
type figures struct {
	title     string
	shaped    bool
	length    time.Duration // from the first request to the last answer
	greedyAt  time.Duration
	answered  [len(sources)]int
	failed    [len(sources)]int
	sent      int // datagrams of the polite sources
	acked     int
	p50, p99  time.Duration // of the polite sources' answered requests
	losses    losses
	most      int     // connections at once
	bytes     traffic // by TCP
	datagrams traffic
	sigmas    [len(sources)]float64 // bytes beyond the rate of one source
	refusals  []refusal
	connected []int // most at once, in each window
}

// traffic is what arrived at the downstream, in bytes or in datagrams.
type traffic struct {
	windows [][len(sources)]int // in each window of time, by source
	worst   int                 // in any interval as wide as a window
	sigma   float64             // beyond the rate of all sources
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
		most: lab.Highest(levels, 0, math.MaxInt64), connected: levelBins(levels, window, p.length),
		bytes:     newTraffic(bytes, totalRate, p.length),
		datagrams: newTraffic(datagrams, messageRate, p.length),
	}
	var polite tally
	for i, t := range p.tallies {
		f.answered[i], f.failed[i] = int(t.answered.Load()), int(t.failed.Load())
		f.sigmas[i] = lab.Sigma(bytes.of[i], sourceRate)
		if i != greedy {
			f.sent += int(t.sent.Load())
			f.acked += int(t.acked.Load())
			polite.took = append(polite.took, t.took...)
		}
	}
	took := polite.latencies()
	f.p50, f.p99 = lab.Percentile(took, 50), lab.Percentile(took, 99)
	return f
}

// greedyShare is the part of all answers that the greedy source got.
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

// politeFailed is the requests of the polite sources that got no answer.
func (f figures) politeFailed() (failed, of int) {
	for i := range sources {
		if i != greedy {
			failed += f.failed[i]
			of += f.failed[i] + f.answered[i]
		}
	}
	return failed, of
}

// A row of the table at the end.
type row struct{ Label, Before, After string }

func rows(before, after figures) []row {
	var list []row
	add := func(label string, cell func(figures) string) {
		list = append(list, row{label, cell(before), cell(after)})
	}
	for i, s := range sources {
		add(s.name+": requests answered / failed", func(f figures) string {
			return grouped(f.answered[i]) + " / " + grouped(f.failed[i])
		})
	}
	add("polite latency, p50 / p99 of answers", func(f figures) string {
		return fmt.Sprintf("%d / %d ms", f.p50.Milliseconds(), f.p99.Milliseconds())
	})
	add("polite datagrams acknowledged", func(f figures) string {
		return grouped(f.acked) + " of " + grouped(f.sent)
	})
	add("greedy share of all answers", func(f figures) string { return fmt.Sprintf("%.0f %%", 100*f.greedyShare()) })
	add("accept queue overflows", func(f figures) string { return grouped(f.losses.overflows) })
	add("datagrams lost in the full buffer", func(f figures) string { return grouped(f.losses.datagrams) })
	add("most connections at once", func(f figures) string { return grouped(f.most) })
	add("most bytes in any 10 ms", func(f figures) string { return grouped(f.bytes.worst) })
	add("sigma, bytes beyond "+bytesPerSecond(totalRate), func(f figures) string { return grouped(int(f.bytes.sigma)) })
	add("most datagrams in any 10 ms", func(f figures) string { return grouped(f.datagrams.worst) })
	return list
}

// A promise is one that the daemon makes, and whether it was kept.
type promise struct {
	Text string
	Kept bool
}

// What may exceed a rate at once. The daemon's own bounds are far smaller; a busy
// machine delivers late, and then together.
const (
	sigmaBytes     = 64 << 10
	sigmaDatagrams = 16
)

// promises judges the phase with the daemon.
func promises(f figures) []promise {
	var list []promise
	add := func(kept bool, format string, args ...any) {
		list = append(list, promise{fmt.Sprintf(format, args...), kept})
	}
	add(f.most <= maxConnections, "never more than %d connections at once: at most %d", maxConnections, f.most)
	add(f.bytes.sigma <= sigmaBytes, "never faster than %s, all together: at most %s bytes beyond it",
		bytesPerSecond(totalRate), grouped(int(f.bytes.sigma)))
	add(f.sigmas[greedy] <= sigmaBytes, "no source faster than %s: the greedy one at most %s bytes beyond it",
		bytesPerSecond(sourceRate), grouped(int(f.sigmas[greedy])))
	add(f.datagrams.sigma <= sigmaDatagrams, "never more than %d datagrams a second: at most %d beyond it",
		messageRate, int(f.datagrams.sigma))
	add(f.losses == losses{}, "nothing lost at the downstream: %s overflows, %s datagrams",
		grouped(f.losses.overflows), grouped(f.losses.datagrams))
	failed, of := f.politeFailed()
	add(failed == 0 && of > 0 && f.answered[0] > 0 && f.answered[1] > 0 && f.acked == f.sent,
		"nobody starves: of the polite sources' %s requests %s failed, of %s datagrams %s were lost",
		grouped(of), grouped(failed), grouped(f.sent), grouped(f.sent-f.acked))
	add(f.answered[greedy] > 0, "the greedy source is served within its limits: %s answers", grouped(f.answered[greedy]))
	return list
}

// broken is the error that names the promises that were not kept.
func broken(list []promise) error {
	var texts []string
	for _, p := range list {
		if !p.Kept {
			texts = append(texts, p.Text)
		}
	}
	if len(texts) == 0 {
		return nil
	}
	return errors.New("broken promise: " + strings.Join(texts, "; "))
}

// grouped writes n with a comma between thousands.
func grouped(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func bytesPerSecond(rate int) string {
	return strconv.FormatFloat(float64(rate)/(1<<20), 'g', 4, 64) + " MiB/s"
}
