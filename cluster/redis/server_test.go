package redis

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
)

// server is a process of redis-server or valkey-server that this test has started.
type server struct {
	t       testing.TB
	address string // TCP
	socket  string
	binary  string
	args    []string
	cmd     *exec.Cmd
	exited  chan struct{}
}

// binaries returns the servers to test with: those in the list SHAPERD_REDIS_SERVERS, or else redis-server.
func binaries() []string {
	if list := filepath.SplitList(os.Getenv("SHAPERD_REDIS_SERVERS")); len(list) > 0 {
		return list
	}
	return []string{"redis-server"}
}

// onServers runs a test with each server.
func onServers(t *testing.T, f func(t *testing.T, binary string)) {
	for _, binary := range binaries() {
		t.Run(filepath.Base(binary), func(t *testing.T) { f(t, binary) })
	}
}

// startServer starts a server that listens on a Unix socket, and on a TCP address unless the arguments have another.
func startServer(t testing.TB, binary string, args ...string) *server {
	t.Helper()
	dir, err := os.MkdirTemp("", "store")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &server{t: t, address: testutil.FreeAddr(t, "tcp"), socket: filepath.Join(dir, "s"), binary: binary}
	host, port, _ := net.SplitHostPort(s.address)
	s.args = []string{"--dir", dir, "--unixsocket", s.socket, "--bind", host, "--bind-source-addr", host, "--protected-mode", "no", "--save", "", "--appendonly", "no", "--daemonize", "no"}
	if !slices.Contains(args, "--port") && !slices.Contains(args, "--tls-port") {
		s.args = append(s.args, "--port", port)
	}
	for i, a := range args {
		args[i] = strings.ReplaceAll(strings.ReplaceAll(a, "DIR", dir), "PORT", port)
	}
	s.args = append(s.args, args...)
	s.start()
	t.Cleanup(s.kill)
	return s
}

func (s *server) start() {
	s.t.Helper()
	var out testutil.Buffer
	s.cmd = exec.Command(s.binary, s.args...)
	s.cmd.Stdout, s.cmd.Stderr = &out, &out
	s.cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		s.t.Fatalf("%v: install the package redis-server, or set SHAPERD_REDIS_SERVERS", err)
	}
	exited := make(chan struct{})
	s.exited = exited
	go func() {
		_ = s.cmd.Wait()
		close(exited)
	}()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if accepts("unix", s.socket) && accepts("tcp", s.address) { // which is first depends on the version
			return
		}
		select {
		case <-exited:
			s.t.Fatalf("%s has exited:\n%s", s.binary, &out)
		default:
		}
		if time.Now().After(end) {
			s.t.Fatalf("%s does not listen:\n%s", s.binary, &out)
		}
	}
}

func accepts(network, address string) bool {
	c, err := net.Dial(network, address)
	if err == nil {
		c.Close()
	}
	return err == nil
}

// kill ends the process as a crash would.
func (s *server) kill() {
	s.signal(unix.SIGKILL)
	<-s.exited
}

func (s *server) signal(sig unix.Signal) { _ = s.cmd.Process.Signal(sig) }

// admin returns a function that sends a command to the server, and fails if it is refused.
func (s *server) admin(t testing.TB) func(args ...string) any {
	t.Helper()
	c, err := new(target).dial(within(t, 20*time.Second), s.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	return func(args ...string) any {
		t.Helper()
		replies, err := c.do(within(t, 20*time.Second), args)
		if err != nil {
			t.Fatalf("%q: %v", args, err)
		}
		if e, refused := replies[0].(serverError); refused {
			t.Fatalf("%q: %v", args, e)
		}
		return replies[0]
	}
}

// within returns a context that ends after d, or with the test.
func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// soon is as long as a call may take here: far longer than by default, for busy machines that stall.
const soon = 2 * time.Second

// openStore returns a store with some options, in a group of the test's own.
func openStore(t testing.TB, o Options) *Store {
	o.Prefix, o.Group = "shaperd", "test"
	s := New(o)
	t.Cleanup(s.Close)
	return s
}

// commandStat returns the calls of a command on a server, and their time in microseconds.
func commandStat(admin func(...string) any, command string) (calls, us float64) {
	line := infoField(admin("INFO", "commandstats"), "cmdstat_"+command)
	_, _ = fmt.Sscanf(line, "calls=%f,usec=%f", &calls, &us)
	return calls, us
}
