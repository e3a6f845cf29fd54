package main

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"time"

	"shaperd/test/lab"
)

// The course of a phase.
const (
	greedyStart = 1500 * time.Millisecond // until then the polite sources are alone
	window      = 10 * time.Millisecond   // of the pictures and of the worst burst

	framesPerSecond = 30_000 // at the downstream's interface, at most
)

// A phase is the same work, once without and once with the daemon.
type phase struct {
	title    string
	shaped   bool
	length   time.Duration
	tallies  [len(sources)]*tally
	fragile  *downstream
	greedyAt time.Duration // when it started, as arrivals have it
	result   result
}

// result is what a phase left behind.
type result struct {
	arrivals []lab.Arrival
	losses   losses
	refusals []refusal // of the daemon
}

func newPhase(title string, shaped bool, length time.Duration) *phase {
	p := &phase{title: title, shaped: shaped, length: length}
	for i := range p.tallies {
		p.tallies[i] = &tally{}
	}
	return p
}

// run builds the hosts, does the work and takes all down again. It calls watch when
// the work begins, with a context that ends with the work.
func (p *phase) run(ctx context.Context, binary string, watch func(context.Context)) (err error) {
	n, err := newNetwork()
	if err != nil {
		return err
	}
	defer n.remove()
	if p.fragile, err = newDownstream(n.downstream); err != nil {
		return err
	}
	defer p.fragile.close()
	var d *daemon
	to := netip.AddrPortFrom(downstreamAddr, port)
	if p.shaped {
		if d, err = startDaemon(ctx, n.shaper, binary); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, d.stop()) }()
		to = netip.AddrPortFrom(proxyAddr, port)
	} else if err := n.shaper.Sysctl("net/ipv4/ip_forward", "1"); err != nil {
		return err
	}
	capture, err := n.downstream.Capture(downstreamLink, lab.Filter{Port: port}, int(p.length.Seconds()*framesPerSecond))
	if err != nil {
		return err
	}
	defer capture.Close()
	p.work(ctx, n.client, to, capture, watch)
	if p.result.arrivals, err = capture.Finish(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if d != nil {
		if p.result.refusals, err = d.refusals(); err != nil {
			return err
		}
	}
	p.result.losses, err = p.fragile.losses()
	return err
}

// work has the three sources send. The greedy one comes later and goes on until
// the polite ones have their last answers.
func (p *phase) work(ctx context.Context, client *lab.Host, to netip.AddrPort, capture *lab.Capture, watch func(context.Context)) {
	working, end := context.WithCancel(ctx)
	var polite, others sync.WaitGroup
	deadline := time.Now().Add(p.length)
	others.Go(func() { watch(working) })
	for i, s := range sources {
		sender := sender{source: s, host: client, to: to, tally: p.tallies[i]}
		if i != greedy {
			polite.Go(func() {
				pause(working, time.Duration(i)*politePause/2) // not in step
				sender.beOrderly(working, deadline)
			})
			continue
		}
		others.Go(func() {
			pause(working, greedyStart)
			p.greedyAt = capture.Elapsed()
			sender.beGreedy(working)
		})
	}
	polite.Wait()
	end()
	others.Wait()
}
