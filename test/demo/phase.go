package main

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// The timeline of a phase.
const (
	greedyStart = 1500 * time.Millisecond // the polite sources are alone before
	window      = 10 * time.Millisecond   // resolution of the charts and of the worst burst

	framesPerSecond = 30_000 // at the downstream's interface, at most
)

// A phase is one run of the work, without or with the daemon.
type phase struct {
	title      string
	shaped     bool
	length     time.Duration
	stats      [len(sources)]*sourceStats
	downstream *downstream
	greedyAt   time.Duration // start of the greedy source, in capture time
	result     result
}

// result is the raw measurements of a phase.
type result struct {
	arrivals []lab.Arrival
	losses   losses
	refusals []refusal // by the daemon
}

func newPhase(title string, shaped bool, length time.Duration) *phase {
	p := &phase{title: title, shaped: shaped, length: length}
	for i := range p.stats {
		p.stats[i] = &sourceStats{}
	}
	return p
}

// run creates the hosts, does the work and removes the hosts. It calls watch when the work
// starts, with a context that ends with the work, and the daemon if there is one.
func (p *phase) run(ctx context.Context, binary string, watch func(context.Context, *lab.Daemon)) (err error) {
	n, err := newNetwork()
	if err != nil {
		return err
	}
	defer n.Remove()
	if p.downstream, err = newDownstream(n.Downstream); err != nil {
		return err
	}
	defer p.downstream.close()
	var d *lab.Daemon
	to := netip.AddrPortFrom(downstreamAddr, port)
	if p.shaped {
		if d, err = startDaemon(ctx, n.Middle, binary); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, d.Stop(6*time.Second)) }()
		to = netip.AddrPortFrom(proxyAddr, port)
	} else if err := n.Middle.Sysctl("net/ipv4/ip_forward", "1"); err != nil {
		return err
	}
	capture, err := n.Downstream.Capture(lab.DownstreamLink, lab.Filter{Port: port}, int(p.length.Seconds()*framesPerSecond))
	if err != nil {
		return err
	}
	defer capture.Close()
	p.work(ctx, n.Client, to, capture, func(ctx context.Context) { watch(ctx, d) })
	if p.result.arrivals, err = capture.Finish(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if d != nil {
		metrics, err := d.Scrape()
		if err != nil {
			return err
		}
		p.result.refusals = parseRefusals(metrics)
	}
	p.result.losses, err = p.downstream.losses()
	return err
}

// work runs the three sources. The greedy one starts later and continues until the polite
// ones have their last responses.
func (p *phase) work(ctx context.Context, client *lab.Host, to netip.AddrPort, capture *lab.Capture, watch func(context.Context)) {
	working, end := context.WithCancel(ctx)
	var polite, others sync.WaitGroup
	deadline := time.Now().Add(p.length)
	others.Go(func() { watch(working) })
	for i, s := range sources {
		sender := sender{source: s, host: client, to: to, stats: p.stats[i]}
		if i != greedy {
			polite.Go(func() {
				pause(working, time.Duration(i)*politePause/2) // staggered
				sender.runPolite(working, deadline)
			})
			continue
		}
		others.Go(func() {
			pause(working, greedyStart)
			p.greedyAt = capture.Elapsed()
			sender.runGreedy(working)
		})
	}
	polite.Wait()
	end()
	others.Wait()
}
