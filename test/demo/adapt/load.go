package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/test/lab"
)

const (
	clients = 64
	inTime  = 2 * time.Second // for an answer, from when a client connects
	warm    = 0.25            // part of the load that does not count
)

// answers are what clients got, but for those of the time in which a limit is found.
type answers struct {
	times  []time.Duration // of each answer
	failed int
	sample error // one of them
	length time.Duration
}

// outcome is what a program has made of a server.
type outcome struct {
	*answers
	program program
	adapted string // how shaperd's limit was found
}

// good is how many answers a second came in time.
func (a *answers) good() float64 {
	n := 0
	for _, t := range a.times {
		if t <= inTime {
			n++
		}
	}
	return float64(n) / a.length.Seconds()
}

func (a *answers) percentile(p float64) time.Duration {
	if len(a.times) == 0 {
		return 0
	}
	slices.Sort(a.times)
	return lab.Percentile(a.times, p)
}

// run runs a program in front of a new server, under load.
func run(ctx context.Context, b lab.Binaries, sv *server, p program, length time.Duration) (o *outcome, err error) {
	row, err := lab.NewPath(outer, inner)
	if err != nil {
		return nil, err
	}
	defer row.Remove()
	dir, err := lab.TempDir()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lab.RemoveDir(dir)) }()
	server, err := sv.start(ctx, row.Downstream, dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.stop()) }()
	g, err := p.start(ctx, b, row.Middle)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.stop()) }()
	working, end := context.WithTimeout(ctx, length)
	defer end()
	a, err := sv.load(working, row.Client, dir, server)
	if err != nil {
		return nil, err
	}
	o = &outcome{answers: a, program: p}
	if g.limit != nil {
		limit, err := g.limit()
		if err != nil {
			return nil, err
		}
		o.adapted = fmt.Sprintf("adapted to %d at %.0f answers a second", limit.Connections, limit.Throughput)
		for _, c := range limit.Changes {
			o.adapted += fmt.Sprintf("; %d to %d as %s", c.From, c.To, api.AdaptiveReasons[c.Reason])
		}
	}
	return o, ctx.Err()
}

// ask has clients ask one question after the other, each on a new connection, until ctx ends.
func ask(ctx context.Context, h *lab.Host, _ string, _ running) (*answers, error) {
	var a answers
	var mu sync.Mutex
	var group sync.WaitGroup
	deadline, _ := ctx.Deadline()
	from := time.Now().Add(time.Duration(warm * float64(time.Until(deadline))))
	for range clients {
		group.Go(func() {
			for time.Now().Before(deadline) {
				start := time.Now()
				err := h.Ask(ctx, outer)
				took := time.Since(start)
				mu.Lock()
				switch {
				case ctx.Err() != nil || start.Before(from) || start.Add(took).After(deadline):
				case err != nil:
					a.failed++
					a.sample = err
				default:
					a.times = append(a.times, took)
				}
				mu.Unlock()
			}
		})
	}
	group.Wait()
	a.length = deadline.Sub(from)
	return &a, nil
}

// pgbench has pgbench make a connection for each transaction, until ctx ends. Each client has a thread: with several, one
// that waits for a slot would keep the others from ending their transactions.
func pgbench(ctx context.Context, h *lab.Host, dir string, sv running) (*answers, error) {
	script, log := filepath.Join(dir, "script"), filepath.Join(dir, "log")
	if err := os.WriteFile(script, []byte("\\set id random(0, 1)\nUPDATE hot SET v = v + 1 WHERE id = :id;\n"), 0o644); err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	length := time.Until(deadline).Truncate(time.Second)
	begun := time.Now()
	cmd := exec.Command(filepath.Join(sv.bin, "pgbench"), "-C", "-n", "-f", script, "-c", strconv.Itoa(clients), "-j", strconv.Itoa(clients), "-T", strconv.Itoa(int(length.Seconds())),
		"-l", "--log-prefix", log, "-h", outer.Addr().String(), "-p", strconv.Itoa(int(outer.Port())), "-U", "postgres", "postgres")
	p, err := lab.StartProcess(h.Start, cmd)
	if err != nil {
		return nil, err
	}
	select {
	case <-p.Exited():
	case <-time.After(length + time.Minute):
		p.Kill()
		return nil, p.Errorf("pgbench does not end")
	}
	files, err := filepath.Glob(log + ".*")
	if err != nil || len(files) == 0 {
		return nil, p.Errorf("pgbench has written no log")
	}
	skip := time.Duration(warm * float64(length))
	a := &answers{length: length - skip}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) { // client, transaction, us, script, s, us
			var at, us int64
			var rest int
			var took int64
			if n, _ := fmt.Sscan(line, &rest, &rest, &took, &rest, &at, &us); n != 6 {
				return nil, fmt.Errorf("pgbench: log line %q", line)
			}
			if end := time.Unix(at, us*1000); end.After(begun.Add(skip)) && end.Before(begun.Add(length)) {
				a.times = append(a.times, time.Duration(took)*time.Microsecond)
			}
		}
	}
	return a, nil
}
