package conn

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// After a retry, a half-closed connection goes on.
func TestRetryUnanswered_HalfCloseTimeout(t *testing.T) {
	t.Parallel()
	more := make(chan string, 1)
	s := script(t, func(n int, c *net.TCPConn) {
		readN(c, 3)
		if n == 1 {
			c.Close()
			return
		}
		c.Write([]byte("hello"))
		c.CloseWrite()
		more <- readN(c, 4)
	})
	r := start(t, shaper.TCP, s.addr)
	r.listen.RetryUnanswered, r.listen.HalfCloseTimeout, r.listen.Ramp = true, time.Minute, shaper.Frequency{N: 10, Per: time.Second}
	r.apply()
	c := dial(t, r.addr())
	c.Write([]byte("req"))
	if got := readN(c, 5); got != "hello" {
		t.Errorf("got %q", got)
	}
	time.Sleep(300 * time.Millisecond)
	c.Write([]byte("more"))
	if got := <-more; got != "more" {
		t.Errorf("the half-closed connection was cut: server got %q", got)
	}
}

// The idle timeout after a retry ends the connection, and makes no other one.
func TestRetryUnanswered_IdleTimeout(t *testing.T) {
	t.Parallel()
	var servers []*scripted
	var once sync.Once
	f := func(n int, c *net.TCPConn) {
		readN(c, 3)
		first := false
		once.Do(func() { first = true })
		if first {
			c.Close()
			return
		}
		c.Write([]byte("hello"))
		io.Copy(io.Discard, c)
		c.Close()
	}
	for range 4 {
		servers = append(servers, script(t, f))
	}
	count := func() (n int) {
		for _, s := range servers {
			n += s.count()
		}
		return n
	}
	r := start(t, shaper.TCP, servers[0].addr)
	for _, s := range servers[1:] {
		to := netip.MustParseAddrPort(s.addr)
		r.listen.Downstream = append(r.listen.Downstream, shaper.Downstream{Host: to.Addr().String(), Port: to.Port()})
	}
	r.listen.RetryUnanswered = true
	r.apply()
	c := dial(t, r.addr())
	c.Write([]byte("req"))
	first := readN(c, 5)
	if n := count(); n != 2 {
		t.Fatal(n)
	}
	r.listen.TCPIdleTimeout = 500 * time.Millisecond
	r.apply()
	testutil.WaitFor(t, "the idle timeout", func() bool { return r.shaper.Listener("l").Ended[shaper.IdleTimeout].Load() == 1 })
	c.Write([]byte("xyz"))
	c.SetReadDeadline(time.Now().Add(time.Second))
	if got := readN(c, 5); got != "" {
		t.Errorf("after %q, and the idle timeout: got %q", first, got)
	}
	if n := count(); n != 2 {
		t.Errorf("the idle timeout made %d more connections", n-2)
	}
}

// What is retried after a wait has not been idle meanwhile.
func TestRetryUnanswered_LongHold(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	r := start(t, shaper.TCP, g.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 100, Per: time.Second}, time.Minute
	r.listen.RetryUnanswered = true
	r.apply()
	l, err := net.Listen("tcp4", g.addr)
	if err != nil {
		t.Fatal(err)
	}
	greeted := r.visitors(t, 3, testTimeout)
	testutil.WaitFor(t, "all to be connected", func() bool { return r.proxy.Downstreams()[0].InFlight == 3 })
	l.Close()
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 3 })
	r.listen.TCPIdleTimeout = 3 * time.Second
	r.apply()
	time.Sleep(4 * time.Second)
	g.start()
	if n := greeted(); n != 3 {
		t.Errorf("%d of 3 were greeted", n)
	}
}

// Connections that are retried while an operator holds the listener wait.
func TestRetryUnanswered_Held(t *testing.T) {
	t.Parallel()
	s := script(t, func(n int, c *net.TCPConn) {})
	r := start(t, shaper.TCP, s.addr)
	r.listen.Ramp, r.listen.HoldTimeout, r.listen.RetryUnanswered = shaper.Frequency{N: 1, Per: time.Second}, time.Minute, true
	r.apply()
	r.visitors(t, 10, testTimeout)
	testutil.WaitFor(t, "all to be connected", func() bool { return s.count() == 10 })
	r.proxy.Hold("l", shaper.Forever, false)
	s.closeAll()
	time.Sleep(500 * time.Millisecond)
	if n := s.count(); n != 10 {
		t.Errorf("%d connections reached the server while it was held", n-10)
	}
}

// They wait, too, if the server is away, and on_down = "refuse".
func TestRetryUnanswered_HeldAndAway(t *testing.T) {
	t.Parallel()
	s := script(t, func(n int, c *net.TCPConn) {})
	r := start(t, shaper.TCP, s.addr)
	r.listen.Ramp, r.listen.HoldTimeout, r.listen.RetryUnanswered = shaper.Frequency{N: 10, Per: time.Second}, time.Minute, true
	r.apply()
	c := dial(t, r.addr())
	testutil.WaitFor(t, "it to be connected", func() bool { return s.count() == 1 })
	r.proxy.Hold("l", shaper.Forever, false)
	s.l.Close()
	s.closeAll()
	c.SetReadDeadline(time.Now().Add(2 * time.Second))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("it was ended during the hold: %v", err)
	}
}

// While checks say that the server is not ready, a connection that is retried does not see that.
func TestRetryUnanswered_Checks(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	says := "hello"
	s := script(t, func(n int, c *net.TCPConn) {
		mu.Lock()
		defer mu.Unlock()
		c.Write([]byte(says))
	})
	set := func(to string) { mu.Lock(); says = to; mu.Unlock() }
	r := start(t, shaper.TCP, s.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout, r.listen.RetryUnanswered = shaper.DownHold, shaper.Frequency{N: 100, Per: time.Second}, time.Minute, true
	r.apply()
	set("") // it hangs
	c := dial(t, r.addr())
	testutil.WaitFor(t, "it to be connected", func() bool { return s.count() == 1 && r.proxy.Downstreams()[0].InFlight == 1 })
	r.listen.Check = shaper.HealthCheck{Interval: 300 * time.Millisecond, Timeout: 300 * time.Millisecond, Rise: 1, Fall: 2, Expect: "hello"}
	r.apply()
	testutil.WaitFor(t, "it to be down", func() bool { return r.status().Down })
	set("starting up")
	if r.proxy.Downstreams()[0].InFlight < 1 {
		t.Fatal("not connected")
	}
	s.closeAll()
	c.SetReadDeadline(time.Now().Add(time.Second))
	if got := readN(c, 5); got != "" {
		t.Errorf("got %q from a server that is not ready", got)
	}
	if !r.status().Down {
		t.Error("it is not down any more")
	}
}

// A retry does not wait for another downstream that is drained.
func TestRetryUnanswered_OtherDrained(t *testing.T) {
	t.Parallel()
	s := script(t, func(n int, c *net.TCPConn) {
		if n == 1 {
			c.Close()
			return
		}
		c.Write([]byte("hello"))
	})
	b := newGreeter(t)
	r := start(t, shaper.TCP, s.addr)
	to := netip.MustParseAddrPort(b.addr)
	r.listen.Downstream = append(r.listen.Downstream, shaper.Downstream{Host: to.Addr().String(), Port: to.Port()})
	r.listen.RetryUnanswered = true
	r.apply()
	r.proxy.DrainDownstream("l", b.addr, true)
	if n := r.visitors(t, 1, testTimeout)(); n != 1 {
		t.Error("not greeted")
	}
}

// Retries come no faster than the ramp.
func TestRetryUnanswered_Ramp(t *testing.T) {
	t.Parallel()
	s := script(t, func(n int, c *net.TCPConn) {
		if n <= 20 {
			c.Close()
			return
		}
		c.Write([]byte("hello"))
	})
	r := start(t, shaper.TCP, s.addr)
	r.listen.Ramp, r.listen.HoldTimeout, r.listen.RetryUnanswered = shaper.Frequency{N: 5, Per: time.Second}, time.Minute, true
	r.apply()
	r.proxy.Hold("l", shaper.Forever, false)
	greeted := r.visitors(t, 10, testTimeout)
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 10 })
	r.proxy.Hold("l", 0, false)
	greeted()
	s.mu.Lock()
	checkRamp(t, s.at, 5)
	s.mu.Unlock()
}

// Clients that a server turns away do not make it fail, and begin no ramp.
func TestRetryUnanswered_IsNoFailedDial(t *testing.T) {
	t.Parallel()
	s := script(t, func(n int, c *net.TCPConn) {
		if readN(c, 3) == "bad" {
			time.Sleep(50 * time.Millisecond)
			c.Close()
			return
		}
		c.Write([]byte("hello"))
	})
	r := start(t, shaper.TCP, s.addr)
	r.listen.Ramp, r.listen.HoldTimeout, r.listen.SlowStart, r.listen.RetryUnanswered = shaper.Frequency{N: 1, Per: time.Second}, time.Minute, time.Minute, true
	r.apply()
	for range 4 {
		dial(t, r.addr()).Write([]byte("bad"))
	}
	time.Sleep(500 * time.Millisecond)
	st := r.proxy.Downstreams()[0]
	if r.status().Rate != 0 || !st.Up || st.State.DialsFailed.Load() > 0 {
		t.Errorf("%+v; up %v %s; %d dials failed", r.status(), st.Up, st.Error, st.State.DialsFailed.Load())
	}
}

// The end of the lifetime after a retry ends the connection.
func TestRetryUnanswered_Lifetime(t *testing.T) {
	t.Parallel()
	s := script(t, func(n int, c *net.TCPConn) {
		readN(c, 3)
		if n == 1 {
			c.Close()
			return
		}
		c.Write([]byte("hello"))
	})
	r := start(t, shaper.TCP, s.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 1, Per: time.Second}, time.Minute
	r.listen.RetryUnanswered, r.listen.MaxLifetime = true, 500*time.Millisecond
	r.apply()
	c := dial(t, r.addr())
	c.Write([]byte("req"))
	readN(c, 5)
	time.Sleep(700 * time.Millisecond)
	if st := r.status(); st.Down || st.Waiting > 0 {
		t.Errorf("max_lifetime of a healthy connection: %+v", st)
	}
	time.Sleep(time.Second)
	c.Close()
	time.Sleep(200 * time.Millisecond)
	r.proxy.EndAll()
	if n := r.proxy.listeners["l"].counts.Open.Load(); n != 0 {
		t.Errorf("%d open after all have ended", n)
	}
}

// It does so while bytes are queued, too.
func TestRetryUnanswered_LifetimeWhileQueued(t *testing.T) {
	t.Parallel()
	s := script(t, func(n int, c *net.TCPConn) {
		readN(c, 3)
		if n == 1 {
			c.Close()
			return
		}
		c.Write(make([]byte, 2<<20))
	})
	limits := []shaper.Limit{{Name: "l", Rate: 800_000, Direction: shaper.Both, MaxDelay: time.Second}}
	r := start(t, shaper.TCP, s.addr, limits...)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 1, Per: time.Second}, time.Minute
	r.listen.RetryUnanswered, r.listen.MaxLifetime = true, 500*time.Millisecond
	r.apply(limits...)
	c := dial(t, r.addr())
	c.Write([]byte("req"))
	readN(c, 5)
	r.proxy.Hold("l", shaper.Forever, false)
	io.Copy(io.Discard, c)
	time.Sleep(500 * time.Millisecond)
}

// Each retry begins with the PROXY header, once.
func TestRetryUnanswered_ProxyHeader(t *testing.T) {
	t.Parallel()
	got := make(chan string, 4)
	s := script(t, func(n int, c *net.TCPConn) {
		b := make([]byte, 300)
		m := 0
		for !bytes.HasSuffix(b[:m], []byte("request")) {
			k, err := c.Read(b[m:])
			if m += k; err != nil {
				break
			}
		}
		c.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // there is nothing else
		k, _ := c.Read(b[m:])
		got <- string(b[:m+k])
		if n <= 2 {
			c.Close()
			return
		}
		c.Write([]byte("hello"))
	})
	limits := []shaper.Limit{{Name: "l", Rate: 16_000, Direction: shaper.Both, MaxDelay: 10 * time.Second}}
	r := start(t, shaper.TCP, s.addr, limits...)
	r.listen.RetryUnanswered, r.listen.SendProxy = true, shaper.ProxyV1
	r.apply(limits...)
	c := dial(t, r.addr())
	c.Write([]byte("request"))
	readN(c, 5)
	a, b, d := <-got, <-got, <-got
	if a != b || b != d {
		t.Errorf("%q, %q, %q", a, b, d)
	}
}
