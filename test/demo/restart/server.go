package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
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

// server is a PostgreSQL on a host, with an account that needs no password.
type server struct {
	host *lab.Host
	dir  string
	bin  string
	at   netip.AddrPort
	as   *syscall.Credential
	*lab.Process
}

func newServer(h *lab.Host, at netip.AddrPort) (s *server, err error) {
	installed, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	if len(installed) == 0 {
		return nil, errors.New("PostgreSQL is not installed")
	}
	account, err := user.Lookup("postgres")
	if err != nil {
		return nil, err
	}
	uid, _ := strconv.ParseUint(account.Uid, 10, 32)
	gid, _ := strconv.ParseUint(account.Gid, 10, 32)
	s = &server{host: h, bin: installed[len(installed)-1], at: at, as: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	if s.dir, err = lab.TempDir(); err != nil {
		return nil, err
	}
	if err = errors.Join(os.Chmod(s.dir, 0o711), os.Mkdir(s.data(), 0o700), os.Chown(s.data(), int(uid), int(gid))); err != nil {
		return s, err
	}
	cmd := s.command("initdb", "-D", s.data(), "-U", "postgres", "-A", "trust", "-N", "--no-instructions")
	if out, err := cmd.CombinedOutput(); err != nil {
		return s, fmt.Errorf("initdb: %w\n%s", err, out)
	}
	access := "host all all 0.0.0.0/0 trust\n"
	return s, os.WriteFile(filepath.Join(s.data(), "pg_hba.conf"), []byte(access), 0o600)
}

func (s *server) data() string { return filepath.Join(s.dir, "data") }

func (s *server) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin, name), args...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.as}
	return cmd
}

// start starts the server. Those who connect before it has recovered are told to come later.
func (s *server) start() error {
	cmd := s.command("postgres", "-D", s.data(), "-c", "listen_addresses="+s.at.Addr().String(), "-p", fmt.Sprint(s.at.Port()),
		"-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "max_connections=300", "-c", "shared_buffers=32MB", "-c", "log_min_messages=panic")
	p, err := lab.StartProcess(s.host.Start, cmd)
	s.Process = p
	return err
}

// awaitReady waits until the server serves.
func (s *server) awaitReady(ctx context.Context) error {
	for deadline := time.Now().Add(30 * time.Second); ; {
		if err := s.host.Run(filepath.Join(s.bin, "pg_isready"), "-q", "-h", s.at.Addr().String(), "-p", fmt.Sprint(s.at.Port())); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.Exited():
			return s.Errorf("it has ended")
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return s.Errorf("it does not serve")
		}
	}
}

// kill ends the server at once. Its other processes notice and end, too.
func (s *server) kill() { s.Kill() }

func (s *server) close() error {
	if s.Process != nil {
		_ = s.Signal(unix.SIGQUIT)
		if s.AwaitExit(10*time.Second) != nil {
			s.Kill()
		}
	}
	return lab.RemoveDir(s.dir)
}
