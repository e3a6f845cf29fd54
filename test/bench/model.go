package main

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// A report is what one run of the harness measured.
type report struct {
	Began    time.Time         `json:"began"`
	Seconds  float64           `json:"seconds"`
	Short    bool              `json:"short"`
	Command  string            `json:"command"`
	Machine  machine           `json:"machine"`
	Versions map[string]string `json:"versions"` // by program
	Cells    []*cell           `json:"cells"`
}

// machine is where it ran.
type machine struct {
	Kernel string `json:"kernel"`
	CPU    string `json:"cpu"`
	CPUs   int    `json:"cpus"`
	Go     string `json:"go"`
}

// A cell is one load that several programs met, one row group of the table.
type cell struct {
	Work     string     `json:"work"` // "W1"
	Name     string     `json:"name"` // unique within the work: "10 MB/s, 4 connections"
	Load     string     `json:"load"` // a sentence
	Figures  []string   `json:"figures"`
	Headline string     `json:"headline"`           // the figure that the cell is about
	Baseline string     `json:"baseline,omitempty"` // what all others are compared with; "" is the subject
	Outcomes []*outcome `json:"outcomes"`
}

// An outcome is how one program did.
type outcome struct {
	Program string          `json:"program"`
	Peer    bool            `json:"peer,omitempty"`   // a ratio to it is a win or a loss
	Cannot  string          `json:"cannot,omitempty"` // why it had no part, or ended early
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

func (s stat) least() float64 { return slices.Min(s.Samples) }
func (s stat) most() float64  { return slices.Max(s.Samples) }

// A series is what arrived at the downstream, in bins of time.
type series struct {
	BinMillis float64 `json:"bin_ms"`
	Nominal   float64 `json:"nominal"` // units in a bin at the rate; 0 without one
	Unit      string  `json:"unit"`
	Bins      []int   `json:"bins"`
}

// A sample is what one repetition came to.
type sample struct {
	figures map[string]float64
	series  *series
}

// subject is the program that all others are compared with.
const subject = "shaperd"

// A ratio compares the subject with a peer in one figure: above 1 the subject is
// better. It is the median over pairs of repetitions that ran one after the other.
type ratio struct {
	value, least, most float64
	noise              float64
}

// compare returns the ratio of the subject to a peer. It is false when the figure has
// no better, or one of them lacks it.
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
	return ratio{list.median(), list.least(), list.most(), noise(list.Samples)}, true
}

// baseline is the outcome that the others are compared with, and nil without it.
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

// A figure is one of the things that are measured.
type figure struct {
	key, title, unit string
	better           better  // 0: neither
	floor            float64 // what is below it counts as it in ratios: nobody sees the difference
	digits           int     // behind the point; -1 groups of thousands
	about            string
}

// figures are all there are, in the order of the columns.
var figures = []figure{
	{"error", "mean off", "%", less, 0.1, 2, "how far the mean rate at the downstream's interface is from the one configured"},
	{"sigma", "sigma", "kB", less, 1.5, 1, "the smallest burst that explains the arrivals: in any interval of length t there are at most rate x t + sigma bytes"},
	{"w1", "worst 1 ms", "x", less, 1, 2, "the most in any millisecond, over the rate"},
	{"w10", "worst 10 ms", "x", less, 1, 2, "the most in any 10 ms, over the rate"},
	{"w100", "worst 100 ms", "x", less, 1, 2, "the most in any 100 ms, over the rate"},
	{"gap50", "gap p50", "ms", 0, 0, 3, "the time between arrivals, median"},
	{"gap99", "gap p99", "ms", 0, 0, 2, "the time between arrivals, 99th percentile"},
	{"gapmax", "gap max", "ms", less, 1, 1, "the longest time without an arrival"},
	{"jain", "Jain", "", more, 0, 4, "Jain's index of fairness of the bytes by connection: 1 when all got the same"},
	{"throughput", "throughput", "Gbit/s", more, 0, 2, "payload that reached the downstream's interface"},
	{"packets", "datagrams", "k/s", more, 0, 0, "datagrams that reached the downstream's interface"},
	{"connections", "connections", "/s", more, 0, -1, "connections that were made, echoed 64 bytes and were closed"},
	{"failed", "failed", "%", less, 0.01, 2, "attempts without an answer"},
	{"p50", "p50", "ms", less, 0, 2, "the time until an answer, from the attempt to connect on: median"},
	{"p99", "p99", "ms", less, 0, 2, "the time until an answer, 99th percentile"},
	{"worst", "longest", "ms", less, 1, 1, "the longest time until an answer"},
	{"inflight", "most at once", "", less, 1, 0, "connections open at the downstream at once, as its interface saw them"},
	{"hog", "hog's answers", "/s", 0, 0, 0, "what the source with 200 connections got"},
	{"cpu", "CPU", "s/GB", less, 0, 2, "the program's CPU time, user and system, for each GB of payload"},
	{"user", "user", "s/GB", 0, 0, 2, "of it in user space"},
	{"system", "system", "s/GB", 0, 0, 2, "of it in the kernel"},
	{"softirq", "softirq", "s/GB", 0, 0, 2, "the whole machine's time in softirqs, for each GB"},
	{"machine", "machine", "s/GB", less, 0, 2, "the whole machine's CPU time, senders and receivers too, for each GB"},
	{"cpu-packet", "CPU", "us each", less, 0, 3, "the program's CPU time for each datagram"},
	{"machine-packet", "machine", "us each", less, 0, 3, "the whole machine's CPU time for each datagram or packet"},
	{"cpu-connection", "CPU", "us each", less, 0, 0, "the program's CPU time for each connection"},
	{"cpu-reload", "CPU", "ms each", less, 0, 1, "CPU time for each reload, of the program and what it started"},
	{"reloads", "reloads", "/s", 0, 0, 0, "configurations that were put in force"},
	{"cut", "connections cut", "", less, 1, 0, "connections that a reload ended"},
	{"memory", "memory", "MB", less, 0, 1, "peak resident memory of all its processes"},
	{"per-connection", "memory each", "KiB", less, 0, 2, "user memory for each idle connection"},
	{"ns", "time", "ns", less, 0, 0, "for each decision, or each packet"},
	{"per-key", "memory each", "B", less, 0, 0, "memory for each key"},
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
