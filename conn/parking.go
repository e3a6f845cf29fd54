// Owner: the loop's thread.

package conn

import (
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// parking lets a loop wait in the poller of the Go runtime. A thread that waits in a system call keeps its Go processor until the
// runtime's monitor takes it, and the monitor wakes up every 20 to 100 us until then: at 100 connections a second that took twice the
// processor time of the loop. In the poller, the processor is free at once, and the monitor sleeps.
//
// The runtime's epoll instance watches gate, and gate watches that of the loop: for events while the loop waits here, and for none
// otherwise, since a busy loop must not wake up threads of the runtime.
type parking struct {
	gate *os.File // an epoll instance
	fd   int      // of gate
	conn syscall.RawConn
	loop int // epoll instance of the loop
	poll func(uintptr) bool
}

// newParking returns a parking for an epoll instance. poll reports whether it has returned events.
func newParking(loop int, poll func() bool) (*parking, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create epoll: %w", err)
	}
	err = unix.SetNonblock(fd, true) // or the runtime does not watch it
	p := &parking{gate: os.NewFile(uintptr(fd), "epoll"), fd: fd, loop: loop, poll: func(uintptr) bool { return poll() }}
	if err == nil {
		err = p.gate.SetReadDeadline(time.Time{}) // fails if the runtime does not watch it
	}
	if err == nil {
		p.conn, err = p.gate.SyscallConn()
	}
	if err == nil {
		err = unix.EpollCtl(fd, unix.EPOLL_CTL_ADD, loop, &unix.EpollEvent{})
	}
	if err != nil {
		p.close()
		return nil, fmt.Errorf("watch epoll: %w", err)
	}
	return p, nil
}

// wait calls poll at once, and whenever there may be events, until it returns true or timeout has passed. It may end a millisecond late:
// the timers of the runtime are that coarse.
func (p *parking) wait(timeout time.Duration) {
	_ = p.gate.SetReadDeadline(time.Now().Add(timeout))
	p.watch(unix.EPOLLIN)
	_ = p.conn.Read(p.poll)
	p.watch(0)
}

func (p *parking) watch(events uint32) {
	_ = unix.EpollCtl(p.fd, unix.EPOLL_CTL_MOD, p.loop, &unix.EpollEvent{Events: events})
}

func (p *parking) close() { _ = p.gate.Close() }
