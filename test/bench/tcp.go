package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// A sink serves TCP connections at the downstream.
type sink struct {
	listener *net.TCPListener
	group    sync.WaitGroup
	mu       sync.Mutex
	open     map[net.Conn]bool
}

// newSink calls serve for each connection, until close.
func newSink(h *lab.Host, serve func(*net.TCPConn)) (*sink, error) {
	l, err := h.Listen(atDownstream)
	if err != nil {
		return nil, err
	}
	s := &sink{listener: l, open: map[net.Conn]bool{}}
	s.group.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue
			}
			s.mu.Lock()
			s.open[c] = true
			s.mu.Unlock()
			s.group.Go(func() {
				serve(c)
				c.Close()
				s.mu.Lock()
				delete(s.open, c)
				s.mu.Unlock()
			})
		}
	})
	return s, nil
}

func (s *sink) close() {
	s.listener.Close()
	s.mu.Lock()
	for c := range s.open {
		_ = c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	s.mu.Unlock()
	s.group.Wait()
}

// discard reads and drops all data. With MSG_TRUNC the kernel does not copy it.
func discard(c *net.TCPConn) {
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	buf := make([]byte, 1) // the kernel does not write to it, so it may be shorter than the length passed
	_ = raw.Read(func(fd uintptr) bool {
		for {
			n, err := truncate(int(fd), buf, 1<<20)
			switch {
			case errors.Is(err, unix.EAGAIN):
				return false
			case errors.Is(err, unix.EINTR):
			case err != nil || n == 0:
				return true
			}
		}
	})
}

// echo sends back everything it receives, until the connection ends.
func echo(c *net.TCPConn) {
	buf := make([]byte, 4096)
	for {
		n, err := c.Read(buf)
		if err != nil {
			return
		}
		if _, err := c.Write(buf[:n]); err != nil {
			return
		}
	}
}

// A stream is a client connection that sends on demand.
type stream struct{ c *net.TCPConn }

// dialStreams opens n connections from a source.
func dialStreams(ctx context.Context, h *lab.Host, from netip.Addr, to netip.AddrPort, n int) ([]stream, error) {
	list := make([]stream, 0, n)
	for range n {
		c, err := h.Dial(ctx, from, to, 5*time.Second)
		if err != nil {
			closeAll(list)
			return nil, err
		}
		list = append(list, stream{c})
	}
	return list, nil
}

// closeAll resets connections, so that no buffered data is sent after a measurement.
func closeAll(list []stream) {
	for _, s := range list {
		_ = s.c.SetLinger(0)
		s.c.Close()
	}
}

var zeros = make([]byte, 256<<10)

// send writes messages of the given size at full speed, until a time. It returns false if
// the connection ended earlier.
func (s stream) send(until time.Time, size int) bool {
	_ = s.c.SetWriteDeadline(until)
	for time.Now().Before(until) {
		if _, err := s.c.Write(zeros[:size]); err != nil {
			return errors.Is(err, os.ErrDeadlineExceeded)
		}
	}
	return true
}

// sendAll sends on all streams, and returns how many connections ended early.
func sendAll(list []stream, span time.Duration, size int) (cut int) {
	until := time.Now().Add(span)
	var group sync.WaitGroup
	var ended atomic.Int32
	for _, s := range list {
		group.Go(func() {
			if !s.send(until, size) {
				ended.Add(1)
			}
		})
	}
	group.Wait()
	return int(ended.Load())
}

// exchange makes one connection, sends 64 bytes and waits for the echo.
func exchange(ctx context.Context, h *lab.Host, from netip.Addr, to netip.AddrPort, timeout time.Duration) (time.Duration, error) {
	began := time.Now()
	c, err := h.Dial(ctx, from, to, timeout)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	_ = c.SetDeadline(began.Add(timeout))
	if _, err := c.Write(zeros[:64]); err != nil {
		return 0, err
	}
	var buf [64]byte
	if _, err := io.ReadFull(c, buf[:]); err != nil {
		return 0, err
	}
	return time.Since(began), nil
}
