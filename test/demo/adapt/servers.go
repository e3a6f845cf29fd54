package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// server is what is to be protected.
type server struct {
	name, note string
	start      func(ctx context.Context, h *lab.Host, dir string) (*lab.Process, error)
	load       func(ctx context.Context, h *lab.Host, dir string) (*answers, error)
}

var servers = [...]server{
	{"locks", "a thread for each connection, which reads for 4 ms and spins for a lock that is held for 1 ms", startLocks, ask},
	{"postgresql", "pgbench -C, each transaction updates one of two rows", startPostgreSQL, pgbench},
	{"sqlite", "a thread for each connection, which writes to one SQLite database", startSQLite, ask},
}

// The server gets less of the processors than programs and clients, as if these had their own.
func nice(argv ...string) *exec.Cmd {
	return exec.Command("nice", append([]string{"-n", "10"}, argv...)...)
}

func startProcess(ctx context.Context, h *lab.Host, cmd *exec.Cmd) (*lab.Process, error) {
	p, err := lab.StartProcess(h.Start, cmd)
	if err != nil {
		return nil, err
	}
	if err := p.AwaitListening(ctx, h, inner, false); err != nil {
		p.Kill()
		return nil, err
	}
	return p, nil
}

func startLocks(ctx context.Context, h *lab.Host, _ string) (*lab.Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return startProcess(ctx, h, nice(self, lockServerVerb, inner.String()))
}

//go:embed sqlite.py
var sqliteServer string

func startSQLite(ctx context.Context, h *lab.Host, dir string) (*lab.Process, error) {
	return startProcess(ctx, h, nice("python3", "-c", sqliteServer, inner.Addr().String(), fmt.Sprint(inner.Port()), dir))
}

func postgresBin() (string, error) {
	installed, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	if len(installed) == 0 {
		return "", errors.New("PostgreSQL is not installed")
	}
	return installed[len(installed)-1], nil
}

// startPostgreSQL starts a new PostgreSQL with an account that needs no password.
func startPostgreSQL(ctx context.Context, h *lab.Host, dir string) (*lab.Process, error) {
	bin, err := postgresBin()
	if err != nil {
		return nil, err
	}
	account, err := user.Lookup("postgres")
	if err != nil {
		return nil, err
	}
	uid, _ := strconv.ParseUint(account.Uid, 10, 32)
	gid, _ := strconv.ParseUint(account.Gid, 10, 32)
	as := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	data := filepath.Join(dir, "data")
	if err = errors.Join(os.Chmod(dir, 0o711), os.Mkdir(data, 0o700), os.Chown(data, int(uid), int(gid))); err != nil {
		return nil, err
	}
	command := func(name string, args ...string) *exec.Cmd {
		cmd := nice(append([]string{filepath.Join(bin, name)}, args...)...)
		cmd.Dir, cmd.SysProcAttr = "/", as
		return cmd
	}
	if out, err := command("initdb", "-D", data, "-U", "postgres", "-A", "trust", "-N", "--no-instructions").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w\n%s", err, out)
	}
	if err := os.WriteFile(filepath.Join(data, "pg_hba.conf"), []byte("host all all 0.0.0.0/0 trust\n"), 0o600); err != nil {
		return nil, err
	}
	p, err := startProcess(ctx, h, command("postgres", "-D", data, "-c", "listen_addresses="+inner.Addr().String(), "-p", fmt.Sprint(inner.Port()),
		"-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "max_connections=300", "-c", "shared_buffers=32MB", "-c", "log_min_messages=panic"))
	if err != nil {
		return nil, err
	}
	sql := "CREATE TABLE hot (id int PRIMARY KEY, v int); INSERT INTO hot VALUES (0, 0), (1, 0)"
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		err = h.Run(filepath.Join(bin, "psql"), "-q", "-h", inner.Addr().String(), "-p", fmt.Sprint(inner.Port()), "-U", "postgres", "-c", sql, "postgres")
		if err == nil || time.Now().After(deadline) || ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		_ = p.Signal(unix.SIGQUIT)
		p.Kill()
		return nil, err
	}
	return p, nil
}
