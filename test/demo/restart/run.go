package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

var (
	outer = netip.MustParseAddrPort("10.9.0.1:5432") // of the program
	inner = netip.MustParseAddrPort("10.9.1.2:5432") // of the server
)

const (
	clients      = 20
	transactions = 5 // of one pgbench
	upTime       = 1500 * time.Millisecond
)

// outcome is what was seen of one program.
type outcome struct {
	program *program
	failures
	transactions int
	restarts     []time.Duration // when the server served again
	arrivals     []time.Duration // of connections at the server
}

// failures are what clients have noticed.
type failures struct {
	refused   int // no connection, or the server was not ready
	cutBefore int // the server died while it greeted
	cutLater  int // it died during a transaction
	other     int
	sample    string // one of other
}

// runProgram kills the server, and starts it again, under load.
func runProgram(ctx context.Context, b lab.Binaries, p *program, kills int) (o *outcome, err error) {
	row, err := lab.NewPath(outer, inner)
	if err != nil {
		return nil, err
	}
	defer row.Remove()
	s, err := lab.NewPostgreSQL(row.Downstream, inner)
	if s != nil {
		defer func() { err = errors.Join(err, s.Close()) }()
	}
	if err != nil {
		return nil, err
	}
	if err := errors.Join(s.Start(), s.AwaitReady(ctx)); err != nil {
		return nil, err
	}
	g, err := p.start(ctx, b, row.Middle)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.stop()) }()
	script := filepath.Join(s.Dir, "script")
	if err := os.WriteFile(script, []byte("SELECT 1;\n"), 0o644); err != nil {
		return nil, err
	}
	seconds := kills*int((downTime+upTime+2*time.Second)/time.Second) + 10
	capture, err := row.Downstream.Capture(lab.DownstreamLink, lab.Filter{Port: inner.Port()}, seconds*20_000)
	if err != nil {
		return nil, err
	}
	defer capture.Close()
	o = &outcome{program: p}
	working, end := context.WithCancel(ctx)
	var mu sync.Mutex
	var group sync.WaitGroup
	for range clients {
		group.Go(func() {
			for working.Err() == nil {
				done, text := pgbench(working, row.Client, s.Bin, script)
				if working.Err() != nil {
					return
				}
				mu.Lock()
				o.transactions += done
				o.count(text)
				mu.Unlock()
			}
		})
	}
	for range kills {
		if err = o.cycle(ctx, s, g, capture); err != nil {
			break
		}
	}
	end()
	group.Wait()
	if err != nil {
		return nil, err
	}
	list, err := capture.Finish()
	if err != nil {
		return nil, err
	}
	for _, a := range list {
		if a.Outgoing && a.Flags&(lab.SYN|lab.ACK) == lab.SYN|lab.ACK {
			o.arrivals = append(o.arrivals, a.At)
		}
	}
	return o, nil
}

// cycle lets the server work for a while, kills it, and starts it again.
func (o *outcome) cycle(ctx context.Context, s *lab.PostgreSQL, g *gateway, c *lab.Capture) error {
	select {
	case <-time.After(upTime):
	case <-ctx.Done():
		return ctx.Err()
	case <-g.Exited():
		return g.Errorf("%s has ended", o.program.name)
	}
	if o.program.announced {
		if _, err := g.verb("hold", "db"); err != nil {
			return err
		}
		if err := g.awaitIdle(); err != nil {
			return err
		}
	}
	s.Kill() // its other processes notice, and end, too
	time.Sleep(downTime)
	if err := s.Start(); err != nil {
		return err
	}
	if err := s.AwaitReady(ctx); err != nil {
		return err
	}
	o.restarts = append(o.restarts, c.Elapsed())
	if o.program.announced {
		_, err := g.verb("resume", "db")
		return err
	}
	return nil
}

// awaitIdle waits until no connection of the listener that is held is in flight, as an operator would.
func (g *gateway) awaitIdle() error {
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		text, err := g.verb("downstreams", "--json")
		if err != nil {
			return err
		}
		var all []struct {
			InFlight int `json:"in_flight"`
		}
		if err := json.Unmarshal([]byte(text), &all); err != nil {
			return err
		}
		if len(all) == 1 && all[0].InFlight == 0 {
			return nil
		}
	}
	return errors.New("connections are still in flight 10 s after the hold has begun")
}

// pgbench runs some transactions of one client, and returns how many were done, and what it has said.
func pgbench(ctx context.Context, h *lab.Host, bin, script string) (done int, text string) {
	cmd := exec.Command(filepath.Join(bin, "pgbench"), "-C", "-n", "-f", script, "-c", "1", "-t", fmt.Sprint(transactions), "-h", outer.Addr().String(), "-p", fmt.Sprint(outer.Port()), "-U", "postgres", "postgres")
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	p, err := lab.StartProcess(h.Start, cmd)
	if err != nil {
		return 0, err.Error()
	}
	select {
	case <-p.Exited():
	case <-ctx.Done():
		p.Kill()
	}
	text = p.Log.String()
	if _, after, ok := strings.Cut(text, "number of transactions actually processed: "); ok {
		fmt.Sscanf(after, "%d", &done)
	}
	return done, text
}

// count adds what a pgbench has said of errors.
func (o *outcome) count(text string) {
	switch {
	case !strings.Contains(text, "pgbench: error"):
	case strings.Contains(text, "backend died while processing"), strings.Contains(text, "terminating connection"):
		o.cutLater++
	case strings.Contains(text, "server closed the connection unexpectedly"), strings.Contains(text, "Connection reset by peer"):
		o.cutBefore++
	case strings.Contains(text, "refused"), strings.Contains(text, "starting up"), strings.Contains(text, "timeout"), strings.Contains(text, "recovery"):
		o.refused++
	default:
		o.other++
		o.sample = text
	}
}
