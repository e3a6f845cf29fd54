package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// clients are processes of one connection each: a process that got some of its connections would wait for the others.
const clients = 100

// outcome is what was seen of one program.
type outcome struct {
	program program
	rate    float64 // transactions a second
	served  int     // clients that made a transaction
	most    int     // open at once
}

const (
	schema = `CREATE TABLE hot (id int PRIMARY KEY, v int); INSERT INTO hot VALUES (0, 0);
CREATE TABLE cold (id int PRIMARY KEY, v int); INSERT INTO cold SELECT i, 0 FROM generate_series(1, 10000) i`

	cold = `\set id random(1, 10000)
\set think random(50, 150)
\sleep :think ms
BEGIN;
SELECT pg_sleep(0.002);
UPDATE cold SET v = v + 1 WHERE id = :id;
END;
`
	hot = `\set think random(50, 150)
\sleep :think ms
BEGIN;
UPDATE hot SET v = v + 1 WHERE id = 0;
SELECT pg_sleep(0.002);
END;
`
)

// run runs a program in front of a new server, under load.
func run(ctx context.Context, b lab.Binaries, p program, length time.Duration) (o *outcome, err error) {
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
	scripts := []string{filepath.Join(dir, "cold"), filepath.Join(dir, "hot")}
	if err := errors.Join(os.WriteFile(scripts[0], []byte(cold), 0o600), os.WriteFile(scripts[1], []byte(hot), 0o600)); err != nil {
		return nil, err
	}
	s, err := lab.NewPostgreSQL(row.Downstream, server)
	if s != nil {
		defer func() { err = errors.Join(err, s.Close()) }()
	}
	if err == nil {
		err = errors.Join(s.Start(), s.AwaitReady(ctx))
	}
	if err != nil {
		return nil, err
	}
	if err := row.Downstream.Run(filepath.Join(s.Bin, "psql"), "-q", "-h", server.Addr().String(), "-p", strconv.Itoa(int(server.Port())), "-U", "postgres", "-c", schema, "postgres"); err != nil {
		return nil, err
	}
	r, err := startRelay(row.Downstream, inner, server)
	if err != nil {
		return nil, err
	}
	defer func() { _, _ = r.stop() }()
	stop, err := p.start(ctx, b, row.Middle)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	o = &outcome{program: p}
	err = load(row.Client, filepath.Join(s.Bin, "pgbench"), scripts, length, o)
	var broken error
	o.most, broken = r.stop()
	return o, errors.Join(err, broken, ctx.Err())
}

// load has clients make transactions. Those that do not get a connection are left out.
func load(h *lab.Host, pgbench string, scripts []string, length time.Duration, o *outcome) error {
	var group sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for range clients {
		group.Go(func() {
			cmd := exec.Command(pgbench, "-n", "-T", strconv.Itoa(int(length.Seconds())),
				"-f", scripts[0]+"@19", "-f", scripts[1]+"@1", "-h", outer.Addr().String(), "-p", strconv.Itoa(int(outer.Port())), "-U", "postgres", "postgres")
			var out strings.Builder
			cmd.Stdout = &out
			if err := h.Start(cmd); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
				return
			}
			tooLong := time.AfterFunc(length+5*time.Second, func() { _ = cmd.Process.Kill() })
			defer tooLong.Stop()
			if cmd.Wait() != nil {
				return
			}
			n, err := transactions(out.String())
			mu.Lock()
			defer mu.Unlock()
			if o.rate += float64(n) / length.Seconds(); n > 0 {
				o.served++
			}
			errs = append(errs, err)
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// transactions returns how many there were, as pgbench has printed. Its rate leaves out the wait for a connection.
func transactions(text string) (int, error) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, "number of transactions actually processed: "); ok {
			return strconv.Atoi(strings.TrimSpace(rest))
		}
	}
	return 0, fmt.Errorf("pgbench has printed no number of transactions:\n%s", text)
}
