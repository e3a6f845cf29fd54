package main

import (
	"bufio"
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
	most    int     // in a transaction at once, as the server says
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
	inTransaction = `SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND state <> 'idle' AND pid <> pg_backend_pid()`
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
	s, err := lab.NewPostgreSQL(row.Downstream, inner)
	if s != nil {
		defer func() { err = errors.Join(err, s.Close()) }()
	}
	if err == nil {
		err = errors.Join(s.Start(), s.AwaitReady(ctx))
	}
	if err != nil {
		return nil, err
	}
	at := []string{"-h", inner.Addr().String(), "-p", strconv.Itoa(int(inner.Port())), "-U", "postgres"}
	psql := func(args ...string) []string { return append(append([]string{"-q", "-A", "-t"}, at...), args...) }
	if err := row.Downstream.Run(filepath.Join(s.Bin, "psql"), psql("-c", schema, "postgres")...); err != nil {
		return nil, err
	}
	stop, err := p.start(ctx, b, row.Middle)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	o = &outcome{program: p}
	stopWatching, err := watch(row.Downstream, exec.Command(filepath.Join(s.Bin, "psql"), psql("postgres")...), &o.most)
	if err != nil {
		return nil, err
	}
	err = load(row.Client, filepath.Join(s.Bin, "pgbench"), scripts, length, o)
	stopWatching()
	return o, errors.Join(err, ctx.Err())
}

// watch asks the server often how many are in a transaction, and keeps the most, until it is stopped.
func watch(h *lab.Host, cmd *exec.Cmd, most *int) (stop func(), err error) {
	cmd.Stdin = strings.NewReader(inTransaction + " \\watch 0.05\n")
	answers, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := h.Start(cmd); err != nil {
		return nil, err
	}
	done := make(chan bool)
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(answers); lines.Scan(); {
			if n, err := strconv.Atoi(lines.Text()); err == nil {
				*most = max(*most, n)
			}
		}
	}()
	return func() { _ = cmd.Process.Kill(); <-done; _ = cmd.Wait() }, nil
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
