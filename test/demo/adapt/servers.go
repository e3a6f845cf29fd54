package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// server is what is to be protected.
type server struct {
	name, note string
	start      func(ctx context.Context, h *lab.Host, dir string) (running, error)
	load       func(ctx context.Context, h *lab.Host, dir string, sv running) (*answers, error)
}

// running is a server that runs.
type running struct {
	stop func() error
	bin  string // directory of PostgreSQL's programs
}

var servers = [...]server{
	{"locks", "a thread for each connection, which reads for 4 ms and spins for a lock that is held for 1 ms", startLocks, ask},
	{"postgresql", "pgbench -C, each transaction updates one of two rows", startPostgreSQL, pgbench},
	{"sqlite", "a thread for each connection, which writes to one SQLite database", startSQLite, ask},
}

// The server gets less of the processors than programs and clients, as if these had their own.
const niceness = 10

func nice(argv ...string) *exec.Cmd {
	return exec.Command("nice", append([]string{"-n", strconv.Itoa(niceness)}, argv...)...)
}

func startProcess(ctx context.Context, h *lab.Host, cmd *exec.Cmd) (running, error) {
	p, err := lab.StartProcess(h.Start, cmd)
	if err != nil {
		return running{}, err
	}
	if err := p.AwaitListening(ctx, h, inner, false); err != nil {
		p.Kill()
		return running{}, err
	}
	return running{stop: func() error { p.Kill(); return nil }}, nil
}

func startLocks(ctx context.Context, h *lab.Host, _ string) (running, error) {
	self, err := os.Executable()
	if err != nil {
		return running{}, err
	}
	return startProcess(ctx, h, nice(self, lockServerVerb, inner.String()))
}

//go:embed sqlite.py
var sqliteServer string

func startSQLite(ctx context.Context, h *lab.Host, dir string) (running, error) {
	return startProcess(ctx, h, nice("python3", "-c", sqliteServer, inner.Addr().String(), fmt.Sprint(inner.Port()), dir))
}

// startPostgreSQL starts a new PostgreSQL with a table of two rows.
func startPostgreSQL(ctx context.Context, h *lab.Host, _ string) (running, error) {
	s, err := lab.NewPostgreSQL(h, inner)
	if err == nil {
		if err = errors.Join(s.Start(), s.AwaitReady(ctx), unix.Setpriority(unix.PRIO_PROCESS, s.PID(), niceness)); err == nil {
			sql := "CREATE TABLE hot (id int PRIMARY KEY, v int); INSERT INTO hot VALUES (0, 0), (1, 0)"
			err = h.Run(filepath.Join(s.Bin, "psql"), "-q", "-h", inner.Addr().String(), "-p", fmt.Sprint(inner.Port()), "-U", "postgres", "-c", sql, "postgres")
		}
	}
	if err != nil && s != nil {
		return running{}, errors.Join(err, s.Close())
	}
	if err != nil {
		return running{}, err
	}
	return running{stop: s.Close, bin: s.Bin}, nil
}
