package main

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// A report is the result of one run of the harness.
type report struct {
	Began    time.Time         `json:"began"`
	Seconds  float64           `json:"seconds"`
	Short    bool              `json:"short"`
	Command  string            `json:"command"`
	Machine  machine           `json:"machine"`
	Versions map[string]string `json:"versions"` // by program
	Cells    []*cell           `json:"cells"`
}

// machine describes the machine of the run.
type machine struct {
	Kernel string `json:"kernel"`
	CPU    string `json:"cpu"`
	CPUs   int    `json:"cpus"`
	Go     string `json:"go"`
}

// A cell is one load with the outcomes of several programs.
type cell struct {
	Work     string     `json:"work"` // "W1"
	Name     string     `json:"name"` // unique within the work: "10 MB/s, 4 connections"
	Load     string     `json:"load"` // a sentence
	Figures  []string   `json:"figures"`
	Headline string     `json:"headline"`           // the most important figure of the cell
	Baseline string     `json:"baseline,omitempty"` // the program that the others are compared with; "" for the subject
	Outcomes []*outcome `json:"outcomes"`
}

// An outcome is the result of one program.
type outcome struct {
	Program string          `json:"program"`
	Peer    bool            `json:"peer,omitempty"`   // whether ratios to it count as better or worse
	Cannot  string          `json:"cannot,omitempty"` // why it was not measured, or failed
	Setting string          `json:"setting,omitempty"`
	Figures map[string]stat `json:"figures,omitempty"`
	Series  *series         `json:"series,omitempty"` // of the first repetition
}

// A stat is one figure over all repetitions, in their order.
type stat struct {
	Samples []float64 `json:"samples"`
}

func (s stat) median() float64 {
	sorted := slices.Sorted(slices.Values(s.Samples))
	n := len(sorted)
	if n == 0 {
		return math.NaN()
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

func (s stat) min() float64 { return slices.Min(s.Samples) }
func (s stat) max() float64 { return slices.Max(s.Samples) }

// A series is the arrivals at the downstream, in time bins.
type series struct {
	BinMillis float64 `json:"bin_ms"`
	Nominal   float64 `json:"nominal"` // units per bin at the configured rate; 0 without a rate
	Unit      string  `json:"unit"`
	Bins      []int   `json:"bins"`
}

// A sample is the result of one repetition.
type sample struct {
	figures map[string]float64
	series  *series
}

// subject is the program that all others are compared with.
const subject = "shaperd"

// A ratio compares the subject with a peer in one figure: above 1 the subject is
// better. It is the median over pairs of repetitions that ran one after the other.
type ratio struct {
	value, min, max float64
	noise           float64
}

// compare returns the ratio of the subject to a peer. It returns false when neither
// direction of the figure is better, or one of them lacks it.
func (c *cell) compare(key string, ours, theirs *outcome) (ratio, bool) {
	f := figureOf(key)
	a, b := ours.Figures[key].Samples, theirs.Figures[key].Samples
	n := min(len(a), len(b))
	if f.better == 0 || n == 0 {
		return ratio{}, false
	}
	var list stat
	for i := range n {
		x, y := max(math.Abs(a[i]), f.floor), max(math.Abs(b[i]), f.floor)
		if f.better == more {
			x, y = y, x
		}
		if x == 0 && y == 0 {
			x, y = 1, 1
		}
		list.Samples = append(list.Samples, y/x)
	}
	return ratio{list.median(), list.min(), list.max(), noise(list.Samples)}, true
}

// baseline returns the outcome that the others are compared with, or nil.
func (c *cell) baseline() *outcome { return c.outcome(cmp.Or(c.Baseline, subject)) }

func (c *cell) outcome(program string) *outcome {
	for _, o := range c.Outcomes {
		if o.Program == program {
			return o
		}
	}
	return nil
}

type better int

const (
	less better = iota + 1
	more
)

// A figure is a measured quantity.
type figure struct {
	key, title, unit string
	better           better  // 0 if neither
	floor            float64 // lower bound of values in ratios: smaller values make no practical difference
	digits           int     // decimals; -1 for integers with grouped thousands
	description      string
}

// figures are all figures, in the order of the columns.
var figures = []figure{
	{"error", "rate error", "%", less, 0.1, 2, "the deviation of the mean rate at the downstream's interface from the configured rate"},
	{"sigma", "sigma", "kB", less, 1.5, 1, "the smallest burst that explains the arrivals: any interval of length t contains at most rate x t + sigma bytes"},
	{"w1", "worst 1 ms", "x", less, 1, 2, "the maximum in any millisecond, relative to the rate"},
	{"w10", "worst 10 ms", "x", less, 1, 2, "the maximum in any 10 ms, relative to the rate"},
	{"w100", "worst 100 ms", "x", less, 1, 2, "the maximum in any 100 ms, relative to the rate"},
	{"gap50", "gap p50", "ms", 0, 0, 3, "the time between arrivals, median"},
	{"gap99", "gap p99", "ms", 0, 0, 2, "the time between arrivals, 99th percentile"},
	{"gapmax", "gap max", "ms", less, 1, 1, "the longest time without an arrival"},
	{"jain", "Jain", "", more, 0, 4, "Jain's fairness index of the bytes by connection: 1 when all are equal"},
	{"throughput", "throughput", "Gbit/s", more, 0, 2, "payload received at the downstream's interface"},
	{"packets", "datagrams", "k/s", more, 0, 0, "datagrams received at the downstream's interface"},
	{"connections", "connections", "/s", more, 0, -1, "connections that were opened, echoed 64 bytes and were closed"},
	{"failed", "failed", "%", less, 0.01, 2, "attempts without a response"},
	{"p50", "p50", "ms", less, 0, 2, "the time from the attempt to connect until the response, median"},
	{"p99", "p99", "ms", less, 0, 2, "the time until the response, 99th percentile"},
	{"worst", "longest", "ms", less, 1, 1, "the longest time until the response"},
	{"inflight", "peak connections", "", less, 1, 0, "the peak number of open connections at the downstream, from the packets at its interface"},
	{"hog", "hog's responses", "/s", 0, 0, 0, "responses to the source with 200 connections"},
	{"cpu", "CPU", "s/GB", less, 0, 2, "the program's CPU time, user and system, per GB of payload"},
	{"user", "user", "s/GB", 0, 0, 2, "its CPU time in user space"},
	{"system", "system", "s/GB", 0, 0, 2, "its CPU time in the kernel"},
	{"softirq", "softirq", "s/GB", 0, 0, 2, "the whole machine's time in softirqs, per GB"},
	{"machine", "machine", "s/GB", less, 0, 2, "the whole machine's CPU time, including senders and receivers, per GB"},
	{"cpu-packet", "CPU", "us each", less, 0, 3, "the program's CPU time per datagram"},
	{"machine-packet", "machine", "us each", less, 0, 3, "the whole machine's CPU time per datagram or packet"},
	{"cpu-connection", "CPU", "us each", less, 0, 0, "the program's CPU time per connection"},
	{"cpu-reload", "CPU", "ms each", less, 0, 1, "CPU time per reload, of the program and its child processes"},
	{"reloads", "reloads", "/s", 0, 0, 0, "successful reloads"},
	{"cut", "connections cut", "", less, 1, 0, "connections broken by a reload"},
	{"memory", "memory", "MB", less, 0, 1, "peak resident memory of all its processes"},
	{"per-connection", "memory each", "KiB", less, 0, 2, "user memory per idle connection"},
	{"ns", "time", "ns", less, 0, 0, "per decision or packet"},
	{"per-key", "memory each", "B", less, 0, 0, "memory per key"},
	{"gc", "garbage collection", "ms", less, 0.1, 2, "a full collection with all keys alive"},
}

func figureOf(key string) figure {
	for _, f := range figures {
		if f.key == key {
			return f
		}
	}
	panic("no figure " + key)
}
