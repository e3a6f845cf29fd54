package control

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/control/internal/fakes"
)

// helpers are commands of the test binary, which runs them as other users. They read their
// arguments from stdin, and write results to stdout.
var helpers = map[string]func() error{"ask": askAll, "serve": serveForOthers, "crowd": holdMany, "flood": flood}

// identity is the credentials of a process.
type identity struct {
	uid, gid uint32
	groups   []uint32
}

// command returns a helper that runs as u.
func (u identity) command(t *testing.T, helper string, what any) *exec.Cmd {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("requires root, to change users")
	}
	stdin, err := json.Marshal(what)
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command("/proc/self/exe") // the user may have no access to its folder
	c.Env = []string{"SHAPERD_TEST_HELPER=" + helper, "GORACE=atexit_sleep_ms=0"}
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: u.uid, Gid: u.gid, Groups: u.groups}}
	c.Stdin, c.Stderr = bytes.NewReader(stdin), os.Stderr
	return c
}

// start starts c, and waits until it reports that it is ready. It ends with the test.
func start(t *testing.T, c *exec.Cmd) {
	t.Helper()
	stdin := c.Stdin
	c.Stdin = nil
	to, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	from, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		to.Close()
		if err := c.Wait(); err != nil {
			t.Error(err)
		}
	})
	if _, err := io.Copy(to, io.MultiReader(stdin, strings.NewReader("\n"))); err != nil {
		t.Fatal(err)
	}
	if _, err := from.Read(make([]byte, 1)); err != nil {
		t.Fatal("it did not get ready")
	}
}

// request is an argument of "ask".
type request struct{ Socket, Method, Target, Body string }

// ask sends requests as u, and returns the status codes; 0 if connecting is denied.
func (u identity) ask(t *testing.T, all []request) []int {
	t.Helper()
	out, err := u.command(t, "ask", all).Output()
	if err != nil {
		t.Fatal(err)
	}
	var codes []int
	if err := json.Unmarshal(out, &codes); err != nil {
		t.Fatal(err)
	}
	return codes
}

func askAll() error {
	var all []request
	if err := json.NewDecoder(os.Stdin).Decode(&all); err != nil {
		return err
	}
	codes := []int{}
	for _, r := range all {
		code, err := r.code()
		if err != nil {
			return fmt.Errorf("%+v: %w", r, err)
		}
		codes = append(codes, code)
	}
	return json.NewEncoder(os.Stdout).Encode(codes)
}

// code sends the request, and returns the status code without waiting for the body.
func (r request) code() (code int, err error) {
	c, err := net.Dial("unix", r.Socket)
	if errors.Is(err, os.ErrPermission) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer c.Close()
	fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: shaperd\r\nContent-Length: %d\r\n\r\n%s", r.Method, r.Target, len(r.Body), r.Body)
	_, err = fmt.Fscanf(c, "HTTP/1.1 %d ", &code)
	return code, err
}

// serveArgs is the argument of "serve".
type serveArgs struct {
	Socket string
	Group  int
}

func serveForOthers() error {
	var p serveArgs
	if err := json.NewDecoder(os.Stdin).Decode(&p); err != nil {
		return err
	}
	// While this profile runs, requests for one fail at once.
	if err := pprof.StartCPUProfile(io.Discard); err != nil {
		return err
	}
	t := &testing.T{}
	o := options(t, fakes.Shaper(t, 2))
	socket, err := listenSocket(p.Socket, p.Group, o.Log)
	if err != nil {
		return err
	}
	s := serveAPI(socket, newServer(newAPI(o)))
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return s.Close()
}

// holdArgs is the argument of "crowd".
type holdArgs struct {
	Socket string
	N      int
}

// holdMany holds connections without sending on them.
func holdMany() error {
	var w holdArgs
	if err := json.NewDecoder(os.Stdin).Decode(&w); err != nil {
		return err
	}
	for range w.N {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if err := unix.Connect(fd, &unix.SockaddrUnix{Name: w.Socket}); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return nil
}

// floodArgs is the argument of "flood".
type floodArgs struct {
	Addr string
	N    int
}

// flood keeps N requests half open, and reopens closed ones.
func flood() error {
	var w floodArgs
	if err := json.NewDecoder(os.Stdin).Decode(&w); err != nil {
		return err
	}
	var all []net.Conn
	for i := 0; ; i++ {
		c, err := net.Dial("tcp", w.Addr)
		if err == nil {
			fmt.Fprint(c, "GET /metrics HTTP/1.1\r\nX: ")
			all = append(all, c)
		}
		if i == w.N {
			fmt.Println("ready")
			go func() { _, _ = io.Copy(io.Discard, os.Stdin); os.Exit(0) }()
		}
		if len(all) > w.N {
			all[0].Close()
			all = all[1:]
		}
	}
}

// socketPath returns a path for a socket in a new folder that all users may enter.
func socketPath(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "shaperd") // a socket's path is 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "control.sock")
}

// firstEvent returns the data of the first event of a stream.
func firstEvent(t *testing.T, r io.Reader) []byte {
	t.Helper()
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			t.Fatal(err)
		}
		if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
			return data
		}
	}
}

// connections returns the number of open connections.
func (s *Server) connections() int { return s.socket.limiter.open() }

// open returns the number of connections.
func (c *connLimiter) open() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conns := range c.users {
		n += conns.size()
	}
	return n
}
