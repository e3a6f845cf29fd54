package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// framesPerSecond is how many frames reach the downstream's interface, at most.
const framesPerSecond = 60_000

// A run is one program on the gateways, under the work and the faults.
type run struct {
	program *program
	phases  []phase
	site    *site
	store   *lab.Redis
	say     func(at time.Duration, what string)
}

func newRun(p *program, say func(at time.Duration, what string)) *run {
	r := &run{program: p, phases: phases[:], say: say}
	if !p.faults {
		r.phases = phases[:1]
	}
	return r
}

// end returns when the work and the measurement end.
func (r *run) end() time.Duration { return r.phases[len(r.phases)-1].end }

// do creates the hosts, does the work, removes the hosts, and returns what arrived at the
// downstream.
func (r *run) do(ctx context.Context, b binaries) (list []lab.Arrival, err error) {
	if r.site, err = newSite(); err != nil {
		return nil, err
	}
	defer r.site.star.Remove()
	down, err := newSink(r.site.downstream)
	if err != nil {
		return nil, err
	}
	defer down.close()
	if r.store, err = lab.StartRedis(ctx, r.site.store, atStore); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.store.Close()) }()
	working, end := context.WithCancel(ctx)
	defer end()
	for i := range gateways {
		p, startErr := r.program.start(ctx, b, r.site, i)
		if startErr != nil {
			return nil, fmt.Errorf("start %s on %s: %w", r.program.name, gatewayName(i), startErr)
		}
		defer func() { err = errors.Join(err, p.stop()) }()
		go func() {
			<-p.Exited()
			end()
		}()
	}
	capture, err := r.site.downstream.Capture(lab.StarLink, lab.Filter{Port: port, Incoming: true}, int((warmUp+r.end()).Seconds()*framesPerSecond))
	if err != nil {
		return nil, err
	}
	defer capture.Close()
	start := capture.Elapsed() + warmUp
	if err := r.work(working); err != nil {
		return nil, err
	}
	if list, err = capture.Finish(); err != nil {
		return nil, err
	}
	for i := range list {
		list[i].At -= start
	}
	return list, ctx.Err()
}

// work does the work of the run, with its faults.
func (r *run) work(ctx context.Context) error {
	start := time.Now().Add(warmUp)
	ctx, end := context.WithDeadline(ctx, start.Add(r.end()))
	defer end()
	var group sync.WaitGroup
	group.Go(func() { r.site.usual(ctx) })
	group.Go(func() {
		for t := -warmUp; ctx.Err() == nil; t += visit {
			stay, leave := context.WithDeadline(ctx, start.Add(t+visit))
			r.site.hot(stay, hotAt(t))
			leave()
		}
	})
	err := r.faults(ctx, start)
	if err != nil {
		end()
	}
	group.Wait()
	return err
}

// faults makes things fail, and works again, at their times.
func (r *run) faults(ctx context.Context, start time.Time) error {
	for _, f := range []struct {
		at   time.Duration
		what string
		do   func() error
	}{
		{killAt, "the store is killed", r.store.Close},
		{restartAt, "the store is back, and empty", func() (err error) {
			r.store, err = lab.StartRedis(ctx, r.site.store, atStore)
			return err
		}},
		{cutAt, gatewayName(cutOff) + " is cut off from the store and the other gateways", func() error { return r.site.cutOff(cutOff) }},
		{mendAt, gatewayName(cutOff) + " is connected again", func() error { return r.site.mend(cutOff) }},
	} {
		if f.at > r.end() {
			break
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Until(start.Add(f.at))):
		}
		if err := f.do(); err != nil {
			return fmt.Errorf("%s: %w", f.what, err)
		}
		r.say(f.at, f.what)
	}
	return nil
}
