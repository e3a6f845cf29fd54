package conn

import (
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// greeter is a server that says hello to each connection, and notes when it came. It may be down.
type greeter struct {
	t    *testing.T
	addr string

	mu    sync.Mutex
	says  string
	at    []time.Time
	socks []net.Conn
	l     net.Listener
}

func newGreeter(t *testing.T) *greeter {
	g := &greeter{t: t, addr: testutil.FreeAddr(t, "tcp"), says: "hello"}
	t.Cleanup(g.stop)
	return g
}

func (g *greeter) start() {
	g.t.Helper()
	l, err := net.Listen("tcp4", g.addr)
	if err != nil {
		g.t.Fatal(err)
	}
	g.l = l
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			at := arrival(c)
			g.mu.Lock()
			g.at, g.socks = append(g.at, at), append(g.socks, c)
			says := g.says
			g.mu.Unlock()
			c.Write([]byte(says[:2])) // in two pieces
			time.Sleep(5 * time.Millisecond)
			c.Write([]byte(says[2:]))
		}
	}()
}

// arrival returns when the kernel has completed the handshake of a connection on which nothing has come since: a server
// that is late to accept sees connections closer together than they came.
func arrival(c net.Conn) time.Time {
	at := time.Now()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return at
	}
	raw.Control(func(fd uintptr) {
		for range 1000 {
			before := time.Now()
			info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			if err != nil {
				return
			}
			at = before.Add(-time.Duration(info.Last_ack_recv) * time.Millisecond)
			if time.Since(before) < 5*time.Millisecond { // otherwise interrupted, and it is not known when the kernel answered
				return
			}
		}
	})
	return at
}

func (g *greeter) stop() {
	if g.l == nil {
		return
	}
	g.l.Close()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.socks {
		c.Close()
	}
	g.l, g.socks = nil, nil
}

// came returns when connections came since the last call.
func (g *greeter) came() []time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	at := g.at
	g.at = nil
	return at
}

// visitors connects n clients, and returns how many were greeted within d.
func (r *proxyRig) visitors(t *testing.T, n int, d time.Duration) func() (greeted int) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	greeted := 0
	for range n {
		c := dial(t, r.addr())
		c.SetDeadline(time.Now().Add(d))
		wg.Go(func() {
			defer c.Close()
			b := make([]byte, 5)
			if _, err := io.ReadFull(c, b); err == nil {
				mu.Lock()
				greeted++
				mu.Unlock()
			}
		})
	}
	return func() int { wg.Wait(); return greeted }
}

// checkRamp checks that connections came no faster than a ramp allows that began at the first of them.
func checkRamp(t *testing.T, at []time.Time, rate float64) {
	t.Helper()
	slices.SortFunc(at, time.Time.Compare)
	for i := range at {
		// The kernel counts in ticks of up to 10 ms, and the server may be interrupted while it asks.
		if most := rampBound(rate, at[i].Sub(at[0]).Seconds()+0.05); float64(i+1) > most+0.5 {
			t.Errorf("%d connections within %v, more than %.1f", i+1, at[i].Sub(at[0]), most)
		}
	}
}

func (r *proxyRig) status() shaper.ListenerStatus { return r.proxy.Listeners()[0] }

// While no server listens, connections wait. One of them tries each second; when one has reached the server, the others
// follow at the ramp. None fails, however often the server goes away.
func TestHold_Down(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	r := start(t, shaper.TCP, g.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 20, Per: time.Second}, time.Minute
	r.apply()
	for round := range 2 {
		refused := &r.proxy.Downstreams()[0].State.DialsRefused
		dialed, began := refused.Load(), time.Now()
		greeted := r.visitors(t, 60, testTimeout)
		testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 60 })
		time.Sleep(1500 * time.Millisecond)
		st := r.status()
		if !st.Down || st.Held || st.HeldFor < time.Second || st.LastServed >= 0 {
			t.Errorf("status %+v while the server is down", st)
		}
		testutil.WaitFor(t, "another trial", func() bool { return refused.Load()-dialed >= 2 })
		if n := refused.Load() - dialed; round > 0 && n > 61+uint64(time.Since(began).Seconds()) {
			t.Errorf("the server was dialed %d times within %v", n, time.Since(began))
		}
		g.start()
		testutil.WaitFor(t, "the server to be reached", func() bool { st = r.status(); return !st.Down })
		if st.Waiting > 1 && (st.Rate < 19 || st.LastServed <= 0 || st.LastServed > 5*time.Second) {
			t.Errorf("status %+v on the ramp", st)
		}
		if n := greeted(); n != 60 {
			t.Errorf("round %d: %d of 60 were greeted", round, n)
		}
		checkRamp(t, g.came(), 20)
		testutil.WaitFor(t, "the ramp to end", func() bool { return r.status().Rate == 0 })
		var clients []*net.TCPConn
		for range 120 {
			clients = append(clients, dial(t, r.addr()))
		}
		for _, c := range clients {
			if got := readN(c, 5); got != "hello" {
				t.Fatalf("got %q", got)
			}
		}
		all := connections(r.proxy)
		for _, c := range clients {
			if st, ok := all[local(c)]; !ok || st.Waited > 0 {
				t.Fatalf("without a ramp, a connection has waited: %+v", st)
			}
			c.Close()
		}
		g.came()
		g.stop()
	}
	r.settle()
}

// With checks these decide, and a connection that would be accepted is not tried.
func TestHold_Check(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	r := start(t, shaper.TCP, g.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 100, Per: time.Second}, time.Minute
	r.listen.Check = shaper.HealthCheck{Interval: 200 * time.Millisecond, Timeout: time.Second, Rise: 3, Fall: 1}
	r.apply()
	testutil.WaitFor(t, "the server to be down", func() bool { return r.proxy.Downstreams()[0].Down })
	greeted := r.visitors(t, 5, testTimeout)
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 5 })
	g.start()
	if n := greeted(); n != 5 {
		t.Errorf("%d of 5 were greeted", n)
	}
	at := g.came()
	slices.SortFunc(at, time.Time.Compare)
	if n := len(at); n < 8 || at[n-5].Sub(at[0]) < 350*time.Millisecond {
		t.Errorf("connections at %v: want three checks, and then those of clients", at)
	}
}

// A server that accepts connections, but does not say what is expected, is not up.
func TestHold_CheckExpects(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	g.says = "starting"
	g.start()
	r := start(t, shaper.TCP, g.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 100, Per: time.Second}, time.Minute
	r.listen.Check = shaper.HealthCheck{Interval: 50 * time.Millisecond, Timeout: 3 * time.Second, Rise: 1, Fall: 1, Expect: "hell"}
	r.apply()
	testutil.WaitFor(t, "the server to be down", func() bool { return r.proxy.Downstreams()[0].Down })
	// It answers in pieces, of which more than one may have come.
	if why := r.proxy.Downstreams()[0].Error; !strings.HasPrefix(why, `answered "st`) || !strings.HasSuffix(why, `, expected "hell"`) {
		t.Error(why)
	}
	greeted := r.visitors(t, 5, testTimeout)
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 5 && r.status().Down })
	g.mu.Lock()
	g.says = "hello"
	g.mu.Unlock()
	if n := greeted(); n != 5 {
		t.Errorf("%d of 5 were greeted", n)
	}
	g.stop()
	testutil.WaitFor(t, "the listener to wait", func() bool { return r.status().Down })
	greeted = r.visitors(t, 5, testTimeout)
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 5 })
	r.listen.OnDown = shaper.DownRefuse
	r.apply()
	if start := time.Now(); greeted() != 0 || time.Since(start) > testTimeout*3/4 {
		t.Error("connections wait after a reload that refuses them")
	}
}

// The trial of a client that goes away is not waited for, and one that has waited for too long is refused.
func TestHold_ClientsLeave(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	r := start(t, shaper.TCP, g.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 100, Per: time.Second}, 1500*time.Millisecond
	r.apply()
	start := time.Now()
	greeted := r.visitors(t, 20, testTimeout)
	if n := greeted(); n != 0 {
		t.Errorf("%d of 20 were greeted by no one", n)
	}
	if d := time.Since(start); d < 1400*time.Millisecond || d > testTimeout*3/4 {
		t.Errorf("refused after %v, want hold_timeout", d)
	}
	r.listen.HoldTimeout = time.Minute
	r.apply()
	for range 10 {
		c := dial(t, r.addr())
		c.SetLinger(0)
		time.Sleep(20 * time.Millisecond)
		c.Close()
	}
	testutil.WaitFor(t, "none to wait", func() bool { return r.status().Waiting == 0 })
	greeted = r.visitors(t, 3, testTimeout)
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 3 })
	g.start()
	if n := greeted(); n != 3 {
		t.Errorf("%d of 3 were greeted", n)
	}
	g.stop()
	r.settle()
}

// An operator holds a listener: new connections wait, existing ones go on, and idle ones end if they were asked to.
func TestHold_Operator(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	g.start()
	r := start(t, shaper.TCP, g.addr)
	r.listen.Ramp, r.listen.HoldTimeout = shaper.Frequency{N: 20, Per: time.Second}, time.Minute
	r.apply()
	if _, ok := r.proxy.Hold("other", time.Second, false); ok {
		t.Error("a listener that does not exist is held")
	}
	var old *net.TCPConn
	b := make([]byte, 5)
	for {
		began := time.Now()
		old = dial(t, r.addr())
		if _, err := io.ReadFull(old, b); err != nil {
			t.Fatal(err)
		}
		ended, ok := r.proxy.Hold("l", shaper.Forever, true)
		if ended == 0 && ok {
			break
		}
		if !ok || ended > 1 || time.Since(began) < idleFor.Duration() {
			t.Fatalf("%d ended, %v; want none, as it has just spoken", ended, ok)
		}
		r.proxy.Hold("l", 0, false) // the machine stood still meanwhile, so that it was idle
		testutil.WaitFor(t, "the ramp to end", func() bool { return r.status().Rate == 0 })
	}
	g.came()
	greeted := r.visitors(t, 30, testTimeout)
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 30 })
	if st := r.status(); !st.Held || st.HeldUntil != shaper.Forever || st.LastServed >= 0 {
		t.Errorf("status %+v while held", st)
	}
	time.Sleep(1100 * time.Millisecond)
	if at := g.came(); len(at) != 0 {
		t.Errorf("%d connections came while the listener was held", len(at))
	}
	r.apply() // a reload changes nothing of it
	const hold = 4 * time.Second
	if ended, _ := r.proxy.Hold("l", hold, true); ended != 1 {
		t.Errorf("%d idle connections ended, want one", ended)
	}
	if n, err := old.Read(b); n != 0 || err == nil {
		t.Errorf("read %d, %v from an idle connection", n, err)
	}
	if st := r.status(); !st.Held || st.HeldUntil > hold || st.LastServed < st.HeldUntil+time.Second || st.LastServed > st.HeldUntil+3*time.Second {
		t.Errorf("status %+v while held for %v", st, hold)
	}
	if n := greeted(); n != 30 { // it ends by itself
		t.Errorf("%d of 30 were greeted", n)
	}
	checkRamp(t, g.came(), 20)
	r.proxy.Hold("l", shaper.Forever, false)
	greeted = r.visitors(t, 1, testTimeout)
	testutil.WaitFor(t, "it to wait", func() bool { return r.status().Waiting == 1 })
	r.proxy.Hold("l", 0, false)
	if n := greeted(); n != 1 {
		t.Error("it was not resumed")
	}
	old.Close()
	g.stop()
	r.settle()
}

// UDP flows wait too, with their first datagrams, and pass at the ramp.
func TestHold_UDP(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.UDP, echoUDP(t, 10).String())
	r.listen.Ramp, r.listen.HoldTimeout = shaper.Frequency{N: 20, Per: time.Second}, time.Minute
	r.apply()
	r.proxy.Hold("l", shaper.Forever, false)
	var clients []net.Conn
	for range 10 {
		c := udpFrom(t, "127.0.0.5", r.addr())
		c.Write([]byte("ping"))
		clients = append(clients, c)
	}
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 10 })
	start := time.Now()
	r.proxy.Hold("l", 0, false)
	for _, c := range clients {
		c.SetReadDeadline(time.Now().Add(testTimeout))
		if _, err := c.Read(make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
	}
	if d := time.Since(start); d < 400*time.Millisecond {
		t.Errorf("10 flows passed in %v, at a ramp of 20/s", d)
	}
}

// A single downstream that was away gets connections at a ramp too, with slow_start.
func TestSlowStart_Ramp(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	r := start(t, shaper.TCP, g.addr)
	r.listen.SlowStart, r.listen.Ramp, r.listen.HoldTimeout = 4*time.Second, shaper.Frequency{N: 20, Per: time.Second}, time.Minute
	r.apply()
	for r.proxy.Downstreams()[0].Up {
		if c, err := net.Dial("tcp4", r.addr()); err == nil {
			c.Close()
		}
	}
	began := time.Now()
	g.start()
	if greeted := r.visitors(t, 1, testTimeout); greeted() != 1 {
		t.Error("not greeted")
	}
	if greeted := r.visitors(t, 30, testTimeout); greeted() != 30 {
		t.Error("not all were greeted")
	}
	at := g.came()
	checkRamp(t, at[1:], 20) // the first has found out
	if st := r.status(); st.Rate == 0 && time.Since(began) < r.listen.SlowStart {
		t.Error("the ramp has ended before slow_start")
	}
	testutil.WaitFor(t, "the ramp to end", func() bool { return r.status().Rate == 0 })
	var left leaky.Time
	r.proxy.home.loop.call(func(leaky.Time) { left = r.proxy.listeners["l"].hold.ramp.interval })
	if left != 0 {
		t.Error("a ramp is left")
	}
}

// Sources take turns on the ramp, and one that has more than its part of the line loses its newest connection to others.
func TestHold_IsFair(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	came := make(chan byte, 100) // what clients have sent
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b := make([]byte, 1) // each in turn: the order in which goroutines run is not that of the connections
			c.Read(b)
			came <- b[0]
			c.Close()
		}
	}()
	r := start(t, shaper.TCP, l.Addr().String())
	r.listen.Ramp, r.listen.HoldTimeout, r.listen.MaxQueue = shaper.Frequency{N: 20, Per: time.Second}, time.Minute, 20
	r.apply()
	r.proxy.Hold("l", shaper.Forever, false)
	for range 20 {
		dialFrom(t, "127.0.0.5", r.addr()).Write([]byte("a"))
	}
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 20 })
	for range 3 {
		dialFrom(t, "127.0.0.6", r.addr()).Write([]byte("b"))
	}
	testutil.WaitFor(t, "the second source to wait", func() bool {
		n := 0
		for source, c := range connections(r.proxy) {
			if source.Addr() == netip.MustParseAddr("127.0.0.6") && c.Stage == "waiting" {
				n++
			}
		}
		return n == 3
	})
	if n := r.status().Waiting; n != 20 {
		t.Errorf("%d wait, max_queue is 20", n)
	}
	r.proxy.Hold("l", 0, false)
	first := ""
	for range 6 {
		first += string(<-came)
	}
	if strings.Count(first, "b") != 3 {
		t.Errorf("the first to be served were %q: sources do not take turns", first)
	}
}
