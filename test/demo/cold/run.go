package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

const (
	clients    = 100
	retryAfter = 100 * time.Millisecond
	settled    = failsAfter + restartTime + coldTime // from then on a server that has not fallen again is warm
)

// outcome is what was seen of one program.
type outcome struct {
	program  *program
	falls    int
	answered int64 // in all
	late     int64 // of them, once the server could be warm
	failed   int64
	length   time.Duration
}

// run runs a program in front of a new server, under load.
func run(ctx context.Context, b lab.Binaries, p *program, length time.Duration) (o *outcome, err error) {
	row, err := lab.NewPath(outer, inner)
	if err != nil {
		return nil, err
	}
	defer row.Remove()
	s, err := newServer(row.Downstream)
	if err != nil {
		return nil, err
	}
	defer s.close()
	stop, err := p.start(ctx, b, row.Middle)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	working, end := context.WithTimeout(ctx, length)
	defer end()
	var answered, late, failed atomic.Int64
	begun := time.Now()
	fails := time.AfterFunc(failsAfter, s.fall)
	defer fails.Stop()
	var group sync.WaitGroup
	for range clients {
		group.Go(func() {
			for working.Err() == nil {
				switch err := row.Client.Ask(working, outer); {
				case working.Err() != nil:
				case err != nil:
					failed.Add(1)
					select {
					case <-working.Done():
					case <-time.After(retryAfter):
					}
				default:
					answered.Add(1)
					if time.Since(begun) > settled {
						late.Add(1)
					}
				}
			}
		})
	}
	group.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	return &outcome{p, s.falls, answered.Load(), late.Load(), failed.Load(), length}, ctx.Err()
}

func printTable(out io.Writer, list []*outcome) {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintf(w, "\tFELL\tANSWERED\tA SECOND, FROM %v ON\tFAILED\n", settled)
	for _, o := range list {
		fmt.Fprintf(w, "%s\t%d\t%d\t%.0f\t%d\n", o.program.name, o.falls, o.answered, float64(o.late)/(o.length-settled).Seconds(), o.failed)
	}
	w.Flush()
}

// check checks that behind shaperd the server does not fall again.
func check(out io.Writer, list []*outcome) (failed error) {
	for _, o := range list {
		if !o.program.ours {
			continue
		}
		verdict := "ok    "
		if o.falls > 1 {
			verdict, failed = "FAILED", errors.New("a check has failed")
		}
		fmt.Fprintf(out, "%s  %s: the server falls no second time\n", verdict, o.program.name)
	}
	return failed
}
