package control

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/control/internal/fakes"
)

// Without descriptors the server waits for some, and uses no CPU time.
func TestServer_AcceptWithoutDescriptors(t *testing.T) {
	s := serveOn(t, options(t, fakes.Shaper(t, 1)), -1, nil)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	c := os.NewFile(uintptr(fd), "client")
	defer c.Close()
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	restore := func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
			t.Fatal(err)
		}
	}
	defer restore()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: s.socket.path}); err != nil {
		t.Fatal(err)
	}
	used := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	begun, before := time.Now(), used()
	time.Sleep(time.Second)
	if spent, took := used()-before, time.Since(begun); spent > took/3 {
		t.Errorf("it used %v of CPU time to wait %v", spent, took)
	}
	if n := s.connections(); n != 0 {
		t.Fatalf("there are %d connections", n)
	}
	restore()
	if _, err := io.WriteString(c, "GET /v1/status HTTP/1.0\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	a, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	a.Body.Close()
}

// failing is a listener that returns errors first.
type failing struct {
	net.Listener
	errs []error
}

func (f *failing) Accept() (net.Conn, error) {
	if len(f.errs) > 0 {
		err := f.errs[0]
		f.errs = f.errs[1:]
		return nil, &net.OpError{Op: "accept", Err: err}
	}
	return f.Listener.Accept()
}

func TestAccept_ContinuesAfterErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var e Endpoint
	e.serve(&failing{l, []error{syscall.ENOBUFS, syscall.EMFILE, syscall.ENOMEM}}, newServer(http.NotFoundHandler()))
	defer e.Close()
	defer http.DefaultClient.CloseIdleConnections()
	a, err := http.Get("http://" + l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a.Body.Close()
}
