package conn

import (
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// stallOf is how long the loop stands still in a test.
const stallOf = 2 * time.Second

// stall lets the loop stand still while f runs, for stallOf at least, and returns when it went on.
func (r *proxyRig) stall(f func()) (over time.Time) {
	r.proxy.home.loop.call(func(leaky.Time) {
		begun := time.Now()
		f()
		time.Sleep(stallOf - time.Since(begun))
		over = time.Now()
	})
	return over
}

// reach waits until the only connection is in a stage.
func (r *proxyRig) reach(want stage) {
	r.t.Helper()
	testutil.WaitFor(r.t, "the stage of a connection", func() (ok bool) {
		r.proxy.home.loop.call(func(leaky.Time) {
			all := r.proxy.home.sessions.all
			ok = len(all) == 1 && all[0].stage == want
		})
		return ok
	})
}

// An answer that goes on while the loop stands still is not over, however long that takes.
func TestUnheard_Turn(t *testing.T) {
	t.Parallel()
	const gap = stallOf * 3 / 4
	goesOn, went, another := make(chan struct{}), make(chan struct{}), make(chan time.Time, 1)
	r := start(t, shaper.TCP, server(t, func(c *net.TCPConn) {
		b := make([]byte, 1)
		if io.ReadFull(c, b); b[0] == '2' {
			another <- time.Now()
			return
		}
		c.Write(b)
		<-goesOn
		c.Write(b)
		close(went)
		c.Read(b)
	}), turnLimit(1, gap))
	first, second := dial(t, r.addr()), dial(t, r.addr())
	first.Write([]byte("1"))
	if _, err := io.ReadFull(first, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	second.Write([]byte("2"))
	over := r.stall(func() {
		close(goesOn)
		<-went
	})
	if at := <-another; at.Sub(over) < gap*9/10 {
		t.Errorf("another question came %v after an answer went on, want %v", at.Sub(over), gap)
	}
}

// A connection is not idle, nor a client silent, if it was the loop that did not listen.
func TestUnheard_Silence(t *testing.T) {
	t.Parallel()
	const timeout = stallOf * 3 / 4
	for name, set := range map[string]func(*shaper.Listener){
		"idle":       func(l *shaper.Listener) { l.TCPIdleTimeout = timeout },
		"first byte": func(l *shaper.Listener) { l.FirstByteTimeout = timeout },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
			set(&r.listen)
			r.apply()
			c := dial(t, r.addr())
			r.reach(stageRelaying)
			r.stall(func() { c.Write([]byte("q")) })
			if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
				t.Error(err)
			}
		})
	}
}

// Nor are many, of which epoll reports a part at a time.
func TestUnheard_Many(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	all := make([]*net.TCPConn, 3*len(r.proxy.home.loop.events))
	for i := range all {
		all[i] = dial(t, r.addr())
	}
	for _, c := range all {
		if !asks(c, testTimeout) {
			t.Fatal("no answer")
		}
	}
	r.proxy.home.loop.call(func(now leaky.Time) {
		for _, s := range r.proxy.home.sessions.all {
			s.activity.lastActive = now
		}
	})
	r.listen.TCPIdleTimeout = stallOf * 3 / 4
	r.apply()
	r.stall(func() {
		for _, c := range all {
			c.Write([]byte("q"))
		}
	})
	ended := 0
	for _, c := range all {
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			ended++
		}
	}
	if ended > 0 {
		t.Errorf("%d of %d connections ended", ended, len(all))
	}
}

// A reload that gives a connect more time does so while one goes on, and does not keep the loop busy.
func TestUnheard_LongerConnect(t *testing.T) {
	t.Parallel()
	h := newHole(t)
	r := start(t, shaper.TCP, h.addr)
	r.listen.ConnectTimeout = 2 * time.Second
	r.apply()
	dial(t, r.addr()).Write([]byte("q"))
	r.reach(stageDialing)
	begun := time.Now()
	r.listen.ConnectTimeout = 4 * time.Second
	r.apply()
	timedOut := &r.proxy.Downstreams()[0].State.DialsTimedOut
	testutil.WaitFor(t, "the timeout", func() bool { return timedOut.Load() == 1 })
	if took := time.Since(begun); took < 2*time.Second {
		t.Errorf("it was over after %v", took)
	}
	r.proxy.home.loop.call(func(leaky.Time) {
		if n := r.proxy.home.loop.rounds; n > 100_000 {
			t.Errorf("the loop made %d rounds", n)
		}
	})
}

// A header that came while the loop stood still is in time.
func TestUnheard_Header(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	r.listen.AcceptProxyFrom = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	r.apply()
	c := dial(t, r.addr())
	c.Write([]byte("PROXY TCP4 192.0.2.1 "))
	r.reach(stageHeader)
	r.stall(func() {
		c.Write([]byte("192.0.2.2 1 2\r\nq"))
		time.Sleep(headerTimeout.Duration() + time.Second/2)
	})
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Error(err)
	}
}

// A downstream that accepts a connection while the loop stands still is not one that does not answer.
func TestUnheard_Dial(t *testing.T) {
	t.Parallel()
	h := newHole(t)
	r := start(t, shaper.TCP, h.addr)
	r.listen.ConnectTimeout = stallOf * 3 / 4
	r.apply()
	c := dial(t, r.addr())
	c.Write([]byte("q"))
	r.reach(stageDialing)
	r.stall(func() { h.open(t, stallOf) })
	r.reach(stageRelaying)
	if n := r.proxy.Downstreams()[0].State.DialsTimedOut.Load(); n != 0 {
		t.Errorf("%d dials failed", n)
	}
}

// gated answers each question, but one in its own time.
type gated struct {
	addr                    string
	asked, goesOn, answered chan struct{}
}

func newGated(t *testing.T) *gated {
	g := &gated{asked: make(chan struct{}), goesOn: make(chan struct{}), answered: make(chan struct{})}
	var once sync.Once
	g.addr = server(t, func(c *net.TCPConn) {
		b := make([]byte, 1)
		io.ReadFull(c, b)
		once.Do(func() {
			close(g.asked)
			<-g.goesOn
			defer close(g.answered)
		})
		c.Write(b)
		c.Read(b)
	})
	return g
}

// answer lets the answer go.
func (g *gated) answer() {
	close(g.goesOn)
	<-g.answered
}

// A check that was answered while the loop stood still has not failed, nor has a downstream with a breaker.
func TestUnheard_Downstream(t *testing.T) {
	t.Parallel()
	const timeout = stallOf * 3 / 4
	breaker := func(l *shaper.Listener) {
		l.Breaker = shaper.Breaker{After: 1, Of: []shaper.Failure{shaper.FailedFirstByte}, For: time.Hour, Probe: 1, Timeout: timeout}
	}
	for name, set := range map[string]func(*shaper.Listener){
		"check": func(l *shaper.Listener) {
			l.Check = shaper.HealthCheck{Interval: 10 * time.Millisecond, Timeout: timeout, Rise: 1, Fall: 1, Send: "q", Expect: "q"}
		},
		"breaker":                    breaker,
		"breaker of one that leaves": breaker,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newGated(t)
			r := start(t, shaper.TCP, g.addr)
			set(&r.listen)
			r.apply()
			var c *net.TCPConn
			if r.listen.Breaker.After > 0 {
				c = dial(t, r.addr())
				c.Write([]byte("q"))
			}
			<-g.asked
			r.stall(func() {
				if name == "breaker of one that leaves" {
					c.SetLinger(0)
					c.Close()
				}
				g.answer()
			})
			r.proxy.home.loop.call(func(leaky.Time) {
				if d := r.proxy.home.listeners["l"].downstreams[0]; d.lastError != nil || d.breaker.openUntil != 0 {
					t.Errorf("the downstream has failed: %v", d.lastError)
				}
			})
		})
	}
}

// A flow is not idle if it was the loop that did not listen.
func TestUnheard_Flow(t *testing.T) {
	t.Parallel()
	var from [2]netip.AddrPort
	downstream := testutil.ListenUDP(t, "127.0.0.1:0")
	r := start(t, shaper.UDP, downstream.LocalAddr().String())
	r.listen.UDPIdleTimeout = stallOf * 3 / 4
	r.apply()
	c := udpFrom(t, "127.0.0.1", r.addr())
	ask := func(i int) {
		b := make([]byte, 1)
		downstream.SetReadDeadline(time.Now().Add(testTimeout))
		_, at, err := downstream.ReadFromUDPAddrPort(b)
		if err != nil {
			t.Fatal(err)
		}
		from[i] = at
		downstream.WriteToUDPAddrPort(b, at)
		c.SetReadDeadline(time.Now().Add(testTimeout))
		if _, err := c.Read(b); err != nil {
			t.Fatal(err)
		}
	}
	c.Write([]byte("1"))
	ask(0)
	r.stall(func() { c.Write([]byte("2")) })
	ask(1)
	if from[0] != from[1] {
		t.Errorf("the flow came from %v before, and from %v after", from[0], from[1])
	}
}
