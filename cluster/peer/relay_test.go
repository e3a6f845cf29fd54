package peer

import (
	"net"
	"sync"
	"testing"
	"time"
)

// relay is the network between clients and a server, at an address of its own.
type relay struct {
	address string
	to      string

	mu       sync.Mutex
	delay    time.Duration // of what the server sends
	stalled  *sync.Cond    // of mu
	stall    bool          // nothing is delivered
	conns    map[net.Conn]bool
	accepted int
	sent     int64 // bytes by clients that were delivered
}

func newRelay(t testing.TB, to string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{address: l.Addr().String(), to: to, conns: map[net.Conn]bool{}}
	r.stalled = sync.NewCond(&r.mu)
	var work sync.WaitGroup
	work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", r.to)
			if err != nil {
				c.Close()
				continue
			}
			r.mu.Lock()
			r.accepted++
			r.conns[c], r.conns[s] = true, true
			r.mu.Unlock()
			work.Go(func() { r.copy(s, c, true) })
			work.Go(func() { r.copy(c, s, false) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		r.set(func() { r.stall = false })
		r.cut()
		work.Wait()
	})
	return r
}

// copy delivers what one side sends. When that ends, so does the other one.
func (r *relay) copy(to, from net.Conn, request bool) {
	defer to.Close()
	defer from.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		r.mu.Lock()
		delay := r.delay
		for r.stall {
			r.stalled.Wait()
		}
		if request {
			r.sent += int64(n)
		}
		if err != nil {
			delete(r.conns, from)
		}
		r.mu.Unlock()
		if !request {
			time.Sleep(delay)
		}
		if _, e := to.Write(buffer[:n]); err != nil || e != nil {
			return
		}
	}
}

// set changes the relay.
func (r *relay) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
	r.stalled.Broadcast()
}

// cut resets all connections.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		_ = c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	clear(r.conns)
}

func (r *relay) counts() (accepted int, sent int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.accepted, r.sent
}
