package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"shaperd/shaper/config"
	"shaperd/test/lab"
)

// limitCounts are how many limits apply at once.
var limitCounts = []int{1, 4, 16, config.MaxLimits}

func counted(n int, what string) string { return grouped(n) + " " + plural(n, what) }

// matching is n limits that all connections meet, each with these lines.
func matching(n int, lines string) string {
	var b strings.Builder
	for i := range n {
		key := []string{`"source"`, ``, `"port"`, `"source", "port"`}[i%4]
		fmt.Fprintf(&b, "\n[[limit]]\nname = \"l%d\"\nkey = [%s]\n%s\n", i, key, lines)
	}
	return b.String()
}

// byLimits is a row for each count of limits that have these lines.
func byLimits(counts []int, lines string) (rows []row) {
	for _, n := range counts {
		rows = append(rows, row{
			name: counted(n, "limit"), start: startShaperd,
			task: func(net *network, b binaries) task {
				return task{net: net, bins: b, conns: 32, limits: matching(n, lines)}
			},
		})
	}
	return rows
}

// loadsW12 has shaperd alone do the same with more and more of something. Ratios are to
// the least of it.
func loadsW12(short bool) []load {
	counts, span := limitCounts, 2*time.Second
	if short {
		counts, span = []int{1, config.MaxLimits}, time.Second
	}
	const clients, conns = 32, 4
	first := counted(counts[0], "limit")
	list := []load{
		{
			name: "limits, connections", about: "32 clients that connect, send 64 bytes, wait for their echo and close; limits on connections and on new ones, all of which they meet",
			headline: "connections", figures: []string{"connections", "p50", "p99", "cpu-connection", "memory"},
			rows: byLimits(counts, "max_connections = 100000\nnew_connections = \"1000000/s\""), baseline: first,
			measure: func(ctx context.Context, n *network, r *running) (sample, error) {
				return measureConnections(ctx, n, r, clients, span)
			},
		},
		{
			name: "limits, bytes", about: "4 connections that send all they can; rates, all of which they meet, far beyond",
			headline: "cpu", figures: []string{"throughput", "cpu", "user", "system", "memory"},
			rows: byLimits(counts, "rate = \"40GB/s\""), baseline: first,
			measure: func(ctx context.Context, n *network, r *running) (sample, error) {
				return measureThroughput(ctx, n, r, conns, 256<<10, span)
			},
		},
	}
	if !short {
		l := shaped{rate: 100e6, keys: 1, flows: conns, span: span}
		list = append(list, load{
			name: "limits, 100 MB/s", about: "4 connections of one source that send all they can, under as many rates of 100 MB/s",
			headline: "cpu", figures: shapedFigures,
			rows: byLimits(counts, "rate = \"100MB/s\""), baseline: first, measure: l.measure,
		}, growingKeys())
	}
	list = append(list, growingConnections(short), growingTable(short))
	for i := range list {
		list[i].repeat = 2
	}
	return list
}

func growingKeys() load {
	var rows []benchRow
	for _, c := range keyCounts {
		rows = append(rows, benchRow{c.name, "Decide/keys=" + c.n})
	}
	return load{
		name: "keys", about: "decisions in the process, over keys in random order", headline: "ns",
		figures: []string{"ns"}, programs: names(rows), baseline: rows[0].name,
		own: func(ctx context.Context, _ *bench) (map[string][]sample, error) {
			t, err := benchmark(ctx, "./shaper", "^BenchmarkDecide$/^keys=[0-9]*[kM]?$", decideTime)
			if err != nil {
				return nil, err
			}
			return t.samples(rows)
		},
	}
}

// growingConnections spreads one rate over more and more connections, 32 of which send.
func growingConnections(short bool) load {
	counts, span := []int{1, 100, 1000, 9000}, 2*time.Second
	if short {
		counts, span = []int{1, 100}, time.Second
	}
	l := load{
		name: "connections", about: "connections of one source under a rate of 10 MB/s together; 32 of them send all they can, the others nothing",
		headline: "cpu", figures: shapedFigures, baseline: counted(counts[0], "connection"),
	}
	for _, n := range counts {
		s := shaped{rate: 10e6, keys: 1, flows: min(n, 32), still: n - min(n, 32), span: span}
		l.rows = append(l.rows, row{name: counted(n, "connection"), start: startShaperd, task: s.task, measure: s.measure})
	}
	return l
}

// asnFiles are the published table, 515,000 ranges, as fetch.sh leaves it.
var asnFiles = []string{"asn-ipv4.csv", "asn-ipv6.csv"}

// withoutOverlap leaves out the one range of the published table of IPv4 that overlaps
// the next one, which shaperd refuses.
func withoutOverlap(table []byte) []byte {
	before, after, ok := bytes.Cut(table, []byte("\n214.95.0.0,"))
	if !ok {
		return table
	}
	_, after, _ = bytes.Cut(after, []byte("\n"))
	return slices.Concat(before, []byte("\n"), after)
}

// growingTable has limits by autonomous system, of the clients alone or of all there are.
func growingTable(short bool) load {
	span := 2 * time.Second
	if short {
		span = time.Second
	}
	start := func(files []string) func(context.Context, task) (*running, error) {
		return func(ctx context.Context, t task) (*running, error) {
			dir, err := lab.TempDir()
			if err != nil {
				return nil, err
			}
			var own strings.Builder
			for i := range sources {
				a := source(i)
				fmt.Fprintf(&own, "%v,%v,%d,client\n", a, a, 64512+i)
			}
			list := []string{filepath.Join(dir, "clients.csv")}
			err = os.WriteFile(list[0], []byte(own.String()), 0o644)
			for _, f := range files {
				text, fault := os.ReadFile(filepath.Join(t.bins.asn, f))
				list = append(list, filepath.Join(dir, f))
				err = errors.Join(err, fault, os.WriteFile(filepath.Join(dir, f), withoutOverlap(text), 0o644))
			}
			t.limits = "\n[asn]\nfiles = [\"" + strings.Join(list, "\", \"") + "\"]\n" +
				"\n[[limit]]\nname = \"asn\"\nkey = [\"asn\"]\nmax_connections = 1000\n"
			var r *running
			if err == nil {
				r, err = startShaperd(ctx, t)
			}
			if err != nil {
				os.RemoveAll(dir)
				return nil, err
			}
			r.undo = func() error { return os.RemoveAll(dir) }
			return r, nil
		}
	}
	few := fmt.Sprintf("%d ranges", sources)
	return load{
		name: "ranges of autonomous systems", about: "32 clients that connect, send 64 bytes, wait for their echo and close, under a limit by ASN. What a reload costs is measured without a load",
		headline: "cpu-connection", figures: []string{"connections", "p50", "p99", "cpu-connection", "cpu-reload", "memory"}, baseline: few,
		rows: []row{{name: few, start: start(nil)}, {name: "515,000 ranges", start: start(asnFiles)}},
		task: func(n *network, b binaries) task { return task{net: n, bins: b, conns: 32} },
		measure: func(ctx context.Context, n *network, r *running) (sample, error) {
			s, err := measureConnections(ctx, n, r, 32, span)
			if err != nil {
				return s, err
			}
			cost, err := r.reloadCost(ctx, 3)
			s.figures["cpu-reload"] = millis(cost)
			return s, err
		},
	}
}
