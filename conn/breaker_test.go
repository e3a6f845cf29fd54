package conn

import (
	"bufio"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// moodyServer reads a line of each connection, and does with it what its mood is.
type moodyServer struct {
	t    testing.TB
	addr string
	l    net.Listener
	mood atomic.Value // "answers", "resets", "closes" or "hangs"
	came atomic.Int32 // connections

	mu sync.Mutex
	at []time.Time // when the connections came
}

func newMoodyServer(t testing.TB, mood string) *moodyServer {
	v := &moodyServer{t: t, addr: testutil.FreeAddr(t, "tcp")}
	v.mood.Store(mood)
	v.start()
	t.Cleanup(func() { v.l.Close() })
	return v
}

func (v *moodyServer) start() {
	l, err := net.Listen("tcp4", v.addr)
	if err != nil {
		v.t.Fatal(err)
	}
	v.l = l
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			at := arrival(c)
			v.mu.Lock()
			v.at = append(v.at, at)
			v.mu.Unlock()
			v.came.Add(1)
			go v.serve(c.(*net.TCPConn))
		}
	}()
}

func (v *moodyServer) serve(c *net.TCPConn) {
	defer c.Close()
	in := bufio.NewReader(c)
	for {
		if _, err := in.ReadString('\n'); err != nil {
			return
		}
		switch v.mood.Load() {
		case "answers":
			c.Write([]byte("well\n"))
		case "resets":
			c.SetLinger(0)
			return
		case "closes":
			return
		case "hangs":
			time.Sleep(4 * time.Second)
			return
		}
	}
}

// arrivals returns when connections came, but for the first n.
func (v *moodyServer) arrivals(n int32) []time.Time {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.at[n:])
}

// ask sends a line on a new connection, and returns the answer.
func (r *proxyRig) ask() (answer string, err error) {
	c, err := net.Dial("tcp4", r.addr())
	if err != nil { // the reset came first
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(testTimeout))
	c.Write([]byte("how are you?\n"))
	all, err := io.ReadAll(io.LimitReader(c, 5))
	return string(all), err
}

// startBreaker starts a listener with a breaker in front of v.
func startBreaker(t *testing.T, downstream string, b shaper.Breaker) *proxyRig {
	r := start(t, shaper.TCP, downstream)
	r.listen.Breaker, r.listen.EjectAfter = b, 0
	r.listen.Ramp, r.listen.HoldTimeout = shaper.Frequency{N: 20, Per: time.Second}, 10*time.Second
	r.apply()
	return r
}

func (r *proxyRig) breaker() (open bool, retryIn time.Duration) {
	d := r.proxy.Downstreams()[0]
	return d.BreakerOpen, d.RetryIn
}

var allFailures = []shaper.Failure{shaper.FailedDial, shaper.FailedReset, shaper.FailedFirstByte}

// A breaker opens after failures of a kind that counts, and no connection reaches the downstream until one may try.
// That decides. When the breaker has closed, the others come at the ramp.
func TestBreaker(t *testing.T) {
	for _, tt := range []struct {
		mood string
		of   []shaper.Failure
		open bool
	}{
		{"down", allFailures, true},
		{"down", allFailures[:1], true},
		{"down", allFailures[1:], false},
		{"resets", allFailures, true},
		{"resets", allFailures[1:2], true},
		{"resets", allFailures[:1], false},
		{"closes", allFailures, true},
		{"closes", allFailures[:2], false},
		{"hangs", allFailures[2:], true},
		{"hangs", allFailures[:2], false},
		{"answers", allFailures, false},
	} {
		var kinds []string
		for _, f := range tt.of {
			kinds = append(kinds, f.String())
		}
		t.Run(tt.mood+" "+strings.Join(kinds, ","), func(t *testing.T) {
			t.Parallel()
			const lasts = 3 * time.Second
			v := newMoodyServer(t, tt.mood)
			if tt.mood == "down" {
				v.l.Close()
			}
			r := startBreaker(t, v.addr, shaper.Breaker{After: 3, Of: tt.of, For: lasts, Probe: 1, Timeout: time.Second, Reply: "left " + shaper.RetryAfter})
			done := make(chan bool)
			for range 3 {
				go func() { r.ask(); done <- true }()
				if tt.mood != "hangs" {
					<-done
				}
			}
			if tt.mood == "hangs" { // they hang at once
				for range 3 {
					<-done
				}
			}
			open, retryIn := r.breaker()
			if open != tt.open {
				t.Fatalf("the breaker is open: %v, want %v", open, tt.open)
			}
			if !open {
				return
			}
			r.shutOff(t, v, tt.mood == "hangs", retryIn)
			if tt.mood == "hangs" {
				return
			}

			// The one that may try fails: the breaker opens again.
			testutil.WaitFor(t, "a trial to be due", func() bool { _, left := r.breaker(); return left == 0 })
			r.ask()
			if _, left := r.breaker(); left < lasts/2 {
				t.Errorf("after a trial failed, the next one is due in %v", left)
			}
			if v.mood.Store("answers"); tt.mood == "down" {
				v.start()
			}
			came := v.came.Load()
			testutil.WaitFor(t, "a trial to be due", func() bool { _, left := r.breaker(); return left == 0 })
			if v.came.Load() != came {
				t.Error("connections have reached the server meanwhile")
			}
			if answer, err := r.ask(); answer != "well\n" {
				t.Errorf("the trial was answered %q, %v", answer, err)
			}
			if open, _ = r.breaker(); open {
				t.Error("the breaker is open after an answer")
			}
			if rate := r.status().Rate; rate < 19 {
				t.Errorf("the ramp is %v/s", rate)
			}
			if n := r.downstreamState().BreakerOpened.Load(); n != 1 {
				t.Errorf("the breaker has opened %d times", n)
			}
		})
	}
}

// shutOff checks that nothing reaches v while the breaker is open, and what clients are told.
func (r *proxyRig) shutOff(t *testing.T, v *moodyServer, slow bool, retryIn time.Duration) {
	t.Helper()
	if slow {
		return // it may be due already
	}
	came := v.came.Load()
	began := time.Now()
	c := dial(t, r.addr())
	c.Write([]byte("how are you?\n"))
	all, err := io.ReadAll(c)
	left, found := strings.CutPrefix(string(all), "left ")
	seconds, _ := strconv.Atoi(left)
	if !found || seconds < 1 || seconds > 7 { // as long as it is open, or up to twice that
		t.Errorf("a client was told %q, %v; the breaker is open for %v", all, err, retryIn)
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("a client was refused after %v", took)
	}
	if v.came.Load() != came {
		t.Error("a connection has reached the server")
	}
	if err := r.proxy.Downstreams()[0].Error; !strings.Contains(err, "breaker is open") {
		t.Errorf("the downstream's error is %q", err)
	}
}

// Only so many try a downstream at once as may, and one that says nothing keeps others from it for as long as an answer
// may take.
func TestBreaker_Trials(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: 200 * time.Millisecond, Probe: 2, Timeout: 3 * time.Second})
	r.ask()
	r.ask()
	v.mood.Store("answers")
	testutil.WaitFor(t, "trials to be due", func() bool { open, left := r.breaker(); return open && left == 0 })
	came, began := v.came.Load(), time.Now()
	silent := []*net.TCPConn{dial(t, r.addr()), dial(t, r.addr())}
	testutil.WaitFor(t, "two to try", func() bool { return v.came.Load() == came+2 })
	if _, err := r.ask(); err == nil && time.Since(began) < r.listen.Breaker.Timeout {
		t.Error("a third one was served")
	}
	silent[0].Close()
	testutil.WaitFor(t, "another one to try", func() bool { answer, _ := r.ask(); return answer != "" })
	if open, _ := r.breaker(); open {
		t.Error("the breaker is open after an answer")
	}

	v.mood.Store("resets")
	silent[1].Write([]byte("how are you?\n")) // a trial of before
	io.ReadAll(silent[1])
	r.ask()
	testutil.WaitFor(t, "trials to be due", func() bool { open, left := r.breaker(); return open && left == 0 })
	v.mood.Store("answers")
	for range 2 {
		silent = append(silent, dial(t, r.addr()))
	}
	testutil.WaitFor(t, "another one to try", func() bool { answer, _ := r.ask(); return answer != "" })
}

// With on_down = "hold", connections wait while the breaker is open.
func TestBreaker_Hold(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: 4 * time.Second, Probe: 1, Timeout: time.Second})
	r.listen.OnDown = shaper.DownHold
	r.apply()
	r.ask()
	r.ask()
	if open, _ := r.breaker(); !open {
		t.Fatal("the breaker is closed")
	}
	v.mood.Store("answers")
	came := v.came.Load()
	answers := make(chan string)
	for range 10 {
		go func() { answer, _ := r.ask(); answers <- answer }()
	}
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 10 })
	if v.came.Load() != came {
		t.Error("a connection has reached the server")
	}
	for range 10 {
		if answer := <-answers; answer != "well\n" {
			t.Errorf("one was answered %q", answer)
		}
	}
}

// With several downstreams, the one that fails is left out, and nobody is refused.
func TestBreaker_SecondDownstream(t *testing.T) {
	t.Parallel()
	bad, good := newMoodyServer(t, "resets"), newMoodyServer(t, "answers")
	r := startBreaker(t, bad.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	to := r.listen.Downstream[0]
	_, port, _ := net.SplitHostPort(good.addr)
	n, _ := strconv.Atoi(port)
	r.listen.Downstream = append(r.listen.Downstream, shaper.Downstream{Host: to.Host, Port: uint16(n)})
	r.apply()
	failed := 0
	for range 20 {
		if answer, _ := r.ask(); answer == "" {
			failed++
		}
	}
	if failed != 2 || bad.came.Load() != 2 || r.status().Rate != 0 {
		t.Errorf("%d of 20 have failed, and %d were at the server that resets; the ramp is %v/s", failed, bad.came.Load(), r.status().Rate)
	}

	r.listen.Breaker = shaper.Breaker{} // a reload
	r.apply()
	if open, _ := r.breaker(); open {
		t.Error("a breaker that is gone is open")
	}
}

// What fails because of this host does not open a breaker.
func TestBreaker_LocalErrors(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "answers")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 1, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	from := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 2}}
	reuse := func(fd int) { unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }
	other := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.Addr[:]}, Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { reuse(int(fd)) })
	}}
	c, err := other.Dial("tcp4", v.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	from.Port = c.LocalAddr().(*net.TCPAddr).Port
	r.proxy.OnSocket(func(fd int) error { // the kernel has no other connection from this port to v
		reuse(fd)
		unix.Bind(fd, from)
		return nil
	})
	if answer, err := r.ask(); err == nil && answer != "" {
		t.Fatalf("answered %q: the dial has not failed", answer)
	}
	if open, _ := r.breaker(); open {
		t.Error("the breaker is open")
	}
	r.proxy.OnSocket(nil)
	if answer, _ := r.ask(); answer != "well\n" {
		t.Errorf("answered %q", answer)
	}
}
