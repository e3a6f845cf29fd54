package conn

import (
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// A few clients that send half a request do not open the breaker of a server that answers others all the time.
func TestBreaker_HalfRequests(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "answers")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 5, Of: allFailures, For: time.Minute, Probe: 1, Timeout: 2 * time.Second})
	for range 5 {
		dial(t, r.addr()).Write([]byte("x")) // no line
	}
	answered := 0
	for began := time.Now(); time.Since(began) < 6*time.Second; time.Sleep(5 * time.Millisecond) {
		if answer, _ := r.ask(); answer == "well\n" {
			answered++
		}
		if open, _ := r.breaker(); open {
			t.Fatalf("5 half requests have opened the breaker, while %d others were answered in a row (%v)", answered, time.Since(began))
		}
	}
}

// One that could not be connected to one downstream, while the breaker of the other, full one is open, is not left to wait for that.
func TestBreaker_WaitsForShutOff(t *testing.T) {
	t.Parallel()
	bad, good := newMoodyServer(t, "answers"), newMoodyServer(t, "answers")
	r := startBreaker(t, bad.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	r.listen.OnDown = shaper.DownHold
	r.apply()
	for range 3 {
		dial(t, r.addr())
	}
	testutil.WaitFor(t, "all to come", func() bool { return bad.came.Load() == 3 })
	bad.mood.Store("resets")
	r.ask()
	r.ask()
	r.listen.Downstream[0].MaxConnections = 3
	r.addDownstream(good.addr)
	r.apply()
	if answer, _ := r.ask(); answer != "well\n" {
		t.Fatal(answer)
	}
	good.l.Close()
	answers := make(chan string)
	began := time.Now()
	go func() { answer, _ := r.ask(); answers <- answer }()
	testutil.WaitFor(t, "it to wait", func() bool { return r.status().Waiting == 1 })
	good.start()
	if answer, _ := r.ask(); answer != "well\n" {
		t.Fatal(answer)
	}
	answer := <-answers
	if took := time.Since(began); answer != "well\n" || took > 15*time.Second {
		t.Errorf("answered %q after %v", answer, took)
	}
}

// A trial that this host has failed does not make the breaker open for a shorter time than another trial did.
func TestBreaker_PostponeShortens(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: 4 * time.Second, Probe: 2, Timeout: time.Second})
	r.listen.OnDown = shaper.DownHold
	r.apply()
	r.ask()
	r.ask()
	for range 2 {
		dial(t, r.addr()).Write([]byte("how are you?\n"))
	}
	testutil.WaitFor(t, "two to wait", func() bool { return r.status().Waiting == 2 })
	r.listen.Breaker.For = time.Minute
	r.apply()
	from := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 2}}
	reuse := func(fd int) { unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }
	other := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.Addr[:]}, Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { reuse(int(fd)) })
	}}
	oc, err := other.Dial("tcp4", v.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer oc.Close()
	from.Port = oc.LocalAddr().(*net.TCPAddr).Port
	var n atomic.Int32
	r.proxy.OnSocket(func(fd int) error {
		if t, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); t == 1 {
			return nil
		}
		if _, err := unix.Getpeername(fd); err == nil { // of a client
			return nil
		}
		switch n.Add(1) {
		case 1:
			unix.Listen(fd, 1) // the connect fails with EISCONN: not an error of this host, as far as is known
		case 2:
			reuse(fd)
			unix.Bind(fd, from)
		}
		return nil
	})
	testutil.WaitFor(t, "trials", func() bool { return n.Load() >= 2 })
	r.proxy.OnSocket(nil)
	_, left := r.breaker()
	if left < 30*time.Second {
		t.Errorf("a trial has failed, and the breaker is open for %v, not for a minute (%d dials)", left, n.Load())
	}
}

// A client that half-closes, and waits for a full downstream, is not dropped because another one's breaker is open.
func TestBreaker_HalfCloseDropped(t *testing.T) {
	t.Parallel()
	t.Run("shut off", func(t *testing.T) { halfClose(t, time.Minute) })
	t.Run("control", func(t *testing.T) { halfClose(t, 0) })
}

func halfClose(t *testing.T, lasts time.Duration) {
	bad, good := newMoodyServer(t, "resets"), newMoodyServer(t, "answers")
	r := startBreaker(t, bad.addr, shaper.Breaker{After: 2, Of: allFailures, For: lasts, Probe: 1, Timeout: time.Second})
	r.listen.OnDown, r.listen.ConnectTimeout = shaper.DownHold, testTimeout
	r.addDownstream(good.addr)
	if lasts == 0 {
		r.listen.Breaker = shaper.Breaker{}
		r.listen.Downstream = r.listen.Downstream[1:]
	}
	r.apply()
	for range 6 {
		r.ask()
	}
	r.listen.Downstream[len(r.listen.Downstream)-1].MaxConnections = 1
	r.apply()
	came := good.came.Load()
	first := dial(t, r.addr())
	testutil.WaitFor(t, "one to come", func() bool { return good.came.Load() == came+1 })
	c := dial(t, r.addr())
	c.Write([]byte("how are you?\n"))
	testutil.WaitFor(t, "one to wait", func() bool { return r.status().Waiting == 1 })
	c.CloseWrite()
	time.Sleep(300 * time.Millisecond)
	first.Close()
	if b, err := io.ReadAll(c); string(b) != "well\n" {
		t.Errorf("answered %q, %v", b, err)
	}
}

// Whatever happens, no trial keeps its place, and all is well once the servers are.
func TestBreaker_Chaos(t *testing.T) {
	t.Parallel()
	a, b := newMoodyServer(t, "answers"), newMoodyServer(t, "answers")
	r := startBreaker(t, a.addr, shaper.Breaker{After: 2, Of: allFailures, For: 50 * time.Millisecond, Probe: 2, Timeout: 100 * time.Millisecond, Reply: "no"})
	r.addDownstream(b.addr)
	l1 := r.listen
	l1.ConnectTimeout, l1.HoldTimeout, l1.Ramp = 300*time.Millisecond, 400*time.Millisecond, shaper.Frequency{N: 50, Per: time.Second}
	l2 := l1
	l2.Name = "m"
	l2.Addresses = []shaper.Address{addressOf(shaper.TCP, netip.MustParseAddrPort(testutil.FreeAddr(t, "tcp")))}
	l1.Downstream, l2.Downstream = append([]shaper.Downstream(nil), l1.Downstream...), append([]shaper.Downstream(nil), l1.Downstream...)
	limit := shaper.Limit{Name: "cap", MaxConnections: 30, QueueTimeout: 200 * time.Millisecond, MaxQueue: 100}
	compile := func(all []shaper.Listener) {
		p, err := r.shaper.Compile([]shaper.Limit{{Name: limit.Name, MaxConnections: limit.MaxConnections, QueueTimeout: limit.QueueTimeout, MaxQueue: limit.MaxQueue, IPv4Prefix: 32, IPv6Prefix: 64}}, all, nil, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.proxy.Apply(t.Context(), all, p, nil); err != nil {
			t.Fatal(err)
		}
	}
	compile([]shaper.Listener{l1, l2})
	stop := make(chan bool)
	var wg sync.WaitGroup
	addrs := []string{l1.Endpoints()[0].Addr.String(), l2.Endpoints()[0].Addr.String()}
	for range 30 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				time.Sleep(time.Duration(rand.IntN(10)) * time.Millisecond)
				c, err := net.DialTimeout("tcp4", addrs[rand.IntN(2)], time.Second)
				if err != nil {
					continue
				}
				c.SetDeadline(time.Now().Add(500 * time.Millisecond))
				tc := c.(*net.TCPConn)
				if rand.IntN(4) == 0 {
					time.Sleep(time.Duration(rand.IntN(300)) * time.Millisecond)
				}
				switch rand.IntN(6) {
				case 0:
				case 1:
					c.Write([]byte("x"))
				case 2:
					tc.SetLinger(0)
					c.Write([]byte("x\n"))
				case 3:
					c.Write([]byte("x\n"))
					tc.CloseWrite()
					io.ReadAll(c)
				default:
					c.Write([]byte("x\n"))
					c.Read(make([]byte, 10))
				}
				c.Close()
			}
		})
	}
	moods := []string{"answers", "resets", "closes", "answers"}
	began := time.Now()
	for time.Since(began) < 5*time.Second {
		a.mood.Store(moods[rand.IntN(4)])
		b.mood.Store(moods[rand.IntN(4)])
		for _, l := range []*shaper.Listener{&l1, &l2} {
			l.OnDown = []shaper.OnDown{shaper.DownRefuse, shaper.DownHold}[rand.IntN(2)]
			l.RetryUnanswered = rand.IntN(2) == 0
			l.Breaker.After = rand.IntN(4)
			l.Breaker.Probe = 1 + rand.IntN(3)
			l.Breaker.Of = allFailures[rand.IntN(2) : 2+rand.IntN(2)]
			l.SlowStart = time.Duration(rand.IntN(2)) * time.Second
			for i := range l.Downstream {
				l.Downstream[i].MaxConnections = rand.IntN(3) * 4
			}
			if l.Check = (shaper.HealthCheck{}); rand.IntN(3) == 0 {
				l.Check = shaper.HealthCheck{Interval: 100 * time.Millisecond, Timeout: 50 * time.Millisecond, Rise: 1, Fall: 1}
			}
		}
		x, y := l1, l2
		switch rand.IntN(5) {
		case 0:
			x.Addresses, y.Addresses = y.Addresses, x.Addresses
		case 1:
			x.Downstream = x.Downstream[:1]
		case 2:
			x.Name = "n"
		case 3:
			y.Downstream = y.Downstream[1:]
		}
		if all := []shaper.Listener{x, y}; rand.IntN(6) == 0 {
			compile(all[:1])
		} else {
			compile(all)
		}
		r.proxy.DrainDownstream("", a.addr, rand.IntN(4) == 0)
		r.proxy.DrainDownstream("", b.addr, rand.IntN(4) == 0)
		if rand.IntN(4) == 0 {
			r.proxy.Hold("l", 100*time.Millisecond, rand.IntN(2) == 0)
		}
		for range 10 {
			r.proxy.home.loop.call(func(leaky.Time) {
				tries := map[*downstream]int{}
				for _, s := range r.proxy.home.sessions.all {
					if s.attempt.trying {
						if s.downstream == nil {
							t.Error("trying nothing")
							continue
						}
						tries[s.downstream]++
					}
				}
				for _, ln := range r.proxy.listeners {
					for _, d := range ln.downstreams {
						if d.breaker.trials != tries[d] {
							t.Errorf("%d trials, %d try", d.breaker.trials, tries[d])
						}
						if d.inFlight < 0 {
							t.Error("inFlight", d.inFlight)
						}
					}
				}
			})
			time.Sleep(15 * time.Millisecond)
		}
	}
	close(stop)
	wg.Wait()
	a.mood.Store("answers")
	b.mood.Store("answers")
	r.proxy.DrainDownstream("", a.addr, false)
	r.proxy.DrainDownstream("", b.addr, false)
	for _, l := range []*shaper.Listener{&l1, &l2} {
		l.Breaker.After, l.Breaker.Of, l.Check = 2, allFailures, shaper.HealthCheck{}
	}
	compile([]shaper.Listener{l1, l2})
	r.settle()
	for _, addr := range addrs {
		testutil.WaitFor(t, "an answer", func() bool {
			c, err := net.Dial("tcp4", addr)
			if err != nil {
				return false
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(time.Second))
			c.Write([]byte("x\n"))
			n, _ := c.Read(make([]byte, 5))
			return n == 5
		})
	}
	t.Logf("%d + %d came", a.came.Load(), b.came.Load())
}

// The status says why connections wait.
func TestBreaker_StatusOfWaiting(t *testing.T) {
	t.Parallel()
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 2, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	r.listen.OnDown = shaper.DownHold
	r.apply()
	r.ask()
	r.ask()
	dial(t, r.addr())
	testutil.WaitFor(t, "one to wait", func() bool { return r.status().Waiting == 1 })
	if st := r.status(); !st.Held && !st.Down {
		t.Errorf("%+v", st)
	}
}

// Resets now and then do not open the breaker of a server that answers others on connections that were made before.
func TestBreaker_AnswersInBetween(t *testing.T) {
	t.Parallel()
	addr, _ := serveFunc(t, func(n int32, c *net.TCPConn) {
		for {
			if _, err := c.Read(make([]byte, 100)); err != nil {
				return
			}
			if n > 1 {
				c.SetLinger(0)
				return
			}
			c.Write([]byte("well\n"))
		}
	})
	r := startBreaker(t, addr, shaper.Breaker{After: 3, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second})
	pooled := dial(t, r.addr())
	question := func() {
		t.Helper()
		pooled.Write([]byte("how are you?\n"))
		if _, err := io.ReadFull(pooled, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		question()
		r.ask()
	}
	if open, _ := r.breaker(); open {
		t.Error("5 resets have opened the breaker, with an answer between any two")
	}
	for range 3 {
		r.ask()
	}
	if open, _ := r.breaker(); !open {
		t.Error("after 3 resets in a row, the breaker is closed")
	}
}
