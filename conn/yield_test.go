package conn

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// slowAnswers is a server that answers each byte but "n" with the same.
func slowAnswers(t *testing.T) string {
	return server(t, func(c *net.TCPConn) {
		for b := make([]byte, 1); ; {
			if _, err := c.Read(b); err != nil {
				return
			}
			if b[0] != 'n' {
				c.Write(b)
			}
		}
	})
}

// asks reports whether a question on c is answered within d.
func asks(c *net.TCPConn, d time.Duration) bool {
	c.SetDeadline(time.Now().Add(d))
	c.Write([]byte("q"))
	_, err := io.ReadFull(c, make([]byte, 1))
	return err == nil
}

// hasEnded reports whether c has ended without data.
func hasEnded(c *net.TCPConn) bool {
	c.SetReadDeadline(time.Now().Add(time.Millisecond))
	_, err := c.Read(make([]byte, 1))
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

// A source that keeps all slots with idle connections gives way to another one, the longest idle connection first, until
// both hold as many.
func TestYield(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, slowAnswers(t))
	limit := shaper.Limit{Name: "slots", Match: shaper.Match{Protocol: shaper.TCP}, MaxConnections: 5, YieldAfter: time.Second, QueueTimeout: time.Minute, MaxQueue: 100}
	r.apply(limit)
	var hog []*net.TCPConn
	var asked []time.Time
	for range 5 {
		c := dialFrom(t, "127.0.0.2", r.addr())
		asked = append(asked, time.Now())
		if !asks(c, testTimeout) {
			t.Fatal("no answer")
		}
		hog = append(hog, c)
		time.Sleep(20 * time.Millisecond)
	}
	if !asks(hog[0], testTimeout) { // so that the next one is the longest idle
		t.Fatal("no answer")
	}
	hog[2].Write([]byte("n")) // an answer is due
	first := dialFrom(t, "127.0.0.3", r.addr())
	if !asks(first, testTimeout) {
		t.Fatal("another source is not answered")
	}
	if d := time.Since(asked[1]); d < 900*time.Millisecond {
		t.Errorf("a connection that was idle for %v has ended", d)
	}
	testutil.WaitFor(t, "the one that was idle for the longest to end", func() bool { return hasEnded(hog[1]) })
	for i, c := range hog {
		if i != 1 && hasEnded(c) {
			t.Errorf("connection %d has ended", i)
		}
	}
	if second := dialFrom(t, "127.0.0.3", r.addr()); !asks(second, testTimeout) {
		t.Error("another source does not get its second slot")
	}
	testutil.WaitFor(t, "the next one to end", func() bool { return hasEnded(hog[3]) })
	if hasEnded(hog[2]) {
		t.Error("another one has ended")
	}
	if third := dialFrom(t, "127.0.0.3", r.addr()); asks(third, 3*time.Second) {
		t.Error("a source gets more than another has left")
	}
	if own := dialFrom(t, "127.0.0.2", r.addr()); asks(own, 2*time.Second) {
		t.Error("a connection has ended for one of its own source")
	}
	if n := r.proxy.listeners["l"].counts.Ended[shaper.Yielded].Load(); n != 2 {
		t.Errorf("%d connections have yielded", n)
	}

	// A reload that takes the key away keeps the others.
	limit.YieldAfter = 0
	r.apply(limit)
	testutil.WaitFor(t, "the reload", func() bool { return r.shaper.Policy().Limit(0).YieldAfter == 0 })
	if another := dialFrom(t, "127.0.0.4", r.addr()); asks(another, 2*time.Second) {
		t.Error("a connection has ended without yield_after")
	}
}
