package conn

import (
	"context"
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

// scripted is a server that calls f for each connection, with its number from 1 on.
type scripted struct {
	mu   sync.Mutex
	n    int
	at   []time.Time
	l    net.Listener
	addr string
	all  []net.Conn
}

func (s *scripted) count() int { s.mu.Lock(); defer s.mu.Unlock(); return s.n }

func (s *scripted) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.all {
		c.Close()
	}
	s.all = nil
}

func script(t *testing.T, f func(n int, c *net.TCPConn)) *scripted {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &scripted{l: l, addr: l.Addr().String()}
	t.Cleanup(func() { l.Close(); s.closeAll() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			at := arrival(c)
			s.mu.Lock()
			s.n++
			n := s.n
			s.at = append(s.at, at)
			s.all = append(s.all, c)
			s.mu.Unlock()
			go f(n, c.(*net.TCPConn))
		}
	}()
	return s
}

func readN(c net.Conn, n int) string {
	b := make([]byte, n)
	m, _ := io.ReadFull(c, b)
	return string(b[:m])
}

func twoDown(t *testing.T) (a, b *greeter, r *proxyRig) {
	a, b = newGreeter(t), newGreeter(t)
	r = start(t, shaper.TCP, a.addr)
	to := netip.MustParseAddrPort(b.addr)
	r.listen.Downstream = append(r.listen.Downstream, shaper.Downstream{Host: to.Addr().String(), Port: to.Port()})
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 100, Per: time.Second}, time.Minute
	r.apply()
	return a, b, r
}

// A listener that has been reached, and then has no address, holds its connections.
func TestHold_NoAddress(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	g.start()
	r := start(t, shaper.TCP, g.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 100, Per: time.Second}, time.Minute
	r.apply()
	if n := r.visitors(t, 1, testTimeout)(); n != 1 {
		t.Fatal("not greeted")
	}
	r.listen.Downstream[0].Host = "nothing.invalid"
	r.apply()
	ln := r.proxy.listeners["l"]
	dial(t, r.addr())
	time.Sleep(100 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	if !r.proxy.Alive(ctx) {
		t.Error("the loop hangs")
	}
	addr := netip.MustParseAddr("127.0.0.1") // lets it go on
	ln.config.Load().hosts[0].address.Store(&addr)
}

// Those who wait for a limit since before the hold are held, too.
func TestHold_WaitersOfLimits(t *testing.T) {
	t.Parallel()
	g := script(t, func(n int, c *net.TCPConn) { c.Write([]byte("hello")); io.Copy(io.Discard, c); c.Close() })
	limits := []shaper.Limit{{Name: "max", MaxConnections: 1, MaxQueue: 100, QueueTimeout: time.Minute}}
	r := start(t, shaper.TCP, g.addr, limits...)
	r.listen.Ramp, r.listen.HoldTimeout = shaper.Frequency{N: 1, Per: time.Second}, time.Minute
	r.apply(limits...)
	c := dial(t, r.addr())
	readN(c, 5)
	r.visitors(t, 10, testTimeout) // each closes once it is greeted
	state := r.shaper.Policy().State(0)
	testutil.WaitFor(t, "all to wait", func() bool { return state.Waiting.Load() == 10 })
	r.proxy.Hold("l", shaper.Forever, false)
	c.Close()
	time.Sleep(500 * time.Millisecond)
	if n := g.count(); n != 1 {
		t.Errorf("%d connections reached the server while it was held", n-1)
	}
}

// A trial does not wait for a downstream that is drained.
func TestHold_OtherDrained(t *testing.T) {
	t.Parallel()
	a, b, r := twoDown(t)
	greeted := r.visitors(t, 5, testTimeout)
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 5 && r.status().Down })
	r.proxy.DrainDownstream("l", b.addr, true)
	time.Sleep(1500 * time.Millisecond)
	a.start()
	if n := greeted(); n != 5 {
		t.Errorf("%d of 5 were greeted; %+v", n, r.status())
	}
}

// One of two downstreams is drained, and the other restarts.
func TestHold_OnlyOtherDrained(t *testing.T) {
	t.Parallel()
	a, b, r := twoDown(t)
	r.proxy.DrainDownstream("l", b.addr, true)
	greeted := r.visitors(t, 5, testTimeout)
	time.Sleep(2500 * time.Millisecond)
	a.start()
	if n := greeted(); n != 5 {
		t.Errorf("%d of 5 were greeted; %+v", n, r.status())
	}
}

// A reload sets on_down = "hold" while checks say that all are down.
func TestHold_ByReload(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	g.says = "starting"
	g.start()
	r := start(t, shaper.TCP, g.addr)
	r.listen.Ramp, r.listen.HoldTimeout = shaper.Frequency{N: 100, Per: time.Second}, time.Minute
	r.listen.Check = shaper.HealthCheck{Interval: 50 * time.Millisecond, Timeout: time.Second, Rise: 1, Fall: 1, Expect: "hell"}
	r.apply()
	testutil.WaitFor(t, "the server to be down", func() bool { return r.proxy.Downstreams()[0].Down })
	r.listen.OnDown = shaper.DownHold
	r.apply()
	testutil.WaitFor(t, "the listener to hold", func() bool { return r.status().Down })
	c := dial(t, r.addr())
	c.SetReadDeadline(time.Now().Add(time.Second))
	if got := readN(c, 5); got != "" {
		t.Errorf("got %q from a server that the checks say is down", got)
	}
}

// A reload that sets on_down = "refuse" does not let all in at once.
func TestHold_EndsByReload(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	r := start(t, shaper.TCP, g.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 10, Per: time.Second}, time.Minute
	r.listen.Check = shaper.HealthCheck{Interval: 500 * time.Millisecond, Timeout: time.Second, Rise: 1000, Fall: 1}
	r.apply()
	testutil.WaitFor(t, "the server to be down", func() bool { return r.status().Down })
	greeted := r.visitors(t, 30, testTimeout)
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 30 })
	g.start()
	time.Sleep(100 * time.Millisecond)
	g.came()
	r.listen.OnDown = shaper.DownRefuse
	r.apply()
	greeted()
	checkRamp(t, g.came(), 13) // with checks
}

// What has waited in a hold for longer than the queue_timeout of a limit may still wait for that.
func TestHold_TimeIsNotOfLimits(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	g.start()
	limits := []shaper.Limit{{Name: "max", NewConnections: shaper.Frequency{N: 40, Per: time.Second}, MaxQueue: 100, QueueTimeout: 3 * time.Second}}
	r := start(t, shaper.TCP, g.addr, limits...)
	r.listen.Ramp, r.listen.HoldTimeout = shaper.Frequency{N: 1000, Per: time.Second}, time.Minute
	r.apply(limits...)
	if n := r.visitors(t, 8, testTimeout)(); n != 8 {
		t.Errorf("without a hold %d of 8 were greeted", n)
	}
	time.Sleep(time.Second)
	r.proxy.Hold("l", 4*time.Second, false)
	if n := r.visitors(t, 8, testTimeout)(); n != 8 {
		t.Errorf("after a hold %d of 8 were greeted", n)
	}
}

// Clients that have sent something and closed leave the line.
func TestHold_ClientsGaveUp(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	g.start()
	r := start(t, shaper.TCP, g.addr)
	r.listen.Ramp, r.listen.HoldTimeout, r.listen.MaxQueue = shaper.Frequency{N: 10, Per: time.Second}, time.Minute, 10
	r.apply()
	r.proxy.Hold("l", shaper.Forever, false)
	for range 10 {
		c := dial(t, r.addr())
		c.Write([]byte("startup"))
		time.Sleep(5 * time.Millisecond)
		c.Close()
	}
	testutil.WaitFor(t, "all to have left", func() bool { return r.shaper.Listener("l").Accepted.Load() == 10 && r.status().Waiting == 0 })
	c := dial(t, r.addr())
	c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("refused (%v) by %d that have closed", err, r.status().Waiting)
	}
	if n := r.status().Waiting; n > 1 {
		t.Errorf("%d wait", n)
	}
}
