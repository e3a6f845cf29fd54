package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"shaperd.dev/shaperd/shaper/config"
	"shaperd.dev/shaperd/test/lab"
)

// reloadPeriod is the interval between reloads under load.
const reloadPeriod = 100 * time.Millisecond

// keepReloading reloads the program periodically until stop is called, which returns the
// number of reloads per second.
func (r *running) keepReloading(ctx context.Context) (stop func() (perSecond float64)) {
	ctx, cancel := context.WithCancel(ctx)
	began, before := time.Now(), r.process.count(r.done)
	var group sync.WaitGroup
	group.Go(func() {
		tick := time.NewTicker(reloadPeriod)
		defer tick.Stop()
		for r.reload() == nil {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	return func() float64 {
		cancel()
		group.Wait()
		return float64(r.process.count(r.done)-before) / time.Since(began).Seconds()
	}
}

// reloadCost returns the mean CPU time of a reload, of the program and its child
// processes. Reloads run one after the other.
func (r *running) reloadCost(ctx context.Context, times int) (time.Duration, error) {
	before, err := readUsage(r.pid())
	if err != nil {
		return 0, err
	}
	for range times {
		done := r.process.count(r.done)
		if err := r.reload(); err != nil {
			return 0, err
		}
		if err := r.process.awaitOutput(ctx, r.done, done+1); err != nil {
			return 0, err
		}
		time.Sleep(reloadPeriod) // until the old processes are done
	}
	after, err := readUsage(r.pid())
	cost := after.sub(before)
	return (cost.user + cost.system) / time.Duration(times), err
}

func loadsW11(short bool) (list []load) {
	idle, span, times := []int{0, config.MaxLimits - 1}, 3*time.Second, 5
	if short {
		idle, span, times = idle[1:], time.Second, 2
	}
	programs := []string{subject, "haproxy", "nginx", "naive"}
	const about = "10 reloads a second of an unchanged configuration; "
	for _, n := range idle {
		name := "1 limit"
		if n > 0 {
			name = fmt.Sprintf("%d limits, or tables", n+1)
		}
		l := shaped{rate: 10e6, keys: 1, flows: 4, span: span, reloads: true, idleLimits: n}
		list = append(list, load{
			name: "10 MB/s, " + name, description: about + "4 connections of one source that send at full speed. The cost of a reload is measured without load",
			headline: "cpu-reload", programs: programs, repeat: 2,
			figures: []string{"cpu-reload", "reloads", "cut", "error", "sigma", "w100", "gapmax", "jain", "memory"},
			task:    l.task,
			measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
				cost, err := r.reloadCost(ctx, times)
				if err != nil {
					return sample{}, err
				}
				s, err := l.measure(ctx, n, r)
				if err == nil {
					s.figures["cpu-reload"] = millis(cost)
				}
				return s, err
			},
		})
	}
	const clients = 32
	return append(list, load{
		name: fmt.Sprintf("%d clients", clients), description: about + "clients that repeatedly connect, send 64 bytes, wait for the echo and close",
		headline: "failed", repeat: 2, figures: []string{"failed", "connections", "reloads", "p50", "p99", "memory"}, programs: programs,
		task: func(n *lab.Row, b binaries) task { return task{net: n, bins: b, conns: clients, reloads: true} },
		measure: func(ctx context.Context, n *lab.Row, r *running) (sample, error) {
			stop := r.keepReloading(ctx)
			s, err := measureConnections(ctx, n, r, clients, 0, span)
			reloads := stop()
			if err == nil && reloads == 0 {
				err = errors.New("no reload completed")
			}
			if err == nil {
				s.figures["reloads"] = reloads
			}
			return s, err
		},
	})
}
