package main

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// The limit, and what the sources send, in bytes a second.
const (
	rate = 10_000_000

	usualSources = 2         // of each gateway, all the time
	usualRate    = rate / 10 // each

	hotSources     = 4 // at one gateway after the other
	hotConnections = 2 // each
	hotRate        = 25 * rate / 10 / (hotSources * hotConnections)
)

// leftByOthers is what the hot spot's gateway may have while the other two have what they send.
const leftByOthers = rate - (gateways-1)*usualSources*usualRate

// usual sends what the sources of all gateways send all the time, until ctx ends.
func (s *site) usual(ctx context.Context) {
	var group sync.WaitGroup
	for at := range gateways {
		for i := range usualSources {
			group.Go(func() { s.stream(ctx, usualSource(at, i), at, usualRate) })
		}
	}
	group.Wait()
}

// hot sends what the sources of the hot spot send through one gateway, until ctx ends.
func (s *site) hot(ctx context.Context, at int) {
	var group sync.WaitGroup
	for i := range hotSources * hotConnections {
		group.Go(func() { s.stream(ctx, hotSource(i%hotSources), at, hotRate) })
	}
	group.Wait()
}

// stream sends through a gateway at most so many bytes a second, until ctx ends.
func (s *site) stream(ctx context.Context, from netip.Addr, at, most int) {
	for ctx.Err() == nil {
		c, err := s.clients.Dial(ctx, from, atGateway(at), time.Second)
		if err == nil {
			err = send(ctx, c, most)
		}
		if err != nil {
			select { // a gateway that refuses is asked again
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
}

// sendBuffer bounds what waits at a source: a demand that has ended must not go on for long.
const sendBuffer = 32 << 10

// send writes until ctx ends, and resets the connection.
func send(ctx context.Context, c *net.TCPConn, most int) error {
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var errs [2]error
	if err := errors.Join(c.SetLinger(0), raw.Control(func(fd uintptr) {
		errs[0] = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, most)
		errs[1] = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer)
	})); err != nil {
		return err
	}
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	buf := make([]byte, 16<<10)
	for {
		if _, err := c.Write(buf); err != nil {
			return err
		}
	}
}

// A sink is a downstream that reads everything.
type sink struct {
	listener *net.TCPListener
	group    sync.WaitGroup

	mu   sync.Mutex
	open map[net.Conn]bool
}

func newSink(h *lab.Host) (*sink, error) {
	l, err := h.Listen(atDownstream)
	if err != nil {
		return nil, err
	}
	s := &sink{listener: l, open: map[net.Conn]bool{}}
	s.group.Go(s.accept)
	return s, nil
}

func (s *sink) accept() {
	for {
		c, err := s.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // the gateway has already gone
		}
		s.mu.Lock()
		s.open[c] = true
		s.mu.Unlock()
		s.group.Go(func() {
			buf := make([]byte, 128<<10)
			for err := error(nil); err == nil; _, err = c.Read(buf) {
			}
			c.Close()
			s.mu.Lock()
			delete(s.open, c)
			s.mu.Unlock()
		})
	}
}

func (s *sink) close() {
	s.listener.Close()
	s.mu.Lock()
	for c := range s.open {
		c.Close()
	}
	s.mu.Unlock()
	s.group.Wait()
}
