package netns

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// serveTCP calls handle for each connection to the address at inside the host, until the
// test ends, and then resets open connections.
func (h *host) serveTCP(t testing.TB, at netip.AddrPort, handle func(*net.TCPConn)) {
	t.Helper()
	l := h.listenTCP(t, at)
	var group sync.WaitGroup
	var mu sync.Mutex
	open := map[*net.TCPConn]bool{}
	group.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			mu.Lock()
			open[c] = true
			mu.Unlock()
			group.Go(func() {
				handle(c)
				mu.Lock()
				delete(open, c)
				mu.Unlock()
				c.Close()
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for c := range open {
			abort(c)
		}
		mu.Unlock()
		group.Wait()
	})
}

// abort resets the connection and drops unsent data.
func abort(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// A sink reads connections to their end. The first byte of each is its tag, because
// behind the proxy a connection's address does not identify its source.
type sink struct {
	mu       sync.Mutex
	conns    []*sinkConn
	readLock sync.RWMutex // read-locked by readers, locked to pause them
}

// A sinkConn is one connection of a sink.
type sinkConn struct {
	tag  byte
	from netip.AddrPort
	got  atomic.Int64 // bytes, including the tag
	err  error        // how it ended, guarded by the sink's lock; io.EOF is a clean end
}

// newSink starts a sink at the address at inside the host.
func (h *host) newSink(t testing.TB, at netip.AddrPort) *sink {
	t.Helper()
	s := &sink{}
	h.serveTCP(t, at, s.drain)
	return s
}

func (s *sink) drain(c *net.TCPConn) {
	buf := make([]byte, 64<<10)
	if _, err := io.ReadFull(c, buf[:1]); err != nil {
		return
	}
	one := &sinkConn{tag: buf[0], from: unmapped(c.RemoteAddr())}
	one.got.Add(1)
	s.mu.Lock()
	s.conns = append(s.conns, one)
	s.mu.Unlock()
	for {
		s.readLock.RLock()
		n, err := c.Read(buf)
		s.readLock.RUnlock()
		one.got.Add(int64(n))
		if err != nil {
			s.mu.Lock()
			one.err = err
			s.mu.Unlock()
			return
		}
	}
}

// pause stops reading for the time d, and calls end before it resumes. All connections must be busy.
func (s *sink) pause(d time.Duration, end func()) {
	s.readLock.Lock()
	defer s.readLock.Unlock()
	time.Sleep(d)
	end()
}

func unmapped(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// got returns the number of bytes received on connections with the tag.
func (s *sink) got(tag byte) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	var n int64
	for _, c := range s.conns {
		if c.tag == tag {
			n += c.got.Load()
		}
	}
	return n
}

// count returns how many connections have arrived, and how many of them have ended.
func (s *sink) count() (arrived, ended int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		if c.err != nil {
			ended++
		}
	}
	return len(s.conns), ended
}

// arrivals returns the arrivals of connections with the tag.
func (s *sink) arrivals(tag byte, list []lab.Arrival) []lab.Arrival {
	s.mu.Lock()
	defer s.mu.Unlock()
	from := map[netip.AddrPort]bool{}
	for _, c := range s.conns {
		from[c.from] = c.tag == tag
	}
	var mine []lab.Arrival
	for _, a := range list {
		if from[a.From] {
			mine = append(mine, a)
		}
	}
	return mine
}

// patience is how long tests wait for what happens at once, unless the machine is busy.
const patience = 30 * time.Second

// wait waits until the sink has received n bytes with the tag.
func (s *sink) wait(t testing.TB, tag byte, n int64, most time.Duration) {
	t.Helper()
	waitFor(t, most, func() error {
		if got := s.got(tag); got < n {
			return fmt.Errorf("%d of %d bytes arrived at the downstream", got, n)
		}
		return nil
	})
}

// waitFor waits until check returns nil, and fails the test with the error of check if that takes longer than most.
func waitFor(t testing.TB, most time.Duration, check func() error) {
	t.Helper()
	for deadline := time.Now().Add(most); ; time.Sleep(5 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %v: %v", most, err)
		}
	}
}

// A bulk is a group of connections that send to a sink.
type bulk struct {
	conns []*net.TCPConn
	sent  atomic.Int64 // bytes, including the tags
}

// newBulk opens count connections from the address from inside the host. The
// caller need not close them.
func (h *host) newBulk(t testing.TB, from netip.Addr, to netip.AddrPort, count int, tag byte) *bulk {
	t.Helper()
	b := &bulk{}
	for range count {
		c := h.mustDial(t, from, to)
		// A small buffer, so that a pause of the sender reaches the proxy at once.
		if err := c.SetWriteBuffer(128 << 10); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte{tag}); err != nil {
			t.Fatalf("send tag: %v", err)
		}
		b.sent.Add(1)
		b.conns = append(b.conns, c)
	}
	t.Cleanup(b.abort)
	return b
}

// send sends n bytes on each connection.
func (b *bulk) send(n int64) error {
	return b.each(func(c *net.TCPConn) error {
		done, err := io.Copy(c, io.LimitReader(zeros{}, n))
		b.sent.Add(done)
		return err
	})
}

// flood sends on each connection for the time d.
func (b *bulk) flood(d time.Duration) error {
	deadline := time.Now().Add(d)
	return b.each(func(c *net.TCPConn) error {
		if err := c.SetWriteDeadline(deadline); err != nil {
			return err
		}
		defer c.SetWriteDeadline(time.Time{})
		block := make([]byte, 32<<10)
		for {
			n, err := c.Write(block)
			b.sent.Add(int64(n))
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return nil
			}
			if err != nil {
				return err
			}
		}
	})
}

// floodUntil is like flood, until stop is closed.
func (b *bulk) floodUntil(stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		if err := b.flood(100 * time.Millisecond); err != nil {
			return err
		}
	}
}

func (b *bulk) each(fn func(*net.TCPConn) error) error {
	errs := make([]error, len(b.conns))
	var group sync.WaitGroup
	for i, c := range b.conns {
		group.Go(func() { errs[i] = fn(c) })
	}
	group.Wait()
	return errors.Join(errs...)
}

func (b *bulk) abort() {
	for _, c := range b.conns {
		abort(c)
	}
}

// zeros is an endless source of bytes.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
