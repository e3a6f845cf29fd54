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

	"shaperd.dev/shaperd/shaper/config"
	"shaperd.dev/shaperd/test/lab"
	"shaperd.dev/shaperd/test/lab/plot"
)

// limitCounts are the numbers of limits that apply at once.
var limitCounts = []int{1, 4, 16, config.MaxLimits}

func counted(n int, noun string) string { return plot.Grouped(n) + " " + plural(n, noun) }

// matchingLimits returns n limits that match all connections, each with the given lines.
func matchingLimits(n int, lines string) string {
	var b strings.Builder
	for i := range n {
		key := []string{`"source"`, ``, `"port"`, `"source", "port"`}[i%4]
		fmt.Fprintf(&b, "\n[[limit]]\nname = \"l%d\"\nkey = [%s]\n%s\n", i, key, lines)
	}
	return b.String()
}

// limitRows returns a row for each count of limits with the given lines.
func limitRows(counts []int, lines string) (rows []row) {
	for _, n := range counts {
		rows = append(rows, row{
			name: counted(n, "limit"), start: startShaperd,
			task: func(net *lab.Row, b binaries) task {
				return task{net: net, bins: b, conns: 32, limits: matchingLimits(n, lines)}
			},
		})
	}
	return rows
}

// loadsW12 measures how the cost of shaperd grows with one quantity. Ratios are to the smallest.
func loadsW12(short bool) []load {
	counts, span := limitCounts, 2*time.Second
	if short {
		counts, span = []int{1, config.MaxLimits}, time.Second
	}
	const clients, conns = 32, 4
	first := counted(counts[0], "limit")
	list := []load{
		{
			name: "limits, connections", description: "32 clients that connect, send 64 bytes, wait for the echo and close; limits on connections and new connections, all of which match",
			headline: "connections", figures: []string{"connections", "p50", "p99", "cpu-connection", "memory"},
			rows: limitRows(counts, "max_connections = 100000\nnew_connections = \"1000000/s\""), baseline: first,
			measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
				return measureConnections(ctx, n, r, clients, 0, span)
			},
		},
		{
			name: "limits, bytes", description: "4 connections that send at full speed; rates, all of which match and are never reached",
			headline: "cpu", figures: []string{"throughput", "cpu", "user", "system", "memory"},
			rows: limitRows(counts, "rate = \"40GB/s\""), baseline: first,
			measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
				return measureThroughput(ctx, n, r, conns, 256<<10, span)
			},
		},
	}
	if !short {
		l := shaped{rate: 100e6, keys: 1, flows: conns, span: span}
		list = append(list, load{
			name: "limits, 100 MB/s", description: "4 connections of one source that send at full speed, under as many rates of 100 MB/s",
			headline: "cpu", figures: shapedFigures,
			rows: limitRows(counts, "rate = \"100MB/s\""), baseline: first, measure: l.measure,
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
		name: "keys", description: "in-process decisions over keys in random order", headline: "ns",
		figures: []string{"ns"}, programs: names(rows), baseline: rows[0].name,
		custom: func(ctx context.Context, _ *bench) (map[string][]sample, error) {
			t, err := benchmark(ctx, "./shaper", "^BenchmarkDecide$/^keys=[0-9]*[kM]?$", decideTime)
			if err != nil {
				return nil, err
			}
			return t.samples(rows)
		},
	}
}

// growingConnections shares one rate between more and more connections, 32 of which send.
func growingConnections(short bool) load {
	counts, span := []int{1, 100, 1000, 9000}, 2*time.Second
	if short {
		counts, span = []int{1, 100}, time.Second
	}
	l := load{
		name: "connections", description: "connections of one source that share a rate of 10 MB/s; 32 of them send at full speed, the others are idle",
		headline: "cpu", figures: shapedFigures, baseline: counted(counts[0], "connection"),
	}
	for _, n := range counts {
		s := shaped{rate: 10e6, keys: 1, flows: min(n, 32), idleConns: n - min(n, 32), span: span}
		l.rows = append(l.rows, row{name: counted(n, "connection"), start: startShaperd, task: s.task, measure: s.measure})
	}
	return l
}

// asnFiles are the published table, 515,000 ranges, as fetch.sh stores it.
var asnFiles = []string{"asn-ipv4.csv", "asn-ipv6.csv"}

// withoutOverlap removes the one range of the published IPv4 table that overlaps the next one, which shaperd rejects.
func withoutOverlap(table []byte) []byte {
	before, after, ok := bytes.Cut(table, []byte("\n214.95.0.0,"))
	if !ok {
		return table
	}
	_, after, _ = bytes.Cut(after, []byte("\n"))
	return slices.Concat(before, []byte("\n"), after)
}

// growingTable has a limit by autonomous system, with a table of the clients alone or of the whole internet.
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
				text, readErr := os.ReadFile(filepath.Join(t.bins.asn, f))
				list = append(list, filepath.Join(dir, f))
				err = errors.Join(err, readErr, os.WriteFile(filepath.Join(dir, f), withoutOverlap(text), 0o644))
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
			r.cleanup = func() error { return os.RemoveAll(dir) }
			return r, nil
		}
	}
	few := fmt.Sprintf("%d ranges", sources)
	return load{
		name: "ranges of autonomous systems", description: "32 clients that connect, send 64 bytes, wait for the echo and close, under a limit by ASN. The cost of a reload is measured without load",
		headline: "cpu-connection", figures: []string{"connections", "p50", "p99", "cpu-connection", "cpu-reload", "memory"}, baseline: few,
		rows: []row{{name: few, start: start(nil)}, {name: "515,000 ranges", start: start(asnFiles)}},
		task: func(n *lab.Row, b binaries) task { return task{net: n, bins: b, conns: 32} },
		measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
			s, err := measureConnections(ctx, n, r, 32, 0, span)
			if err != nil {
				return s, err
			}
			cost, err := r.reloadCost(ctx, 3)
			s.figures["cpu-reload"] = millis(cost)
			return s, err
		},
	}
}
