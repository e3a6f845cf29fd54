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

	"shaperd/test/lab"
)

// A shaped load is TCP under a rate.
type shaped struct {
	rate  int64 // of each source
	keys  int   // sources
	flows int   // busy connections of each
	still int   // connections of the first source beside them that do nothing
	pause time.Duration
	span  time.Duration // of what is measured

	reloads bool // while it is measured
	idle    int  // limits, or tables, beside
}

var shapedFigures = []string{
	"error", "sigma", "w1", "w10", "w100", "gap50", "gap99", "gapmax", "jain",
	"cpu", "user", "system", "softirq", "machine", "memory",
}

const settle = 500 * time.Millisecond // from the first byte to what is measured

func (l shaped) task(n *network, b binaries) task {
	return task{net: n, bins: b, rate: l.rate, keys: l.keys, flows: l.flows, conns: l.keys*l.flows + l.still, reloads: l.reloads, idle: l.idle}
}

// measure has one program shape the load.
func (l shaped) measure(ctx context.Context, n *network, r *running) (s sample, err error) {
	down, err := newSink(n.downstream, discard)
	if err != nil {
		return s, err
	}
	defer down.close()
	still, err := dialStreams(ctx, n.client, source(0), r.to, l.still)
	if err != nil {
		return s, err
	}
	defer closeAll(still)
	var busy []stream
	defer func() { closeAll(busy) }()
	for key := range l.keys {
		list, err := dialStreams(ctx, n.client, source(key), r.to, l.flows)
		busy = append(busy, list...)
		if err != nil {
			return s, err
		}
	}
	nominal := float64(l.rate) * float64(l.keys)
	frames := int(1.6*nominal*(2*settle+l.span).Seconds()/segment) + 50_000
	capture, err := n.downstream.Capture(downstreamLink, lab.Filter{Port: port, Incoming: true}, frames)
	if err != nil {
		return s, err
	}
	defer capture.Close()
	lead := settle
	if l.pause > 0 {
		lead = 0 // the end of the pause is what counts
		sendAll(busy, 2*settle, 64<<10)
		if err := n.quiet(ctx, l.pause); err != nil {
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
	memory := r.peak()
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
	s = judge(events, nominal)
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

// quiet waits until nothing has arrived for a time.
func (n *network) quiet(ctx context.Context, pause time.Duration) error {
	last, err := n.downstream.Received(downstreamLink)
	since := time.Now()
	for err == nil && time.Since(since) < pause {
		time.Sleep(10 * time.Millisecond)
		var now lab.Counters
		if now, err = n.downstream.Received(downstreamLink); now != last {
			last, since = now, time.Now()
		}
		err = errors.Join(err, ctx.Err())
	}
	return err
}

// judge turns arrivals at a nominal rate into figures.
func judge(events []lab.Event, nominal float64) sample {
	worst := func(width time.Duration) float64 {
		return float64(lab.WorstWindow(events, width)) / (nominal * width.Seconds())
	}
	gaps := lab.Gaps(events)
	ms := func(p float64) float64 { return lab.Percentile(gaps, p).Seconds() * 1000 }
	return sample{
		figures: map[string]float64{
			"error": 100 * (lab.Mean(events)/nominal - 1),
			"sigma": lab.Sigma(events, nominal) / 1000,
			"w1":    worst(time.Millisecond), "w10": worst(10 * time.Millisecond), "w100": worst(100 * time.Millisecond),
			"gap50": ms(50), "gap99": ms(99), "gapmax": ms(100),
		},
		series: newSeries(events, nominal, time.Millisecond, "bytes"),
	}
}

// newSeries bins at most the first two seconds of events.
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

// addCost adds what so many bytes of payload cost.
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

// jain is the fairness among connections, as the downstream's interface saw them: of
// what comes from a proxy nothing tells the source.
func jain(list []lab.Arrival, from, to time.Duration) float64 {
	got := map[netip.AddrPort]float64{}
	for _, a := range list {
		if a.At >= from && a.At < to {
			got[a.From] += float64(a.Payload)
		}
	}
	return lab.Jain(slices.Collect(maps.Values(got)))
}
