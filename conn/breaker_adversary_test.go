package conn

import (
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// serveFunc starts a server that does f with each connection.
func serveFunc(t *testing.T, f func(n int32, c *net.TCPConn)) (addr string, came *atomic.Int32) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	came = new(atomic.Int32)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			n := came.Add(1)
			go func() { defer c.Close(); f(n, c.(*net.TCPConn)) }()
		}
	}()
	return l.Addr().String(), came
}

// breakerOf is breaker of the downstream at addr.
func (r *proxyRig) breakerOf(addr string) (b breaker) {
	to := netip.MustParseAddrPort(addr)
	r.proxy.home.loop.call(func(leaky.Time) {
		for _, d := range r.proxy.listeners["l"].downstreams {
			if d.Port == to.Port() {
				b = d.breaker
			}
		}
	})
	return b
}

func (r *proxyRig) addDownstream(addr string) {
	to := netip.MustParseAddrPort(addr)
	r.listen.Downstream = append(r.listen.Downstream, shaper.Downstream{Host: to.Addr().String(), Port: to.Port()})
}

// A connection that is idle does not reset the count of failed dials each second.
func TestBreaker_IdleConnectionResetsCount(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "answers")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 3, Of: allFailures[:1], For: time.Minute, Probe: 1, Timeout: 500 * time.Millisecond})
	dial(t, r.addr()) // says nothing
	testutil.WaitFor(t, "it to come", func() bool { return v.came.Load() == 1 })
	time.Sleep(600 * time.Millisecond)
	v.l.Close()
	for range 8 { // failures in a row, with no success between
		r.ask()
		time.Sleep(600 * time.Millisecond)
	}
	if open, _ := r.breaker(); !open {
		t.Errorf("after 8 failed dials in a row the breaker is closed: %+v", r.breakerOf(v.addr))
	}
}

// An idle connection that was a trial once does not close the breaker when that opens again.
func TestBreaker_OldTrialCloses(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "answers")
	v.l.Close()
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures[:1], For: 300 * time.Millisecond, Probe: 1, Timeout: 500 * time.Millisecond})
	r.ask()
	r.ask()
	v.start()
	testutil.WaitFor(t, "a trial to be due", func() bool { open, left := r.breaker(); return open && left == 0 })
	dial(t, r.addr()) // the trial, which says nothing
	testutil.WaitFor(t, "the breaker to close", func() bool { open, _ := r.breaker(); return !open })
	v.l.Close()
	r.listen.Breaker.For = time.Minute
	r.apply()
	testutil.WaitFor(t, "the breaker to open", func() bool { r.ask(); open, _ := r.breaker(); return open })
	began := time.Now()
	for time.Since(began) < 3*time.Second {
		if open, _ := r.breaker(); !open {
			t.Fatalf("the breaker, open for a minute, is closed after %v, and nobody listens", time.Since(began))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// The same with failures of all kinds: a trial of before that is answered late.
func TestBreaker_TrialOfBefore(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: 300 * time.Millisecond, Probe: 1, Timeout: 200 * time.Millisecond})
	r.ask()
	r.ask()
	due := func() bool { open, left := r.breaker(); return open && left == 0 }
	testutil.WaitFor(t, "a trial to be due", due)
	old := dial(t, r.addr())
	v.mood.Store("answers")
	testutil.WaitFor(t, "another trial", func() bool { answer, _ := r.ask(); return answer != "" })
	r.listen.Breaker.For = time.Minute
	r.apply()
	v.mood.Store("resets")
	testutil.WaitFor(t, "the breaker to open", func() bool { r.ask(); open, _ := r.breaker(); return open })
	v.mood.Store("answers")
	old.Write([]byte("x\n"))
	io.ReadFull(old, make([]byte, 5))
	if open, _ := r.breaker(); !open {
		t.Error("a connection that was made before the breaker opened has closed it")
	}
}

// A trial that trickles keeps others out for no longer than the timeout.
func TestBreaker_Trickle(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: 200 * time.Millisecond, Probe: 1, Timeout: time.Second})
	r.ask()
	r.ask()
	v.mood.Store("answers")
	testutil.WaitFor(t, "a trial to be due", func() bool { open, left := r.breaker(); return open && left == 0 })
	c := dial(t, r.addr())
	stop := make(chan bool)
	defer close(stop)
	go func() {
		for {
			c.Write([]byte("x")) // no line yet
			select {
			case <-stop:
				return
			case <-time.After(300 * time.Millisecond):
			}
		}
	}()
	time.Sleep(200 * time.Millisecond)
	began := time.Now()
	for time.Since(began) < testTimeout {
		if answer, _ := r.ask(); answer != "" {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Errorf("for 20 s, one that sends a byte now and then has kept out all others: %+v", r.breakerOf(v.addr))
}

// crowd lets 30 or more wait at a breaker, makes v answer, and checks that they come at a ramp of 20/s.
func (r *proxyRig) crowd(t *testing.T, v *moodyServer, end func()) {
	t.Helper()
	for range 40 {
		dial(t, r.addr()).Write([]byte("how are you?\n"))
	}
	// Trials take some of them.
	testutil.WaitFor(t, "30 to wait", func() bool { return r.status().Waiting >= 30 })
	came := v.came.Load()
	v.mood.Store("answers")
	if end != nil {
		end()
	}
	checkCrowd(t, v, came)
}

// checkCrowd waits for some connections after the first n, and checks that those after the first of them, which may be a trial,
// came at a ramp of 20/s.
func checkCrowd(t *testing.T, v *moodyServer, n int32) {
	t.Helper()
	testutil.WaitFor(t, "some to come", func() bool { return v.came.Load() >= n+12 })
	at := v.arrivals(n)
	slices.SortFunc(at, time.Time.Compare)
	checkRamp(t, at[1:], 20)
}

// The ramp applies if the only other downstream is drained.
func TestBreaker_DrainedOther(t *testing.T) {
	t.Parallel()
	v, other := newMoodyServer(t, "resets"), newMoodyServer(t, "answers")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Second, Probe: 1, Timeout: time.Second})
	r.addDownstream(other.addr)
	r.listen.OnDown = shaper.DownHold
	r.apply()
	r.proxy.DrainDownstream("", netip.MustParseAddrPort(other.addr).String(), true)
	r.ask()
	r.ask()
	r.crowd(t, v, nil)
	if n := other.came.Load(); n > 0 {
		t.Errorf("%d came to the drained one", n)
	}
}

// control of TestBreaker_DrainedOther
func TestBreaker_NoOther(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Second, Probe: 1, Timeout: time.Second})
	r.listen.OnDown = shaper.DownHold
	r.apply()
	r.ask()
	r.ask()
	r.crowd(t, v, nil)
}

// A reload that removes the breaker does not let all in at once.
func TestBreaker_ReloadStampede(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	r.listen.OnDown = shaper.DownHold
	r.apply()
	r.ask()
	r.ask()
	r.crowd(t, v, func() { r.listen.Breaker = shaper.Breaker{}; r.apply() })
}

// Those that wait for a limit when the breaker closes come at the ramp, too.
func TestBreaker_LimitWaitersSkipRamp(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "answers")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: 300 * time.Millisecond, Probe: 1, Timeout: 5 * time.Second})
	limit := shaper.Limit{Name: "cap", MaxConnections: 41, QueueTimeout: time.Minute, MaxQueue: 1000}
	r.apply(limit)
	var held []*net.TCPConn
	for range 40 {
		held = append(held, dial(t, r.addr()))
	}
	testutil.WaitFor(t, "all to come", func() bool { return v.came.Load() == 40 })
	v.mood.Store("resets")
	r.ask()
	r.ask()
	v.mood.Store("answers")
	testutil.WaitFor(t, "a trial to be due", func() bool { open, left := r.breaker(); return open && left == 0 })
	trial := dial(t, r.addr()) // takes the last slot of the limit
	testutil.WaitFor(t, "it to come", func() bool { return v.came.Load() == 43 })
	for range 40 {
		c := dial(t, r.addr())
		c.Write([]byte("how are you?\n"))
	}
	testutil.WaitFor(t, "all to wait", func() bool { return r.shaper.Policy().State(0).Waiting.Load() == 40 })
	trial.Write([]byte("x\n"))
	io.ReadFull(trial, make([]byte, 5))
	if open, _ := r.breaker(); open || r.status().Rate == 0 {
		t.Fatal("the breaker is open, or there is no ramp")
	}
	came := v.came.Load()
	for _, c := range held {
		c.Close()
	}
	checkCrowd(t, v, came)
}

// A server that greets, and resets each connection at the first question, opens the breaker.
func TestBreaker_GreetsThenResets(t *testing.T) {
	t.Parallel()
	addr, came := serveFunc(t, func(_ int32, c *net.TCPConn) {
		c.Write([]byte("hello"))
		c.Read(make([]byte, 100))
		c.SetLinger(0)
	})
	r := startBreaker(t, addr, shaper.Breaker{After: 3, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	for range 10 {
		c := dial(t, r.addr())
		io.ReadFull(c, make([]byte, 5))
		c.Write([]byte("how are you?\n"))
		if b, err := io.ReadAll(c); err == nil {
			t.Fatalf("read %q, %v", b, err)
		}
		if open, _ := r.breaker(); open {
			return
		}
	}
	t.Errorf("%d connections in a row were reset when they owed an answer, and the breaker is closed: %+v", came.Load(), r.breakerOf(addr))
}

// A server that answers too late each time opens the breaker.
func TestBreaker_LateAnswerResetsCount(t *testing.T) {
	t.Parallel()
	addr, came := serveFunc(t, func(_ int32, c *net.TCPConn) {
		c.Read(make([]byte, 100))
		time.Sleep(2500 * time.Millisecond)
		c.Write([]byte("well\n"))
	})
	r := startBreaker(t, addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	for range 4 {
		r.ask()
	}
	if open, _ := r.breaker(); !open {
		t.Errorf("%d in a row were answered too late, and the breaker is closed: %+v", came.Load(), r.breakerOf(addr))
	}
}

// A server that closes what it accepts at once opens the breaker if clients send something.
func TestBreaker_ClosesAtOnce(t *testing.T) {
	t.Parallel()
	for _, of := range [][]shaper.Failure{allFailures[2:], allFailures} {
		addr, came := serveFunc(t, func(_ int32, c *net.TCPConn) {})
		r := startBreaker(t, addr, shaper.Breaker{After: 3, Of: of, For: time.Minute, Probe: 1, Timeout: time.Second})
		for range 20 {
			r.ask()
		}
		if open, _ := r.breaker(); !open {
			t.Errorf("of %v: %d in a row have sent something, and were closed without a word, and the breaker is closed: %+v", of, came.Load(), r.breakerOf(addr))
		}
	}
}

// A server that resets without a word fails "first-byte".
func TestBreaker_ResetIsNoFirstByte(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 3, Of: allFailures[2:], For: time.Minute, Probe: 1, Timeout: time.Second})
	for range 10 {
		r.ask()
	}
	if open, _ := r.breaker(); !open {
		t.Errorf("%d in a row got no first byte, and the breaker is closed", v.came.Load())
	}
}

// A client that says nothing, and is closed, does not count, with retry_unanswered neither.
func TestBreaker_SilentClientRetried(t *testing.T) {
	t.Parallel()
	for _, retry := range []bool{false, true} {
		addr, came := serveFunc(t, func(_ int32, c *net.TCPConn) { time.Sleep(50 * time.Millisecond) })
		r := startBreaker(t, addr, shaper.Breaker{After: 3, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
		r.listen.RetryUnanswered = retry
		r.apply()
		c := dial(t, r.addr())
		io.ReadAll(c)
		if open, _ := r.breaker(); open {
			t.Errorf("retry %v: one client that has said nothing (%d connections) has opened the breaker", retry, came.Load())
		}
	}
}

// A client that says nothing, and is reset, does not count: the server owes it no answer.
func TestBreaker_SilentClientReset(t *testing.T) {
	t.Parallel()
	addr, _ := serveFunc(t, func(_ int32, c *net.TCPConn) { time.Sleep(50 * time.Millisecond); c.SetLinger(0) })
	r := startBreaker(t, addr, shaper.Breaker{After: 3, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	for range 3 {
		io.ReadAll(dial(t, r.addr()))
	}
	if open, _ := r.breaker(); open {
		t.Error("three clients that have said nothing have opened the breaker")
	}
}

// A client that connects and leaves is no success where resets count.
func TestBreaker_ConnectAndLeave(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 3, Of: allFailures[:2], For: 300 * time.Millisecond, Probe: 1, Timeout: 10 * time.Second})
	leave := func() { // such as the health check of a balancer
		came := v.came.Load()
		c := dial(t, r.addr())
		testutil.WaitFor(t, "it to come", func() bool { return v.came.Load() > came })
		c.Close()
		r.settle()
	}
	for range 3 {
		r.ask()
		if open, _ := r.breaker(); !open {
			leave()
		}
	}
	if open, _ := r.breaker(); !open {
		t.Error("all that have asked were reset, and the breaker is closed")
	}
	testutil.WaitFor(t, "it to open", func() bool { r.ask(); open, _ := r.breaker(); return open })
	testutil.WaitFor(t, "a trial to be due", func() bool { open, left := r.breaker(); return open && left == 0 })
	leave()
	if open, _ := r.breaker(); !open {
		t.Error("a trial that got no answer has closed the breaker")
	}
}

// A client is refused at once though an operator has resumed the listener meanwhile.
func TestBreaker_ResumeDelaysRefusals(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	r.listen.Ramp = shaper.Frequency{N: 1, Per: time.Minute} // and hold_timeout is 10 s
	r.apply()
	r.ask()
	r.ask()
	r.proxy.Hold("l", time.Minute, false)
	r.proxy.Hold("l", 0, false)
	began := time.Now()
	done := make(chan bool)
	for range 5 {
		go func() { r.ask(); done <- true }()
	}
	for range 5 {
		<-done
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("5 clients were refused within %v", took)
	}
}

// What a client is told when one downstream has failed it, and the breaker of the other one is open.
func TestBreaker_RetryAfterOfOther(t *testing.T) {
	t.Parallel()
	bad, good := newMoodyServer(t, "resets"), newMoodyServer(t, "answers")
	r := startBreaker(t, bad.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Hour, Probe: 1, Timeout: time.Second, Reply: "left " + shaper.RetryAfter})
	r.ask()
	r.ask()
	r.addDownstream(good.addr)
	r.apply()
	if answer, _ := r.ask(); answer != "well\n" {
		t.Fatal(answer)
	}
	good.l.Close() // for a moment
	c := dial(t, r.addr())
	c.Write([]byte("how are you?\n"))
	all, _ := io.ReadAll(c)
	good.start()
	if answer, _ := r.ask(); answer != "well\n" {
		t.Fatal(answer)
	}
	if len(all) > len("left 99") {
		t.Errorf("a client is told %q, and the next one is served at once", all)
	}
}

// All but the drained downstreams are shut off: clients are refused at once.
func TestBreaker_DrainedDelaysRefusal(t *testing.T) {
	t.Parallel()
	v, other := newMoodyServer(t, "resets"), newMoodyServer(t, "answers")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second, Reply: "left " + shaper.RetryAfter})
	r.addDownstream(other.addr)
	r.listen.ConnectTimeout = 15 * time.Second
	r.apply()
	r.proxy.DrainDownstream("", netip.MustParseAddrPort(other.addr).String(), true)
	r.ask()
	r.ask()
	began := time.Now()
	c := dial(t, r.addr())
	c.Write([]byte("how are you?\n"))
	all, err := io.ReadAll(c)
	if took := time.Since(began); took > 7*time.Second || !strings.HasPrefix(string(all), "left ") {
		t.Errorf("a client was told %q, %v, after %v", all, err, took)
	}
}

// One that is refused when it is made again gets the reply at once: it has asked already.
func TestBreaker_ReplyToRetried(t *testing.T) {
	t.Parallel()
	fastest := time.Hour
	for range 10 { // a busy machine may delay some
		v := newMoodyServer(t, "resets")
		r := startBreaker(t, v.addr, shaper.Breaker{After: 1, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second, Reply: "left " + shaper.RetryAfter})
		r.listen.RetryUnanswered = true
		r.apply()
		c := dial(t, r.addr())
		began := time.Now()
		c.Write([]byte("how are you?\n"))
		all, err := io.ReadAll(c)
		fastest = min(fastest, time.Since(began))
		if !strings.HasPrefix(string(all), "left ") {
			t.Fatalf("a client was told %q, %v", all, err)
		}
		if fastest < 500*time.Millisecond { // the reply to one that has said nothing comes after a second
			return
		}
	}
	t.Errorf("a client was told after %v at least", fastest)
}
