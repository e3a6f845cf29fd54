package conn

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// All breakers were open but for that of a downstream that an operator had drained. Those who have waited for longer than
// connect_timeout are not refused when it is put back.
func TestHold_PutBackServesAll(t *testing.T) {
	t.Parallel()
	bad, g := newMoodyServer(t, "resets"), newGreeter(t)
	g.start()
	r := startBreaker(t, bad.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	r.listen.OnDown, r.listen.HoldTimeout, r.listen.Ramp = shaper.DownHold, time.Minute, shaper.Frequency{N: 10, Per: time.Second}
	r.addDownstream(g.addr)
	r.apply()
	r.proxy.DrainDownstream("l", g.addr, true)
	r.ask()
	r.ask()
	if open, _ := r.breaker(); !open {
		t.Fatal("not open")
	}
	greeted := r.visitors(t, 30, testTimeout)
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 30 })
	time.Sleep(1500 * time.Millisecond) // connect_timeout is 1 s
	if st := r.status(); st.Waiting != 30 {
		t.Fatalf("%+v", st)
	}
	r.proxy.DrainDownstream("l", g.addr, false)
	if n := greeted(); n != 30 {
		t.Errorf("%d of 30 were greeted when a downstream was there again", n)
	}
}

// They come at the ramp.
func TestHold_PutBackAtRamp(t *testing.T) {
	t.Parallel()
	bad, g := newMoodyServer(t, "resets"), newGreeter(t)
	g.start()
	r := startBreaker(t, bad.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	r.listen.OnDown, r.listen.HoldTimeout, r.listen.Ramp, r.listen.ConnectTimeout = shaper.DownHold, time.Minute, shaper.Frequency{N: 10, Per: time.Second}, 10*time.Second
	r.addDownstream(g.addr)
	r.apply()
	r.proxy.DrainDownstream("l", g.addr, true)
	r.ask()
	r.ask()
	greeted := r.visitors(t, 30, testTimeout)
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 30 && r.status().Down })
	r.proxy.DrainDownstream("l", g.addr, false)
	if n := greeted(); n != 30 {
		t.Errorf("%d of 30 were greeted", n)
	}
	checkRamp(t, g.came(), 10)
}

// One that is drained does not keep on_down = "hold" from holding.
func TestHold_DrainedIsNoServer(t *testing.T) {
	t.Parallel()
	a, b := newGreeter(t), newGreeter(t)
	a.says = "starting"
	a.start()
	b.start()
	r := start(t, shaper.TCP, a.addr)
	r.addDownstream(b.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 100, Per: time.Second}, time.Minute
	r.listen.Check = shaper.HealthCheck{Interval: 50 * time.Millisecond, Timeout: time.Second, Rise: 1, Fall: 1, Expect: "hell"}
	r.apply()
	r.proxy.DrainDownstream("l", b.addr, true)
	testutil.WaitFor(t, "a to be down", func() bool { return r.proxy.Downstreams()[0].Down })
	testutil.WaitFor(t, "the listener to hold", func() bool { return r.status().Down })
	c := dial(t, r.addr())
	c.SetReadDeadline(time.Now().Add(time.Second))
	if got := readN(c, 5); got != "" {
		t.Errorf("got %q from a server that the checks say is down; %+v", got, r.status())
	}
}

// Checks of one that is drained do not end a hold.
func TestHold_DrainedEndsNone(t *testing.T) {
	t.Parallel()
	a, b, r := twoDown(t)
	r.listen.Check = shaper.HealthCheck{Interval: 50 * time.Millisecond, Timeout: time.Second, Rise: 1, Fall: 1, Expect: "hell"}
	r.apply()
	testutil.WaitFor(t, "hold", func() bool { return r.status().Down })
	r.proxy.DrainDownstream("l", b.addr, true)
	a.says = "starting"
	a.start()
	b.start() // comes back, and is serviced
	time.Sleep(300 * time.Millisecond)
	c := dial(t, r.addr())
	c.SetReadDeadline(time.Now().Add(time.Second))
	if got := readN(c, 5); got != "" {
		t.Errorf("got %q from a server that the checks say is down; %+v", got, r.status())
	}
}

// What --end-idle frees lets nobody in.
func TestHold_EndIdleLetsNobodyIn(t *testing.T) {
	t.Parallel()
	g := script(t, func(n int, c *net.TCPConn) { c.Write([]byte("hello")); io.Copy(io.Discard, c); c.Close() })
	limits := []shaper.Limit{{Name: "max", MaxConnections: 3, MaxQueue: 100, QueueTimeout: time.Minute}}
	r := start(t, shaper.TCP, g.addr, limits...)
	r.listen.Ramp, r.listen.HoldTimeout = shaper.Frequency{N: 1, Per: time.Second}, time.Minute
	r.apply(limits...)
	for range 3 {
		readN(dial(t, r.addr()), 5)
	}
	for range 3 {
		dial(t, r.addr())
	}
	time.Sleep(1200 * time.Millisecond)
	if n, _ := r.proxy.Hold("l", shaper.Forever, true); n != 3 {
		t.Fatal(n)
	}
	time.Sleep(300 * time.Millisecond)
	if n := g.count(); n != 3 {
		t.Errorf("%d connections reached the server while it was held", n-3)
	}
}

// Those who wait for a limit while their listener is held are in the line, too.
func TestHold_WaitingAtLimit(t *testing.T) {
	t.Parallel()
	g := script(t, func(n int, c *net.TCPConn) { c.Write([]byte("hello")); io.Copy(io.Discard, c); c.Close() })
	limits := []shaper.Limit{{Name: "max", MaxConnections: 1, MaxQueue: 100, QueueTimeout: time.Minute}}
	r := start(t, shaper.TCP, g.addr, limits...)
	r.listen.Ramp, r.listen.HoldTimeout = shaper.Frequency{N: 1, Per: time.Second}, time.Minute
	r.apply(limits...)
	readN(dial(t, r.addr()), 5)
	r.proxy.Hold("l", shaper.Forever, false)
	for range 5 {
		dial(t, r.addr())
	}
	testutil.WaitFor(t, "5 to wait", func() bool { return r.status().Waiting == 5 })
}

// The time in a hold does not count against the queue_timeout of a limit, after the ramp either.
func TestHold_LimitAfterRamp(t *testing.T) {
	t.Parallel()
	g := script(t, func(n int, c *net.TCPConn) { c.Write([]byte("hello")); io.Copy(io.Discard, c); c.Close() })
	limits := []shaper.Limit{{Name: "max", MaxConnections: 1, MaxQueue: 100, QueueTimeout: 5 * time.Second}}
	r := start(t, shaper.TCP, g.addr, limits...)
	r.listen.Ramp, r.listen.HoldTimeout = shaper.Frequency{N: 100000, Per: time.Second}, time.Minute
	r.apply(limits...)
	r.proxy.Hold("l", shaper.Forever, false)
	a := dial(t, r.addr())
	time.Sleep(50 * time.Millisecond)
	b := dial(t, r.addr())
	testutil.WaitFor(t, "two to wait", func() bool { return r.status().Waiting == 2 })
	time.Sleep(6 * time.Second)
	resumed := time.Now()
	r.proxy.Hold("l", 0, false)
	if got := readN(a, 5); got != "hello" {
		t.Fatal(got)
	}
	testutil.WaitFor(t, "the ramp to end", func() bool { return r.status().Rate == 0 })
	time.Sleep(300 * time.Millisecond) // it has waited for the limit for 3.3 s of 5 s
	a.Close()
	if got := readN(b, 5); got != "hello" && time.Since(resumed) < limits[0].QueueTimeout {
		t.Errorf("refused by the limit after %v, of its queue_timeout of 5 s", time.Since(resumed))
	}
}

// Those who wait on the ramp when the breaker opens again are told so, however long they have waited.
func TestHold_ReplyAfterRamp(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: 300 * time.Millisecond, Probe: 1, Timeout: time.Second, Reply: "later"})
	r.listen.Ramp, r.listen.HoldTimeout, r.listen.ConnectTimeout = shaper.Frequency{N: 1, Per: 2 * time.Second}, 20*time.Second, time.Second
	r.apply()
	r.ask()
	r.ask()
	time.Sleep(400 * time.Millisecond)
	v.mood.Store("answers")
	if answer, err := r.ask(); answer != "well\n" {
		t.Fatal(answer, err)
	}
	r.ask() // one passes at once
	v.mood.Store("resets")
	type result struct {
		answer string
		err    error
	}
	results := make(chan result, 8)
	for range 8 {
		go func() { a, err := r.ask(); results <- result{a, err} }()
	}
	n := map[string]int{}
	for range 8 {
		x := <-results
		n[fmt.Sprintf("%q %v", x.answer, x.err)]++
	}
	// Two fail at the server, and open the breaker; six are told.
	told := 0
	for k, c := range n {
		if len(k) > 6 && k[:7] == `"later"` {
			told += c
		}
	}
	if told != 6 {
		t.Errorf("%d of 6 were told to come back: %v", told, n)
	}
}

// A client that leaves while its connection is being dialed does not wait in the line.
func TestHold_LeftWhileDialing(t *testing.T) {
	t.Parallel()
	h := newHole(t)
	r := start(t, shaper.TCP, h.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout, r.listen.ConnectTimeout = shaper.DownHold, shaper.Frequency{N: 10, Per: time.Second}, time.Minute, time.Second
	r.apply()
	for range 10 {
		c := dial(t, r.addr())
		time.Sleep(10 * time.Millisecond)
		c.Close()
	}
	testutil.WaitFor(t, "down", func() bool { return r.status().Down })
	time.Sleep(time.Second)                                                                                 // all that were dialed have failed
	testutil.WaitFor(t, "those that have left not to wait", func() bool { return r.status().Waiting <= 1 }) // one may be the trial
}

// One that is sent back to the line leaves it at its own deadline.
func TestHold_DeadlineOfResent(t *testing.T) {
	t.Parallel()
	g := script(t, func(n int, c *net.TCPConn) { io.Copy(io.Discard, c) })
	r := start(t, shaper.TCP, g.addr)
	r.listen.RetryUnanswered, r.listen.HoldTimeout, r.listen.Ramp = true, 8*time.Second, shaper.Frequency{N: 10, Per: time.Second}
	r.apply()
	began := time.Now()
	old := dial(t, r.addr())
	old.Write([]byte("x"))
	time.Sleep(4 * time.Second)
	young := dial(t, r.addr())
	young.Write([]byte("x"))
	testutil.WaitFor(t, "two to come", func() bool { return g.count() == 2 })
	time.Sleep(100 * time.Millisecond)
	r.proxy.Hold("l", shaper.Forever, false)
	g.mu.Lock()
	conns := append([]net.Conn(nil), g.all...)
	g.mu.Unlock()
	conns[1].Close() // the younger one first
	testutil.WaitFor(t, "one to wait", func() bool { return r.status().Waiting == 1 })
	conns[0].Close()
	testutil.WaitFor(t, "two to wait", func() bool { return r.status().Waiting == 2 })
	_, err := old.Read(make([]byte, 1))
	if took := time.Since(began); took > 11*time.Second { // the younger one leaves after 12 s
		t.Errorf("ended (%v) %v after it was accepted, hold_timeout is 8 s", err, took)
	}
}

// One tries each second, whoever leaves.
func TestHold_TrialsLeave(t *testing.T) {
	t.Parallel()
	h := newHole(t)
	r := start(t, shaper.TCP, h.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout, r.listen.ConnectTimeout = shaper.DownHold, shaper.Frequency{N: 10, Per: time.Second}, time.Minute, 2*time.Second
	r.apply()
	clients := map[netip.AddrPort]*net.TCPConn{}
	first := dial(t, r.addr())
	_ = first
	testutil.WaitFor(t, "down", func() bool { return r.status().Down })
	first.SetLinger(0)
	first.Close()
	testutil.WaitFor(t, "none", func() bool { return r.status().Waiting == 0 })
	for range 20 {
		c := dial(t, r.addr())
		clients[c.LocalAddr().(*net.TCPAddr).AddrPort()] = c
	}
	tried := 0
	began := time.Now()
	var was *session
	for time.Since(began) < 3*time.Second {
		var at netip.AddrPort
		r.proxy.home.loop.call(func(leaky.Time) {
			if s := r.proxy.listeners["l"].hold.trial; s != nil && s != was {
				was, at = s, s.clientAddr
			}
		})
		if c := clients[at]; c != nil {
			tried++
			c.SetLinger(0)
			c.Close()
		}
		time.Sleep(5 * time.Millisecond)
	}
	if took := time.Since(began); tried > 2+int(took.Seconds()) {
		t.Errorf("%d have tried within %v, want one each second", tried, took)
	}
}

// While a breaker stays open for longer than a hold, it is not known when the last one is served.
func TestHold_LastServedBreaker(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	r.listen.OnDown, r.listen.HoldTimeout = shaper.DownHold, 2*time.Minute
	r.apply()
	r.ask()
	r.ask()
	r.visitors(t, 5, testTimeout)
	testutil.WaitFor(t, "5 to wait", func() bool { return r.status().Waiting == 5 })
	r.proxy.Hold("l", 2*time.Second, false)
	if st := r.status(); st.LastServed >= 0 && st.LastServed < 55*time.Second {
		t.Errorf("the last is said to be served in %v, and the breaker is open for a minute", st.LastServed)
	}
}

// Nobody is served after hold_timeout.
func TestHold_LastServedTimeout(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	g.start()
	r := start(t, shaper.TCP, g.addr)
	r.listen.HoldTimeout, r.listen.Ramp = 20*time.Second, shaper.Frequency{N: 1, Per: time.Second}
	r.apply()
	r.proxy.Hold("l", 50*time.Second, false)
	r.visitors(t, 5, testTimeout)
	testutil.WaitFor(t, "5 to wait", func() bool { return r.status().Waiting == 5 })
	if st := r.status(); st.LastServed > 20*time.Second {
		t.Errorf("the last is said to be served in %v, and all leave in 20 s", st.LastServed)
	}
}

// Nor is it known while all of max_connections are in use.
func TestHold_LastServedFull(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	g.start()
	r := start(t, shaper.TCP, g.addr)
	r.listen.HoldTimeout, r.listen.Ramp = time.Minute, shaper.Frequency{N: 100, Per: time.Second}
	r.listen.Downstream[0].MaxConnections = 1
	r.apply()
	keep := dial(t, r.addr())
	readN(keep, 5)
	r.proxy.Hold("l", shaper.Forever, false)
	for range 5 {
		dial(t, r.addr())
	}
	testutil.WaitFor(t, "5 to wait", func() bool { return r.status().Waiting == 5 })
	r.proxy.Hold("l", 0, false)
	if last := r.status().LastServed; last >= 0 {
		t.Errorf("the last is said to be served in %v, and the only slot is taken", last)
	}
}

// A server that fails again on its ramp gets the ramp from its begin when it is back.
func TestRamp_FailsAgain(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	r := start(t, shaper.TCP, g.addr)
	r.listen.SlowStart, r.listen.Ramp, r.listen.HoldTimeout = 30*time.Second, shaper.Frequency{N: 10, Per: time.Second}, time.Minute
	r.listen.Check = shaper.HealthCheck{Interval: 50 * time.Millisecond, Timeout: time.Second, Rise: 1, Fall: 1}
	r.apply()
	down := func() bool { return r.proxy.Downstreams()[0].Down }
	testutil.WaitFor(t, "down", down)
	g.start()
	began := time.Now()
	testutil.WaitFor(t, "up", func() bool { began = time.Now(); return !down() })
	if rate := r.status().Rate; (rate > 11 || rate < 9) && time.Since(began) < time.Second {
		t.Fatal(rate)
	}
	time.Sleep(3500 * time.Millisecond)
	g.stop()
	testutil.WaitFor(t, "down", down)
	time.Sleep(3500 * time.Millisecond)
	g.start()
	testutil.WaitFor(t, "up", func() bool { return !down() })
	if rate := r.status().Rate; rate > 11 {
		t.Errorf("a server that has just come back gets %.1f/s, with a ramp of 10/s", rate)
	}
}

// A ramp does not grow while nothing can pass.
func TestRamp_NobodyPasses(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	g.start()
	r := start(t, shaper.TCP, g.addr)
	r.listen.HoldTimeout, r.listen.Ramp = time.Minute, shaper.Frequency{N: 10, Per: time.Second}
	r.apply()
	r.proxy.Hold("l", shaper.Forever, false)
	greeted := r.visitors(t, 60, time.Minute)
	testutil.WaitFor(t, "60 to wait", func() bool { return r.status().Waiting == 60 })
	r.proxy.DrainDownstream("l", g.addr, true)
	r.proxy.Hold("l", 0, false)
	time.Sleep(9500 * time.Millisecond)
	if n := len(g.came()); n > 0 {
		t.Fatal(n)
	}
	rate := r.status().Rate
	r.proxy.DrainDownstream("l", g.addr, false)
	greeted()
	at := g.came()
	slices.SortFunc(at, time.Time.Compare)
	if len(at) != 60 {
		t.Fatal(len(at))
	}
	if took := at[59].Sub(at[0]); took < 3*time.Second {
		t.Errorf("60 within %v, the first ones that it gets; the ramp was at %v/s", took, rate)
	}
}
