package conn

import (
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// slowServer answers a question after a while, and measures how long that is.
type slowServer struct {
	thinks time.Duration
	greets time.Duration // after which it says hello, if that is not 0
	took   atomic.Int64  // ns, sum of all answers
}

func (v *slowServer) serve(c *net.TCPConn) {
	if v.greets > 0 {
		time.Sleep(v.greets)
		c.Write([]byte("hello"))
	}
	for {
		if _, err := c.Read(make([]byte, 1000)); err != nil {
			return
		}
		asked := time.Now()
		time.Sleep(v.thinks)
		v.took.Add(int64(time.Since(asked)))
		if _, err := c.Write([]byte("answer")); err != nil {
			return
		}
	}
}

func (r *proxyRig) downstreamState() *shaper.DownstreamState {
	r.t.Helper()
	all := r.proxy.Downstreams()
	if len(all) != 1 {
		r.t.Fatalf("%d downstreams", len(all))
	}
	return all[0].State
}

func count(h *shaper.Histogram) (n uint64, mean time.Duration) {
	for i := range h.Counts {
		n += h.Counts[i].Load()
	}
	return n, time.Duration(h.Sum.Load() / max(n, 1))
}

// TestTurns_TCP compares what the proxy measures of a downstream with what that and the client have measured: limits in
// both directions, and a client that thinks, have no part in it.
func TestTurns_TCP(t *testing.T) {
	t.Parallel()
	const turns, thinks = 6, 30 * time.Millisecond
	for name, limits := range map[string][]shaper.Limit{
		"without limits": nil,
		"limited": {
			{Name: "up", Rate: 8 * 10_000, Direction: shaper.ToDownstream, MaxDelay: 10 * time.Second},
			{Name: "down", Rate: 8 * 20, Direction: shaper.FromDownstream, MaxDelay: 10 * time.Second},
		},
	} {
		for _, greets := range []time.Duration{0, time.Second} {
			t.Run(name+map[bool]string{true: ", greets"}[greets > 0], func(t *testing.T) {
				t.Parallel()
				v := &slowServer{thinks: thinks, greets: greets}
				r := start(t, shaper.TCP, testutil.ServeTCP(t, v.serve), limits...)
				begun := time.Now()
				c := dial(t, r.addr())
				if greets > 0 {
					io.ReadFull(c, make([]byte, 5))
				}
				var seen time.Duration // by the client, with what it waited for limits
				for range turns {
					time.Sleep(20 * time.Millisecond)
					asked := time.Now()
					c.Write([]byte("?"))
					if _, err := io.ReadFull(c, make([]byte, 6)); err != nil {
						t.Fatal(err)
					}
					seen += time.Since(asked)
				}
				c.Close()
				r.settle()
				state := r.downstreamState()
				n, mean := count(&state.Answer)
				sum, took := mean*time.Duration(n), time.Duration(v.took.Load())
				t.Logf("%d answers; the server took %v, measured %v, the client saw %v", n, took, sum, seen)
				if n != turns || sum < took-turns*time.Microsecond || sum > seen {
					t.Errorf("%d answers in %v; the server took %v, the client saw %v", n, sum, took, seen)
				}
				if limits != nil && seen < took+turns*thinks/2 {
					t.Errorf("the client saw only %v: its questions and answers were not limited", seen)
				}
				if limits != nil && sum > took+(seen-took)/2 {
					t.Errorf("measured %v of %v: it has the waits of limits in it", sum, took)
				}
				if n, mean := count(&state.FirstByte); n != 1 || mean < thinks/2 { // the loop may be late to see that it is connected, by almost all that the server waits before it greets
					t.Errorf("%d first bytes after %v", n, mean)
				}
				if n, mean := count(&state.Connect); n != 1 || mean > time.Since(begun) {
					t.Errorf("%d handshakes in %v", n, mean)
				}
				if up, down := state.ToDownstream.Load(), state.FromDownstream.Load(); up != turns || down < 6*turns {
					t.Errorf("%d bytes to the downstream, %d back", up, down)
				}
				if n, _ := count(&state.RTT); n == 0 {
					t.Error("no round-trip time")
				}
			})
		}
	}
}

// TestTurns_Partial sends a question in two pieces: its time begins with the last one. A question that is never
// answered, and bytes that answer nothing, are no turns.
func TestTurns_Partial(t *testing.T) {
	t.Parallel()
	asked := make(chan time.Time, 1)
	r := start(t, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, 2))
		at := time.Now()
		time.Sleep(20 * time.Millisecond)
		c.Write([]byte("answer"))
		asked <- at
		time.Sleep(20 * time.Millisecond)
		c.Write([]byte("more"))
		io.ReadFull(c, make([]byte, 1))
	}))
	c := dial(t, r.addr())
	c.Write([]byte("a"))
	time.Sleep(300 * time.Millisecond)
	begun := time.Now()
	c.Write([]byte("b"))
	io.ReadFull(c, make([]byte, len("answer")))
	seen := time.Since(begun)
	io.ReadFull(c, make([]byte, len("more")))
	c.Write([]byte("c"))
	io.Copy(io.Discard, c)
	c.Close()
	<-asked
	r.settle()
	if n, mean := count(&r.downstreamState().Answer); n != 1 || mean < 19*time.Millisecond || mean > seen {
		t.Errorf("%d answers in %v, want one in 20 ms to %v", n, mean, seen)
	}
}

func TestTurns_UDP(t *testing.T) {
	t.Parallel()
	const turns, thinks = 3, 20 * time.Millisecond
	server, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var thought atomic.Int64 // ns, of all answers
	testutil.ServeUDP(t, server, func(data []byte, _ netip.AddrPort) []byte {
		asked := time.Now()
		time.Sleep(thinks)
		thought.Add(int64(time.Since(asked)))
		return data
	})
	slow := shaper.Limit{Name: "slow", Packets: shaper.Frequency{N: 2, Per: time.Second}, MaxDelay: testTimeout, Direction: shaper.Both}
	r := start(t, shaper.UDP, server.LocalAddr().String(), slow)
	r.listen.UDPIdleTimeout = time.Minute
	r.apply(slow)
	c, err := net.Dial("udp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(testTimeout))
	began := time.Now()
	for range turns {
		c.Write([]byte("?"))
		if _, err := c.Read(make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
	}
	seen, took := time.Since(began), time.Duration(thought.Load())
	state := r.downstreamState()
	n, mean := count(&state.Answer)
	// Limits take 500 ms for each datagram but the first.
	if sum := mean * time.Duration(n); n != turns || mean < thinks-time.Microsecond || sum > took+(seen-took)/2 {
		t.Errorf("%d answers in %v; the server took %v, the client saw %v", n, sum, took, seen)
	}
	server.Close()
	testutil.WaitFor(t, "an ICMP error", func() bool { c.Write([]byte("?")); return state.ICMPErrors.Load() > 0 })
}

// TestTurns_Failures counts dials that fail, and connections that the downstream resets.
func TestTurns_Failures(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) { io.ReadFull(c, make([]byte, 1)); c.SetLinger(0) }))
	c := dial(t, r.addr())
	c.Write([]byte("?"))
	io.Copy(io.Discard, c)
	c.Close()
	r.settle()
	if state := r.downstreamState(); state.Resets.Load() != 1 || state.DialsRefused.Load() != 0 {
		t.Errorf("%d resets, %d refused dials", state.Resets.Load(), state.DialsRefused.Load())
	}
	r = start(t, shaper.TCP, testutil.FreeAddr(t, "tcp"))
	if c, err := net.Dial("tcp4", r.addr()); err == nil { // it may be reset already
		io.Copy(io.Discard, c)
		c.Close()
	}
	testutil.WaitFor(t, "the refused dial", func() bool { return r.downstreamState().DialsRefused.Load() > 0 })
	r.settle()
	if state := r.downstreamState(); state.DialsRefused.Load() != 1 || state.Resets.Load() != 0 {
		t.Errorf("%d resets, %d refused dials", state.Resets.Load(), state.DialsRefused.Load())
	}
	var state shaper.DownstreamState
	countFailedDial(&state, unix.ETIMEDOUT)
	countFailedDial(&state, unix.EHOSTUNREACH)
	if state.DialsTimedOut.Load() != 1 || state.DialsFailed.Load() != 1 {
		t.Error("other failures are not counted")
	}
}
