package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// proxies are the programs that forward TCP without a limit.
var proxies = []string{subject, "direct", "haproxy", "nginx", "toxiproxy", "redir", "naive"}

func loadsW4(short bool) (list []load) {
	type shape struct {
		conns, size int
		name        string
	}
	shapes := []shape{
		{1, 256 << 10, "messages of 256 KiB"},
		{4, 256 << 10, "messages of 256 KiB"},
		{64, 256 << 10, "messages of 256 KiB"},
		{1, 1 << 10, "messages of 1 KiB"},
		{4, 1 << 10, "messages of 1 KiB"},
		{64, 1 << 10, "messages of 1 KiB"},
	}
	span := 2 * time.Second
	programs := proxies
	if short {
		shapes, span, programs = shapes[1:2], time.Second, []string{subject, "direct", "haproxy", "nginx", "naive"}
	}
	for _, s := range shapes {
		list = append(list, load{
			name:        fmt.Sprintf("%d %s, %s", s.conns, plural(s.conns, "connection"), s.name),
			description: "connections that send at full speed", headline: "throughput",
			figures: []string{"throughput", "cpu", "user", "system", "softirq", "machine", "memory"}, programs: programs,
			task: func(n *lab.Row, b binaries) task { return task{net: n, bins: b, conns: s.conns} },
			measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
				return measureThroughput(ctx, n, r, s.conns, s.size, span)
			},
		})
	}
	return list
}

// headers is the number of bytes that an interface counts per segment in addition to the
// payload: Ethernet, IPv4 and TCP with timestamps.
const headers = 14 + 20 + 32

func measureThroughput(ctx context.Context, n *lab.Row, r *running, conns, size int, span time.Duration) (s sample, err error) {
	down, err := newSink(n.Downstream, discard)
	if err != nil {
		return s, err
	}
	defer down.close()
	busy, err := dialStreams(ctx, n.Client, source(0), r.to, conns)
	if err != nil {
		return s, err
	}
	defer func() { closeAll(busy) }()
	var sent sync.WaitGroup
	sent.Go(func() { sendAll(busy, settle+span, size) })
	time.Sleep(settle)
	c, err := measureTraffic(n, r, span)
	sent.Wait()
	if err != nil {
		return s, err
	}
	bytes := c.payload(headers)
	s.figures = map[string]float64{"throughput": 8 * bytes / 1e9 / c.seconds}
	s.addCost(r, c.cost, bytes)
	s.addMemory(r.peakMemory())
	return s, nil
}

// trafficStats is the traffic at the downstream's interface during a time, and its cost.
type trafficStats struct {
	lab.Counters
	seconds float64
	cost    usage
}

func (c trafficStats) payload(headers uint64) float64 { return float64(c.Bytes - headers*c.Packets) }

// measureTraffic measures the traffic that the downstream's interface receives during a
// time. A super-packet counts as one packet with one header.
func measureTraffic(n *lab.Row, r *running, span time.Duration) (c trafficStats, err error) {
	cost, err1 := r.begin()
	began := time.Now()
	before, err2 := n.Downstream.Received(lab.DownstreamLink)
	time.Sleep(span)
	after, err3 := n.Downstream.Received(lab.DownstreamLink)
	c.seconds = time.Since(began).Seconds()
	var err4 error
	c.cost, err4 = r.end(cost)
	c.Packets, c.Bytes = after.Packets-before.Packets, after.Bytes-before.Bytes
	return c, errors.Join(err1, err2, err3, err4)
}

func loadsW5(short bool) (list []load) {
	clients, span, pause := []int{1, 32}, 3*time.Second, 10*time.Millisecond
	programs := []string{subject, "direct", "haproxy", "nginx", "toxiproxy", "redir", "naive"}
	if short {
		clients, span, programs = clients[1:], 1500*time.Millisecond, []string{subject, "direct", "haproxy", "nginx", "naive"}
	}
	for _, n := range clients {
		list = append(list, load{
			name:        fmt.Sprintf("%d %s", n, plural(n, "client")),
			description: "clients that repeatedly connect, send 64 bytes, wait for the echo and close", headline: "connections",
			figures: []string{"connections", "p50", "p99", "failed", "cpu-connection", "memory"}, programs: programs,
			task: func(net *lab.Row, b binaries) task { return task{net: net, bins: b, conns: n} },
			measure: func(ctx context.Context, net *lab.Row, r *running) (sample, error) {
				return measureConnections(ctx, net, r, n, 0, span)
			},
		})
	}
	return append(list, load{
		name:        "1 client, with pauses",
		description: fmt.Sprintf("the same, %v after one another", pause), headline: "cpu-connection",
		figures: []string{"connections", "p50", "p99", "failed", "cpu-connection", "memory"}, programs: programs,
		task: func(net *lab.Row, b binaries) task { return task{net: net, bins: b, conns: 1} },
		measure: func(ctx context.Context, net *lab.Row, r *running) (sample, error) {
			return measureConnections(ctx, net, r, 1, pause, 2*span)
		},
	})
}

func measureConnections(ctx context.Context, n *lab.Row, r *running, clients int, pause, span time.Duration) (s sample, err error) {
	down, err := newSink(n.Downstream, echo)
	if err != nil {
		return s, err
	}
	defer down.close()
	before, err := r.begin()
	if err != nil {
		return s, err
	}
	began := time.Now()
	took, failed := repeatExchange(ctx, n.Client, source(0), clients, pause, r.to, began.Add(span), 5*time.Second)
	seconds := time.Since(began).Seconds()
	cost, err := r.end(before)
	if err != nil {
		return s, err
	}
	if len(took) == 0 {
		return s, errors.New("no connection got a response")
	}
	s = sample{figures: map[string]float64{
		"connections": float64(len(took)) / seconds,
		"p50":         millis(lab.Percentile(took, 50)), "p99": millis(lab.Percentile(took, 99)),
		"failed": 100 * float64(failed) / float64(len(took)+failed),
	}}
	if r.process != nil {
		s.figures["cpu-connection"] = (cost.user + cost.system).Seconds() * 1e6 / float64(len(took))
	}
	s.addMemory(r.peakMemory())
	return s, nil
}

func millis(d time.Duration) float64 { return d.Seconds() * 1000 }

// repeatExchange makes connections from several clients, one after the other each, with a pause after each, until a
// time. It returns the sorted durations and the number of failures.
func repeatExchange(ctx context.Context, h *lab.Host, from netip.Addr, clients int, pause time.Duration, to netip.AddrPort, until time.Time, timeout time.Duration) ([]time.Duration, int) {
	var mu sync.Mutex
	var all []time.Duration
	var failed atomic.Int64
	var group sync.WaitGroup
	for range clients {
		group.Go(func() {
			var took []time.Duration
			for time.Now().Before(until) && ctx.Err() == nil {
				d, err := exchange(ctx, h, from, to, timeout)
				if err != nil {
					failed.Add(1)
					continue
				}
				took = append(took, d)
				time.Sleep(pause)
			}
			mu.Lock()
			all = append(all, took...)
			mu.Unlock()
		})
	}
	group.Wait()
	slices.Sort(all)
	return all, int(failed.Load())
}

const (
	slots       = 10
	serviceTime = 100 * time.Millisecond
	hogConns    = 200
)

func loadsW6(short bool) []load {
	span := 8 * time.Second
	if short {
		span = 3 * time.Second
	}
	return []load{{
		name:        "10 slots, 200 connections of a hog",
		description: "a server that takes 100 ms per connection and may have 10 at once; one source has 200 connections, another one makes single requests",
		headline:    "p50", figures: []string{"p50", "p99", "worst", "failed", "hog", "inflight"},
		programs: []string{subject, "haproxy", "nginx", "naive"},
		task:     func(n *lab.Row, b binaries) task { return task{net: n, bins: b, slots: slots, conns: hogConns + 10} },
		measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
			return measureHog(ctx, n, r, span)
		},
	}}
}

func measureHog(ctx context.Context, n *lab.Row, r *running, span time.Duration) (s sample, err error) {
	down, err := newSink(n.Downstream, func(c *net.TCPConn) {
		var buf [64]byte
		if _, err := io.ReadFull(c, buf[:]); err == nil {
			time.Sleep(serviceTime)
			_, _ = c.Write(buf[:])
		}
	})
	if err != nil {
		return s, err
	}
	defer down.close()
	capture, err := n.Downstream.Capture(lab.DownstreamLink, lab.Filter{Port: port}, 2_000_000)
	if err != nil {
		return s, err
	}
	defer capture.Close()
	const hog, polite = 0, 1
	until := time.Now().Add(span)
	var group sync.WaitGroup
	var greedy []time.Duration
	group.Go(func() {
		greedy, _ = repeatExchange(ctx, n.Client, source(hog), hogConns, 0, r.to, until, 30*time.Second)
	})
	time.Sleep(settle) // until its connections are open
	took, failed := repeatExchange(ctx, n.Client, source(polite), 1, 0, r.to, until, 30*time.Second)
	group.Wait()
	list, err := capture.Finish()
	if err != nil {
		return s, err
	}
	inFlight := 0
	for _, level := range lab.Levels(list) {
		inFlight = max(inFlight, level.N)
	}
	s = sample{figures: map[string]float64{
		"failed":   100 * float64(failed) / float64(max(1, len(took)+failed)),
		"hog":      float64(len(greedy)) / span.Seconds(),
		"inflight": float64(inFlight),
	}}
	if len(took) > 0 { // if all were refused, that is a result too
		s.figures["p50"], s.figures["p99"] = millis(lab.Percentile(took, 50)), millis(lab.Percentile(took, 99))
		s.figures["worst"] = millis(took[len(took)-1])
	}
	return s, nil
}

// loadsW9 opens idle connections.
func loadsW9(short bool) []load {
	conns := 8000
	if short {
		conns = 500
	}
	return []load{{
		name:        fmt.Sprintf("%d idle connections", conns),
		description: "connections that are idle after one message", headline: "per-connection", repeat: 1,
		figures: []string{"per-connection", "memory"}, programs: []string{subject, "haproxy", "nginx", "toxiproxy", "redir", "naive"},
		task: func(n *lab.Row, b binaries) task { return task{net: n, bins: b, conns: conns} },
		measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
			return measureIdle(ctx, n, r, conns)
		},
	}}
}

func measureIdle(ctx context.Context, n *lab.Row, r *running, conns int) (s sample, err error) {
	down, err := newSink(n.Downstream, echo)
	if err != nil {
		return s, err
	}
	defer down.close()
	empty := residentMemory(r.pid())
	var open []stream
	defer func() { closeAll(open) }()
	for len(open) < conns {
		list, err := dialStreams(ctx, n.Client, source(len(open)/100%sources), r.to, min(100, conns-len(open)))
		open = append(open, list...)
		if err != nil {
			return s, fmt.Errorf("after %d connections: %w", len(open), err)
		}
		for _, st := range list {
			var buf [64]byte
			_ = st.c.SetDeadline(time.Now().Add(5 * time.Second))
			if _, err := st.c.Write(buf[:]); err != nil {
				return s, err
			}
			if _, err := io.ReadFull(st.c, buf[:]); err != nil {
				return s, fmt.Errorf("connection %d of %d: %w", len(open), conns, err)
			}
		}
	}
	time.Sleep(time.Second)
	full := residentMemory(r.pid())
	return sample{figures: map[string]float64{
		"per-connection": (full - empty) / 1024 / float64(conns),
		"memory":         r.peakMemory() / 1e6,
	}}, nil
}
