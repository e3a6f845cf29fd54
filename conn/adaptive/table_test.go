package adaptive

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
)

var (
	tableOf = flag.String("table", "all", "`controllers` to compare")
	only    = flag.String("servers", "plc", "`names` of the servers in the table, or all but those over 24 hours")
	seeds   = flag.Int("seeds", 1, "runs of each")
)

type contender struct {
	name string
	make func(*world) controller
}

// best has the best static cap at any time.
type bestCap struct {
	*world
	limit int
}

func (c *bestCap) Limit() int                         { return c.limit }
func (c *bestCap) set(int, int, float64)              {}
func (c *bestCap) end(float64, int, outcome, float64) {}
func (c *bestCap) step(now float64)                   { c.limit = c.right(now) }

// static is a fixed cap.
type static int

func (c static) Limit() int                         { return int(c) }
func (c static) set(int, int, float64)              {}
func (c static) end(float64, int, outcome, float64) {}
func (c static) step(float64)                       {}

func contenders() []contender {
	times := func(f float64, name string) contender {
		return contender{name, func(w *world) controller { return static(max(1, math.Round(f*float64(w.rights[0])))) }}
	}
	random := func() *rand.Rand { return rand.New(rand.NewPCG(5, 6)) }
	return []contender{
		{"best cap", func(w *world) controller { return &bestCap{w, w.rights[0]} }},
		{"shaperd", func(*world) controller { return newOurs() }},
		times(0.5, "cap/2"), times(2, "cap*2"), times(5, "cap*5"),
		{"aimd", func(w *world) controller { return &aimd{windowed: windowed{limit: 20}, target: w.target} }},
		{"vegas", func(*world) controller { return &vegas{windowed: windowed{limit: 20}, jitter: 1, rng: random()} }},
		{"gradient2", func(*world) controller { return &gradient2{windowed: windowed{limit: 20}} }},
		{"envoy", func(*world) controller {
			return &envoy{windowed: windowed{limit: 3}, probing: true, kept: 3, rng: random()}
		}},
		{"bbr", func(*world) controller { return &bbr{windowed: windowed{limit: 20}} }},
	}
}

// row is what a controller has made of a server.
type row struct {
	good        float64 // part of the best cap's
	latency     float64 // p99, times the best cap's
	ratio       float64 // geometric mean of the limit over the right one
	oscillation float64 // median over minutes of p95 - p5 of the limit over its mean
	converged   []float64
}

func measure(w *world, r, ref *simResult) row {
	const warm = 60
	out := row{good: r.goodput(warm, w.length) / ref.goodput(warm, w.length), latency: quantile(r.latencies, 0.99) / quantile(ref.latencies, 0.99)}
	sum := 0.0
	for t := warm; t < int(w.length); t++ {
		sum += math.Log(max(r.limits[t], 0.1) / float64(w.right(float64(t))*max(w.gates, 1)))
	}
	out.ratio = math.Exp(sum / (w.length - warm))
	var osc []float64
	for t := warm; t+60 <= int(w.length); t += 60 {
		m := r.limits[t : t+60]
		mean := 0.0
		for _, l := range m {
			mean += l / 60
		}
		osc = append(osc, (quantile(m, 0.95)-quantile(m, 0.05))/mean)
	}
	out.oscillation = quantile(osc, 0.5)
	for i, from := range append([]float64{0}, w.events...) {
		to := w.length
		if i < len(w.events) {
			to = w.events[i]
		}
		out.converged = append(out.converged, converged(r, from, to, ref.goodput(from+(to-from)/3, to)))
	}
	return out
}

// converged returns how many seconds after from goodput stays within a tenth of want for 10 s, or NaN.
func converged(r *simResult, from, to, want float64) float64 {
	in := 0
	for t := from; t+2 < to; t++ {
		if r.goodput(t, t+3) < 0.9*want {
			in = 0
		} else if in++; in == 10 {
			return t - 9 - from
		}
	}
	return math.NaN()
}

// TestTable prints how controllers do in front of servers. Ours needs to know nothing of them to be near the best cap.
func TestTable(t *testing.T) {
	type cell struct{ server, contender int }
	all, names := append(servers(), days()...), contenders()
	rows := map[cell][]row{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	free := make(chan bool, 2)
	for i := range all {
		w := &all[i]
		if *only == "all" && w.length > 7200 || *only != "all" && !strings.Contains(","+*only+",", ","+w.name+",") {
			continue
		}
		for seed := range *seeds {
			wg.Go(func() {
				free <- true
				defer func() { <-free }()
				ref := simulate(*w, func() controller { return names[0].make(w) }, uint64(seed))
				for j, c := range names {
					if *tableOf != "all" && !strings.Contains(","+*tableOf+",", ","+c.name+",") {
						continue
					}
					r := ref
					if j > 0 {
						r = simulate(*w, func() controller { return c.make(w) }, uint64(seed))
					}
					mu.Lock()
					rows[cell{i, j}] = append(rows[cell{i, j}], measure(w, r, ref))
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	defer out.Flush()
	fmt.Fprintln(out, "server\tcontroller\tgoodput\tlimit/right\tp99\toscillation\tconverged after s")
	for i := range all {
		for j := range names {
			for _, r := range rows[cell{i, j}] {
				if names[j].name == "shaperd" && all[i].gates < 2 && !(r.good > 0.9) {
					t.Errorf("%s: goodput %.1f %% of the best cap's", all[i].name, 100*r.good)
				}
				fmt.Fprintf(out, "%s\t%s\t%.1f %%\t%.2f\t%.2fx\t%.0f %%\t%.0f\n", all[i].name, names[j].name, 100*r.good, r.ratio, r.latency, 100*r.oscillation, r.converged)
			}
		}
	}
}
