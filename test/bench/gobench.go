package main

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
)

// goTest runs tests or benchmarks of a package of this module, and returns their output.
// It must run in the root of the repository, like "make bench".
func goTest(ctx context.Context, pkg string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", slices.Concat([]string{"test", pkg, "-count=1"}, args)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		text := stdout.String() + stderr.String()
		return "", fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, text[max(0, len(text)-2000):])
	}
	return stdout.String(), nil
}

// benchmark runs Go benchmarks of a package.
func benchmark(ctx context.Context, pkg, pattern string, args ...string) (timings, error) {
	text, err := goTest(ctx, pkg, append([]string{"-run", "^$", "-bench", pattern}, args...)...)
	if err != nil {
		return nil, err
	}
	t := parseBenchmarks(text)
	if len(t) == 0 {
		return nil, fmt.Errorf("%s has no benchmark %s", pkg, pattern)
	}
	return t, nil
}

// timings are the results of Go benchmarks by name ("Decide/keys=1k") and unit ("ns/op"), the minimum of all runs.
type timings map[string]map[string]float64

// parseBenchmarks reads the output of go test -bench.
func parseBenchmarks(text string) timings {
	all := timings{}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 4 || len(fields)%2 != 0 || !strings.HasPrefix(fields[0], "Benchmark") {
			continue
		}
		name := strings.TrimPrefix(fields[0], "Benchmark")
		if i := strings.LastIndexByte(name, '-'); i >= 0 {
			if _, err := strconv.Atoi(name[i+1:]); err == nil {
				name = name[:i] // the number of processors
			}
		}
		if all[name] == nil {
			all[name] = map[string]float64{}
		}
		for i := 2; i < len(fields); i += 2 {
			x, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				break
			}
			if least, ok := all[name][fields[i+1]]; !ok || x < least {
				all[name][fields[i+1]] = x
			}
		}
	}
	return all
}

// sample converts the results of a benchmark to figures.
func (t timings) sample(name string) (s sample, ok bool) {
	by, ok := t[name]
	s.figures = map[string]float64{}
	for unit, key := range map[string]string{"ns/op": "ns", "B/key": "per-key", "gc-ms": "gc"} {
		if x, ok := by[unit]; ok {
			s.figures[key] = x
		}
	}
	return s, ok
}

// samples returns the results of the benchmarks that are rows of a cell.
func (t timings) samples(rows []benchRow) (map[string][]sample, error) {
	all := map[string][]sample{}
	for _, r := range rows {
		s, ok := t.sample(r.bench)
		if !ok {
			return nil, fmt.Errorf("missing benchmark %q", r.bench)
		}
		all[r.name] = []sample{s}
	}
	return all, nil
}

// A benchRow is a row of a cell that is a benchmark.
type benchRow struct{ name, bench string }

func names(rows []benchRow) (list []string) {
	for _, r := range rows {
		list = append(list, r.name)
	}
	return list
}

type keyCount struct{ n, name string }

// keyCounts are the table sizes of the decision benchmarks.
var keyCounts = []keyCount{{"1", "1 key"}, {"1k", "1,000 keys"}, {"32k", "32,000 keys"}, {"1M", "1,000,000 keys"}}

const decideTime = "-benchtime=300ms"

// loadsW8 measures a decision over random keys, with shaperd's table and with the usual Go code.
func loadsW8(short bool) (list []load) {
	counts := []keyCount{keyCounts[1], keyCounts[3]}
	if short {
		counts = counts[1:]
	}
	for _, count := range counts {
		list = append(list, load{
			name:        count.name,
			description: "in-process decisions over keys in random order, compared with a read of a random cache line in as much memory",
			headline:    "ns", figures: []string{"ns", "per-key", "gc"}, programs: []string{subject, "map of rate.Limiter", "a cache miss"}, peers: []string{"map of rate.Limiter"},
			custom: func(ctx context.Context, _ *bench) (map[string][]sample, error) {
				return decide(ctx, count.n)
			},
		})
	}
	return append(list, spoofedFlood(short))
}

func decide(ctx context.Context, keys string) (map[string][]sample, error) {
	pattern := "^BenchmarkDecide$/^keys=" + keys + "$"
	ours, err := benchmark(ctx, "./shaper", pattern, decideTime)
	if err != nil {
		return nil, err
	}
	theirs, err := benchmark(ctx, "./test/bench", pattern, decideTime)
	if err != nil {
		return nil, err
	}
	name := "Decide/keys=" + keys
	all, err := ours.samples([]benchRow{{subject, name}})
	if err != nil {
		return nil, err
	}
	peer, err := theirs.samples([]benchRow{{"map of rate.Limiter", name}})
	if err != nil {
		return nil, err
	}
	all["map of rate.Limiter"] = peer["map of rate.Limiter"]
	if x, ok := ours[name]["miss-ns"]; ok {
		all["a cache miss"] = []sample{{figures: map[string]float64{"ns": x}}}
	}
	return all, nil
}
