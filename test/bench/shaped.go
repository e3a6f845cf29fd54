package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// A shaped load is TCP traffic under a rate limit.
type shaped struct {
	rate      int64 // per source
	keys      int   // sources
	flows     int   // busy connections per source
	idleConns int   // additional idle connections of the first source
	pause     time.Duration
	span      time.Duration // duration of the measurement

	reloads    bool // whether the program is reloaded during the measurement
	idleLimits int  // additional limits, or tables, that match nothing
}

var shapedFigures = []string{
	"error", "sigma", "w1", "w10", "w100", "gap50", "gap99", "gapmax", "jain",
	"cpu", "user", "system", "softirq", "machine", "memory",
}

const settle = 500 * time.Millisecond // time from the first byte to the measurement

func (l shaped) task(n *lab.Row, b binaries) task {
	return task{net: n, bins: b, rate: l.rate, keys: l.keys, flows: l.flows, conns: l.keys*l.flows + l.idleConns, reloads: l.reloads, idleLimits: l.idleLimits}
}

// measure runs the load against one program.
func (l shaped) measure(ctx context.Context, n *lab.Row, r *running) (s sample, err error) {
	down, err := newSink(n.Downstream, discard)
	if err != nil {
		return s, err
	}
	defer down.close()
	idle, err := dialStreams(ctx, n.Client, source(0), r.to, l.idleConns)
	if err != nil {
		return s, err
	}
	defer closeAll(idle)
	var busy []stream
	defer func() { closeAll(busy) }()
	for key := range l.keys {
		list, err := dialStreams(ctx, n.Client, source(key), r.to, l.flows)
		busy = append(busy, list...)
		if err != nil {
			return s, err
		}
	}
	nominal := float64(l.rate) * float64(l.keys)
	frames := int(1.6*nominal*(2*settle+l.span).Seconds()/segment) + 50_000
	capture, err := n.Downstream.Capture(lab.DownstreamLink, lab.Filter{Port: port, Incoming: true}, frames)
	if err != nil {
		return s, err
	}
	defer capture.Close()
	lead := settle
	if l.pause > 0 {
		lead = 0 // the measurement starts at the end of the pause
		sendAll(busy, 2*settle, 64<<10)
		if err := awaitQuiet(ctx, n, l.pause); err != nil {
			return s, err
		}
	}
	from := capture.Elapsed() + lead
	var sent sync.WaitGroup
	cut := 0
	sent.Go(func() { cut = sendAll(busy, lead+l.span, 64<<10) })
	time.Sleep(lead)
	before, err := r.begin()
	stop := func() float64 { return 0 }
	if l.reloads {
		stop = r.keepReloading(ctx)
	}
	sent.Wait()
	reloads := stop()
	cost, err2 := r.end(before)
	to := capture.Elapsed()
	memory := r.peakMemory()
	closeAll(busy)
	if err := errors.Join(err, err2); err != nil {
		return s, err
	}
	list, err := capture.Finish()
	if err != nil {
		return s, err
	}
	events := lab.Between(lab.Bytes(list), from, to)
	if len(events) < 10 {
		return s, fmt.Errorf("only %d segments arrived", len(events))
	}
	s = evaluate(events, nominal)
	s.addCost(r, cost, float64(lab.Total(events)))
	s.addMemory(memory)
	if l.reloads {
		s.figures["reloads"], s.figures["cut"] = reloads, float64(cut)
	}
	if len(busy) > 1 {
		s.figures["jain"] = jain(list, from, to)
	}
	return s, nil
}

// awaitQuiet waits until nothing has arrived for the time pause.
func awaitQuiet(ctx context.Context, n *lab.Row, pause time.Duration) error {
	last, err := n.Downstream.Received(lab.DownstreamLink)
	since := time.Now()
	for err == nil && time.Since(since) < pause {
		time.Sleep(10 * time.Millisecond)
		var now lab.Counters
		if now, err = n.Downstream.Received(lab.DownstreamLink); now != last {
			last, since = now, time.Now()
		}
		err = errors.Join(err, ctx.Err())
	}
	return err
}

// evaluate computes the figures of arrivals at a nominal rate.
func evaluate(events []lab.Event, nominal float64) sample {
	worst := func(width time.Duration) float64 {
		return float64(lab.WorstWindow(events, width)) / (nominal * width.Seconds())
	}
	gaps := lab.Gaps(events)
	ms := func(p float64) float64 { return lab.Percentile(gaps, p).Seconds() * 1000 }
	return sample{
		figures: map[string]float64{
			"error": 100 * (lab.MeanRate(events)/nominal - 1),
			"sigma": lab.Sigma(events, nominal) / 1000,
			"w1":    worst(time.Millisecond), "w10": worst(10 * time.Millisecond), "w100": worst(100 * time.Millisecond),
			"gap50": ms(50), "gap99": ms(99), "gapmax": ms(100),
		},
		series: newSeries(events, nominal, time.Millisecond, "bytes"),
	}
}

// newSeries bins the first 2000 bins of events.
func newSeries(events []lab.Event, nominal float64, bin time.Duration, unit string) *series {
	s := &series{BinMillis: bin.Seconds() * 1000, Nominal: nominal * bin.Seconds(), Unit: unit}
	for _, e := range events {
		i := int((e.At - events[0].At) / bin)
		if i >= 2000 {
			break
		}
		for len(s.Bins) <= i {
			s.Bins = append(s.Bins, 0)
		}
		s.Bins[i] += e.N
	}
	return s
}

// addCost adds the CPU figures for the given number of payload bytes.
func (s sample) addCost(r *running, u usage, bytes float64) {
	each := func(d time.Duration) float64 { return d.Seconds() / bytes * 1e9 }
	if r.process != nil {
		s.figures["cpu"], s.figures["user"], s.figures["system"] = each(u.user+u.system), each(u.user), each(u.system)
	}
	s.figures["softirq"], s.figures["machine"] = each(u.softirq), each(u.machine)
}

func (s sample) addMemory(bytes float64) {
	if bytes > 0 {
		s.figures["memory"] = bytes / 1e6
	}
}

// jain returns the fairness among connections at the downstream's interface. Behind a
// proxy the sources cannot be distinguished.
func jain(list []lab.Arrival, from, to time.Duration) float64 {
	got := map[netip.AddrPort]float64{}
	for _, a := range list {
		if a.At >= from && a.At < to {
			got[a.From] += float64(a.Payload)
		}
	}
	return lab.Jain(slices.Collect(maps.Values(got)))
}
