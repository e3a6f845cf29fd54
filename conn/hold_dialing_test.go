package conn

import (
	"bufio"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// hole listens, and does not answer a SYN before it is opened: its queue is full.
type hole struct {
	*net.TCPListener
	addr string
}

func newHole(t *testing.T) *hole {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "hole")
	defer f.Close()
	if err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err == nil {
		err = unix.Listen(fd, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.FileListener(f) // of a duplicate, which listens as f does
	if err != nil {
		t.Fatal(err)
	}
	h := &hole{l.(*net.TCPListener), l.Addr().String()}
	h.backlog(t, 0)
	t.Cleanup(func() { l.Close() })
	for !h.full(t) {
		c, err := net.Dial("tcp4", h.addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
	return h
}

// full reports whether the queue of connections that are to be accepted is longer than its bound: the kernel then answers none.
func (h *hole) full(t *testing.T) (full bool) {
	raw, err := h.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			if err != nil {
				t.Error(err)
				full = true
				return
			}
			full = info.Unacked > info.Sacked // of a listener, the length and its bound
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return full
}

func (h *hole) backlog(t *testing.T, n int) {
	raw, err := h.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			if err := unix.Listen(int(fd), n); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// open lets connections in, and returns when those of the proxy came within a time. They stay.
func (h *hole) open(t *testing.T, within time.Duration) (at []time.Time) {
	h.backlog(t, 1000)
	for end := time.Now().Add(within); ; {
		if err := h.SetDeadline(end); err != nil {
			t.Fatal(err)
		}
		c, err := h.Accept()
		if err != nil {
			slices.SortFunc(at, time.Time.Compare)
			return at
		}
		t.Cleanup(func() { c.Close() })
		at = append(at, arrival(c))
	}
}

// Connections that are being dialed when the listener goes down do not come all at once when the server is back.
func TestHold_DialingWhenDown(t *testing.T) {
	t.Parallel()
	h := newHole(t)
	r := start(t, shaper.TCP, h.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout, r.listen.ConnectTimeout = shaper.DownHold, shaper.Frequency{N: 10, Per: time.Second}, time.Minute, 5*time.Second
	r.apply()
	dial(t, r.addr())
	time.Sleep(3500 * time.Millisecond)
	for range 30 {
		dial(t, r.addr())
	}
	testutil.WaitFor(t, "down", func() bool { return r.status().Down })
	all := h.open(t, 4500*time.Millisecond)
	for i := range all { // at most 10 in any 500 ms
		n := 0
		for _, b := range all[i:] {
			if b.Sub(all[i]) < 500*time.Millisecond {
				n++
			}
		}
		if n > 10 {
			t.Fatalf("%d of %d connections within 500 ms, with a ramp that began at 10/s; %+v", n, len(all), r.status())
		}
	}
}

// Nor do they reach the server during the hold of an operator.
func TestHold_DialingWhenHeld(t *testing.T) {
	t.Parallel()
	h := newHole(t)
	r := start(t, shaper.TCP, h.addr)
	r.listen.ConnectTimeout, r.listen.HoldTimeout = 5*time.Second, time.Minute
	r.apply()
	for range 30 {
		dial(t, r.addr())
	}
	time.Sleep(200 * time.Millisecond)
	r.proxy.Hold("l", shaper.Forever, false)
	time.Sleep(time.Second)
	h.open(t, 2500*time.Millisecond)
	if st := r.status(); st.Waiting < 30 {
		t.Errorf("%d of 30 reached the server during the hold; %+v", r.proxy.Downstreams()[0].InFlight, st)
	}
}

// Nor while a breaker is open.
func TestBreaker_DialingWhenOpened(t *testing.T) {
	t.Parallel()
	h := newHole(t)
	r := startBreaker(t, h.addr, shaper.Breaker{After: 1, Of: allFailures[:1], For: time.Minute, Probe: 1, Timeout: time.Second})
	r.listen.ConnectTimeout = 5 * time.Second
	r.apply()
	dial(t, r.addr())
	time.Sleep(3500 * time.Millisecond)
	for range 30 {
		if c, err := net.Dial("tcp4", r.addr()); err == nil { // after a stall the breaker may be open, and reset it
			t.Cleanup(func() { c.Close() })
		}
	}
	testutil.WaitFor(t, "open", func() bool { open, _ := r.breaker(); return open })
	if n := len(h.open(t, 4500*time.Millisecond)) - 1; n > 2 { // that of the hole
		open, left := r.breaker()
		t.Errorf("%d connections reached the server; the breaker: open %v, for %v", n, open, left)
	}
}

// A server that answers at once is not late because a limit of its listener holds answers back.
func TestBreaker_OwnLimit(t *testing.T) {
	t.Parallel()
	g := script(t, func(n int, c *net.TCPConn) {
		in := bufio.NewReader(c)
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			if line == "much\n" {
				c.Write(make([]byte, 1<<20))
			} else {
				c.Write([]byte("well\n"))
			}
		}
	})
	limits := []shaper.Limit{{Name: "down", Rate: 4000, Direction: shaper.FromDownstream}}
	r := start(t, shaper.TCP, g.addr, limits...)
	r.listen.Breaker = shaper.Breaker{After: 2, Of: allFailures, For: time.Minute, Probe: 1, Timeout: 3 * time.Second}
	r.apply(limits...)
	for range 2 {
		dial(t, r.addr()).Write([]byte("much\n"))
	}
	time.Sleep(500 * time.Millisecond)
	for range 4 {
		c := dial(t, r.addr())
		c.Write([]byte("how are you?\n"))
	}
	for began := time.Now(); time.Since(began) < 8*time.Second; time.Sleep(50 * time.Millisecond) {
		if open, _ := r.breaker(); open {
			t.Fatalf("open after %v: %v", time.Since(began), r.proxy.Downstreams()[0].Error)
		}
	}
}

// max_connections of one that was ejected grows, too.
func TestSlowStart_Ejected(t *testing.T) {
	t.Parallel()
	a, b := newGreeter(t), newGreeter(t)
	b.start()
	r := start(t, shaper.TCP, a.addr)
	r.addDownstream(b.addr)
	r.listen.EjectAfter, r.listen.EjectFor, r.listen.SlowStart = 1, 500*time.Millisecond, 10*time.Second
	r.listen.Downstream[0].MaxConnections, r.listen.Downstream[1].MaxConnections = 10, 10
	r.listen.Balance = shaper.LeastConnections
	r.apply()
	began := time.Now()
	for range 2 {
		readN(dial(t, r.addr()), 5)
	}
	a.start()
	time.Sleep(600 * time.Millisecond)
	for range 16 {
		readN(dial(t, r.addr()), 5)
	}
	if n := r.proxy.Downstreams()[0].InFlight; n > 1+int(10*time.Since(began)/(10*time.Second)) {
		t.Errorf("%d of 10 connections, at the begin of a slow start of 10 s; %+v", n, r.proxy.Downstreams())
	}
}

// A shorter interval of checks applies at once.
func TestCheck_ShorterInterval(t *testing.T) {
	t.Parallel()
	g := newGreeter(t)
	r := start(t, shaper.TCP, g.addr)
	r.listen.OnDown, r.listen.HoldTimeout, r.listen.Ramp = shaper.DownHold, time.Minute, shaper.Frequency{N: 100, Per: time.Second}
	r.listen.Check = shaper.HealthCheck{Interval: time.Hour, Timeout: time.Second, Rise: 1, Fall: 1}
	r.apply()
	time.Sleep(50 * time.Millisecond)
	r.listen.Check.Interval = 50 * time.Millisecond
	r.apply()
	testutil.WaitFor(t, "a check, with an interval of 50 ms since a reload", func() bool { return r.proxy.Downstreams()[0].Down })
}
