package lab

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
)

// A PostgreSQL is a server on a host, with an account that needs no password.
type PostgreSQL struct {
	Dir, Bin string // of its data, and of its programs
	host     *Host
	at       netip.AddrPort
	as       *syscall.Credential
	*Process // once started
}

// NewPostgreSQL creates the data of a server that is to listen at an address of a host. If it returns one, it is to be
// closed, even with an error.
func NewPostgreSQL(h *Host, at netip.AddrPort) (s *PostgreSQL, err error) {
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
	s = &PostgreSQL{host: h, Bin: installed[len(installed)-1], at: at, as: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	if s.Dir, err = TempDir(); err != nil {
		return nil, err
	}
	if err = errors.Join(os.Chmod(s.Dir, 0o711), os.Mkdir(s.data(), 0o700), os.Chown(s.data(), int(uid), int(gid))); err != nil {
		return s, err
	}
	cmd := s.command("initdb", "-D", s.data(), "-U", "postgres", "-A", "trust", "-N", "--no-instructions")
	if out, err := cmd.CombinedOutput(); err != nil {
		return s, fmt.Errorf("initdb: %w\n%s", err, out)
	}
	access := "host all all 0.0.0.0/0 trust\n"
	return s, os.WriteFile(filepath.Join(s.data(), "pg_hba.conf"), []byte(access), 0o600)
}

func (s *PostgreSQL) data() string { return filepath.Join(s.Dir, "data") }

func (s *PostgreSQL) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.Bin, name), args...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.as}
	return cmd
}

// Start starts the server. Those who connect before it has recovered are told to come later.
func (s *PostgreSQL) Start() error {
	cmd := s.command("postgres", "-D", s.data(), "-c", "listen_addresses="+s.at.Addr().String(), "-p", fmt.Sprint(s.at.Port()),
		"-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "max_connections=300", "-c", "shared_buffers=32MB", "-c", "log_min_messages=panic")
	p, err := StartProcess(s.host.Start, cmd)
	s.Process = p
	return err
}

// AwaitReady waits until the server serves.
func (s *PostgreSQL) AwaitReady(ctx context.Context) error {
	for deadline := time.Now().Add(30 * time.Second); ; {
		if err := s.host.Run(filepath.Join(s.Bin, "pg_isready"), "-q", "-h", s.at.Addr().String(), "-p", fmt.Sprint(s.at.Port())); err == nil {
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

// Close ends the server, and removes its data.
func (s *PostgreSQL) Close() error {
	if s.Process != nil {
		_ = s.Signal(unix.SIGQUIT)
		if s.AwaitExit(10*time.Second) != nil {
			s.Kill()
		}
	}
	return RemoveDir(s.Dir)
}
