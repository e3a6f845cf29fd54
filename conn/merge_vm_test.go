//go:build vmguest

package conn

import (
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// Ports and connections move to another loop even if the user may have no more registrations at epoll instances. In a guest, because the
// limit is of all processes.
func TestVMMerge_NoRegistrationLeft(t *testing.T) {
	to := serveEcho(t, shaper.TCP)
	r := newLoopsRig(t, 2, shaper.TCP, to)
	r.apply([]string{"a", "b"})
	r.wantGroups("[[a] [b]]")
	echo := func(c net.Conn) {
		t.Helper()
		must(t, c.SetDeadline(time.Now().Add(testTimeout)))
		_, err := c.Write([]byte("x"))
		must(t, err)
		_, err = io.ReadFull(c, make([]byte, 1))
		must(t, err)
	}
	dial := func(name string) net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", r.addr(name))
		must(t, err)
		t.Cleanup(func() { c.Close() })
		echo(c)
		return c
	}
	open := []net.Conn{dial("a"), dial("b")}
	restore := useUpRegistrations(t)
	r.apply([]string{"a", "b"}, shaper.Limit{Name: "x", Rate: 80e6, IPv4Prefix: 32, IPv6Prefix: 64})
	restore()
	r.wantGroups("[[a b]]")
	for _, c := range open {
		echo(c)
	}
	dial("a")
	dial("b")
}

// useUpRegistrations makes registrations at epoll instances fail until the result is called.
func useUpRegistrations(t *testing.T) (restore func()) {
	t.Helper()
	const limit = "/proc/sys/fs/epoll/max_user_watches"
	before, err := os.ReadFile(limit)
	must(t, err)
	must(t, os.WriteFile(limit, []byte("2000"), 0))
	var fds []int
	restore = func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
		must(t, os.WriteFile(limit, before, 0))
	}
	for range 60 {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		must(t, err)
		fds = append(fds, fd)
	}
	for events := fds; ; {
		epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
		must(t, err)
		fds = append(fds, epoll)
		for _, fd := range events {
			err := unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{})
			if err == unix.ENOSPC {
				return restore
			}
			must(t, err)
		}
	}
}
