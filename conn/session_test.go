package conn

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
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

func TestTCPCarriesEveryByte(t *testing.T) {
	t.Parallel()
	for name, limits := range map[string][]shaper.Limit{
		"without limits": nil,
		"limited": {
			{Name: "up", Rate: 400e6, MaxDelay: time.Second},
			{Name: "both", Key: shaper.KeySource, Direction: shaper.Both, Rate: 800e6},
		},
		"observed": {{Name: "o", Rate: 8e6, Observe: true}},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), limits...)
			startEchoes(t, r, 4, 8<<20).Wait()
			r.settle()
		})
	}
}

func TestHalfClose(t *testing.T) {
	t.Parallel()
	for name, limits := range map[string][]shaper.Limit{
		"without limits": nil,
		"limited":        {{Name: "up", Rate: 8e6, Direction: shaper.Both}},
	} {
		t.Run(name, func(t *testing.T) {
			answer := randomBytes(300_000)
			addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
				if got, err := io.ReadAll(c); err != nil || len(got) != 100_000 {
					t.Errorf("downstream got %d bytes, err %v", len(got), err)
				}
				c.Write(answer)
			})
			r := start(t, shaper.TCP, addr, limits...)
			c := dial(t, r.addr())
			c.Write(randomBytes(100_000))
			c.CloseWrite()
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, answer) {
				t.Errorf("client got %d of %d bytes, err %v", len(got), len(answer), err)
			}
			r.settle()
		})
	}
}

func TestHalfClose_NoClientData(t *testing.T) {
	addr := testutil.ServeTCP(t, func(c *net.TCPConn) { c.Write([]byte("banner")) })
	r := start(t, shaper.TCP, addr)
	for range 50 {
		c := dial(t, r.addr())
		c.CloseWrite()
		if got, err := io.ReadAll(c); err != nil || string(got) != "banner" {
			t.Fatalf("got %q, err %v", got, err)
		}
	}
	r.settle()
}

// A FIN uses none of the rate: it is passed on at once if nothing precedes it, and otherwise with the
// last byte. A byte that waits for its turn is measured for comparison.
func TestFINDoesNotWaitInQueue(t *testing.T) {
	const others, tries = 30, 5 // a busy machine may delay some
	came, done := make(chan time.Time, tries), make(chan time.Time, tries)
	addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
		b := make([]byte, 64<<10)
		for {
			n, err := c.Read(b)
			if n > 0 && b[0] == 'x' {
				came <- time.Now()
			}
			if err != nil {
				if b[0] != 0 {
					done <- time.Now()
				}
				return
			}
		}
	})
	r := start(t, shaper.TCP, addr, shaper.Limit{Name: "all", Rate: 1e6})
	var idle [tries]*net.TCPConn
	for i := range idle {
		idle[i] = dialFrom(t, "127.0.0.9", r.addr())
		idle[i].Write([]byte("I"))
	}
	testutil.WaitFor(t, "a byte of each idle connection", func() bool { return r.shaper.Listener("l").ToDownstream.Load() == tries })
	for i := range others {
		go dialFrom(t, fmt.Sprintf("127.0.1.%d", i+1), r.addr()).Write(make([]byte, 1<<20))
	}
	testutil.WaitFor(t, "all others to wait", func() bool {
		waiting := 0
		r.proxy.home.loop.call(func(leaky.Time) {
			for _, s := range r.proxy.home.sessions.all {
				if s.up.unit.queued {
					waiting++
				}
			}
		})
		return waiting == others
	})
	var turns, ends, gaps []time.Duration
	for i := range tries {
		c := dialFrom(t, "127.0.0.8", r.addr())
		begun := time.Now()
		c.Write([]byte("x"))
		c.CloseWrite()
		last := <-came
		turns = append(turns, last.Sub(begun))
		gaps = append(gaps, (<-done).Sub(last))
		begun = time.Now()
		idle[i].CloseWrite()
		ends = append(ends, (<-done).Sub(begun))
	}
	slices.Sort(turns)
	turn, end, gap := turns[tries/2], slices.Min(ends), slices.Min(gaps)
	if turn < 50*time.Millisecond {
		t.Errorf("a byte waited for %v: it was not throttled", turn)
	}
	if end > turn/3 || gap > turn/3 {
		t.Errorf("a FIN waited for %v, one after a byte for %v more, a byte for %v", end, gap, turn)
	}
}

// A read stops at urgent data; the data after it must follow.
func TestUrgentDataDoesNotStall(t *testing.T) {
	for name, limits := range map[string][]shaper.Limit{
		"without limits": nil,
		"limited":        {{Name: "up", Rate: 80e6}},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), limits...)
			for range 20 {
				c := dial(t, r.addr())
				rc, err := c.SyscallConn()
				if err != nil {
					t.Fatal(err)
				}
				c.Write([]byte("abc"))
				rc.Control(func(fd uintptr) { err = syscall.Sendto(int(fd), []byte("!"), syscall.MSG_OOB, nil) })
				if err != nil {
					t.Fatal(err)
				}
				c.Write([]byte("def"))
				got := make([]byte, 6)
				c.SetDeadline(time.Now().Add(testTimeout))
				if n, err := io.ReadFull(c, got); err != nil || string(got) != "abcdef" {
					t.Fatalf("got %q, err %v", got[:n], err)
				}
				c.Close()
			}
		})
	}
}

// Deferred work must not pile up, or the rest of the loop waits for it.
func TestDeferredWorkDoesNotPileUp(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Discard))
	const streams = 8
	var enough atomic.Bool
	var wg sync.WaitGroup
	for range streams {
		c := dial(t, r.addr())
		wg.Go(func() {
			for b := make([]byte, 1<<20); !enough.Load(); {
				c.Write(b)
			}
			c.Close()
		})
	}
	most := 0
	for begun := time.Now(); time.Since(begun) < 500*time.Millisecond || most == 0 && time.Since(begun) < testTimeout; {
		r.proxy.home.loop.call(func(leaky.Time) { most = max(most, len(r.proxy.home.loop.deferred)) })
	}
	enough.Store(true)
	wg.Wait()
	if most > 2*streams || most == 0 {
		t.Errorf("up to %d functions were deferred for %d streams", most, streams)
	}
	r.settle()
}

func TestResetsUnderASharedLimit(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
		go io.Copy(io.Discard, c)
		for b := make([]byte, 64<<10); ; {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}), shaper.Limit{Name: "both", Direction: shaper.Both, Rate: 80e6})
	for range 40 {
		c := dial(t, r.addr())
		go c.Write(make([]byte, 4<<20))
		time.Sleep(5 * time.Millisecond)
		c.SetLinger(0)
		c.Close()
	}
	r.settle()
}

func TestResetIsPassedOn(t *testing.T) {
	limited := shaper.Limit{Name: "up", Rate: 1e6}
	t.Run("from the client", func(t *testing.T) {
		ended := make(chan error, 1)
		addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
			_, err := io.Copy(io.Discard, c)
			ended <- err
		})
		r := start(t, shaper.TCP, addr, limited)
		c := dial(t, r.addr())
		c.Write(randomBytes(1 << 20)) // more than the rate allows soon
		testutil.WaitFor(t, "the first of it", func() bool { return r.shaper.Listener("l").ToDownstream.Load() > 0 })
		c.SetLinger(0)
		c.Close()
		select {
		case err := <-ended:
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the downstream read %v, want a reset", err)
			}
		case <-time.After(testTimeout):
			t.Error("the downstream was not reset")
		}
		r.settle()
	})
	t.Run("from the downstream", func(t *testing.T) {
		addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
			io.ReadFull(c, make([]byte, 1))
			c.SetLinger(0)
		})
		r := start(t, shaper.TCP, addr, limited)
		c := dial(t, r.addr())
		c.Write([]byte("x"))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the client read %v, want a reset", err)
		}
		r.settle()
	})
	t.Run("downstream refuses", func(t *testing.T) {
		r := start(t, shaper.TCP, testutil.FreeAddr(t, "tcp"))
		c, err := net.Dial("tcp4", r.addr())
		if err == nil {
			defer c.Close()
			_, err = c.Read(make([]byte, 1))
		}
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the client saw %v, want a reset", err)
		}
		r.settle()
	})
}

// TCP flow control slows down a throttled source: what it can send ahead is bounded by the kernel's
// buffers.
func TestThrottledSourceIsHeldBack(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Discard),
		shaper.Limit{Name: "up", Rate: 80e3})
	c := dial(t, r.addr())
	c.SetDeadline(time.Now().Add(500 * time.Millisecond))
	n, err := c.Write(make([]byte, 64<<20))
	if err == nil || n > 16<<20 {
		t.Errorf("wrote %d bytes, err %v: it was not throttled", n, err)
	}
	r.proxy.home.loop.call(func(leaky.Time) {
		for _, s := range r.proxy.home.sessions.all {
			if len(s.up.unwritten) > scratchSize {
				t.Errorf("%d bytes are buffered", len(s.up.unwritten))
			}
		}
	})
}

func TestWaitingClientThatLeavesIsRemoved(t *testing.T) {
	hold := make(chan struct{})
	addr := testutil.ServeTCP(t, func(*net.TCPConn) { <-hold })
	t.Cleanup(func() { close(hold) })
	limit := shaper.Limit{Name: "cap", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10}
	r := start(t, shaper.TCP, addr, limit)
	state := r.shaper.Policy().State(0)
	first := dial(t, r.addr())
	first.Write([]byte("x"))
	testutil.WaitFor(t, "a slot in use", func() bool { return state.InFlight.Load() == 1 })
	for name, leave := range map[string]func(*net.TCPConn){
		"by closing":   func(c *net.TCPConn) { c.Close() },
		"by resetting": func(c *net.TCPConn) { c.Write([]byte("x")); c.SetLinger(0); c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			c := dial(t, r.addr())
			testutil.WaitFor(t, "a waiter", func() bool { return state.Waiting.Load() == 1 })
			leave(c)
			testutil.WaitFor(t, "no waiter", func() bool { return state.Waiting.Load() == 0 })
		})
	}
	// A client that has sent a request and half-closed still waits for its reply.
	c := dial(t, r.addr())
	c.Write([]byte("x"))
	c.CloseWrite()
	testutil.WaitFor(t, "a waiter", func() bool { return state.Waiting.Load() == 1 })
	time.Sleep(50 * time.Millisecond)
	if state.Waiting.Load() != 1 {
		t.Error("a client that half-closed was taken to have left")
	}
	// In flight, a reset frees the slot.
	first.SetLinger(0)
	first.Close()
	testutil.WaitFor(t, "the next one in flight", func() bool { return state.Waiting.Load() == 0 && state.InFlight.Load() == 1 })
}

// Sources that make one connection after the other, of one segment each, leave an upload its share: a
// fifth if four of them exist at a time, however many there are in total.
func TestShortConnectionsDoNotStarveUpload(t *testing.T) {
	for _, reset := range []bool{true, false} {
		var rest atomic.Uint64
		addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
			b := make([]byte, 64<<10)
			for {
				n, err := c.Read(b)
				if n > 0 && b[0] == 'o' {
					rest.Add(uint64(n))
					c.Write([]byte("x"))
				}
				if err != nil {
					return
				}
			}
		})
		r := start(t, shaper.TCP, addr, shaper.Limit{Name: "all", Rate: 4e6})
		up := dialFrom(t, "127.0.0.2", r.addr())
		go up.Write(bytes.Repeat([]byte("u"), 4<<20))
		var others sync.WaitGroup
		var sources atomic.Uint32
		begun := time.Now()
		for range 4 {
			others.Go(func() {
				for time.Since(begun) < time.Second || sources.Load() < 40 && time.Since(begun) < testTimeout {
					n := sources.Add(1)
					c := dialFrom(t, fmt.Sprintf("127.1.%d.%d", n>>8&255, n&255), r.addr())
					if reset {
						c.SetLinger(0)
					}
					c.Write(bytes.Repeat([]byte("o"), 1400))
					c.SetReadDeadline(time.Now().Add(testTimeout))
					c.Read(make([]byte, 1))
					c.Close()
				}
			})
		}
		others.Wait()
		var upload float64 // what the server reads of it may lag behind
		r.proxy.home.loop.call(func(leaky.Time) {
			for _, s := range r.proxy.home.sessions.all {
				if s.flow.Source == netip.MustParseAddr("127.0.0.2") {
					upload += float64(s.up.moved)
				}
			}
		})
		if part := upload / (upload + float64(rest.Load())); part < 0.16 || sources.Load() < 20 {
			t.Errorf("reset %v: the upload got %.2f of all, with %d short connections, want a fifth", reset, part, sources.Load())
		}
		up.SetLinger(0)
		up.Close()
	}
}

// A client ends, and gives up its place in a queue for that. The unit served in its place is the other
// direction of the same session, which finds a reset: the session has ended then, and must not be
// touched again. (Its timer was armed, and a second end closed sockets of others.)
func TestNestedResetEndsSessionOnce(t *testing.T) {
	var server atomic.Pointer[net.TCPConn]
	r := start(t, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, minGrant))
		c.Write(make([]byte, minGrant))
		server.Store(c)
		io.Copy(io.Discard, c)
	}))
	r.listen.HalfCloseTimeout = time.Hour
	r.apply(shaper.Limit{Name: "both", Rate: 8 * minGrant / 8, Burst: minGrant, Direction: shaper.Both}) // two leave at once, and the next after 8 s
	c := dial(t, r.addr())
	c.Write(make([]byte, minGrant))
	var s *session
	testutil.WaitFor(t, "a direction that waits with nothing left", func() (ok bool) {
		r.proxy.home.loop.call(func(now leaky.Time) {
			if len(r.proxy.home.sessions.all) == 0 || server.Load() == nil {
				return
			}
			s = r.proxy.home.sessions.all[0]
			if ok = s.up.moved == minGrant && s.down.moved == minGrant && s.down.unit.queued && !s.up.unit.queued; !ok {
				return
			}
			s.client.ready(unix.EPOLLIN, now) // as the loop may, for data that was already read
			server.Load().SetLinger(0)
			server.Load().Close()
			c.CloseWrite()
			for fd, events := range map[int]int16{s.server.fd: unix.POLLERR, s.client.fd: unix.POLLRDHUP} {
				n, err := 0, error(unix.EINTR)
				for errors.Is(err, unix.EINTR) {
					n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, 5000)
				}
				if n != 1 {
					t.Error("no reset, or not closed: ", err)
				}
			}
			s.client.ready(unix.EPOLLIN|unix.EPOLLRDHUP, now+10*leaky.Second) // when the queue is due
			if s.stage != stageEnded || s.timer.Scheduled() {
				t.Errorf("stage %d; a timer is set: %v", s.stage, s.timer.Scheduled())
			}
		})
		return ok
	})
	r.settle()
}

// TestUrgentDataBeforeEnd ends a stream soon after urgent data: what follows that is not lost, also where the end arrives
// while bytes before it are delayed.
func TestUrgentDataBeforeEnd(t *testing.T) {
	t.Parallel()
	for name, limits := range map[string][]shaper.Limit{
		"without limits": nil,
		"limited":        {{Name: "up", Rate: 4e6, Key: shaper.KeyConnection}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			received := make(chan []byte, 1)
			r := start(t, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
				got, _ := io.ReadAll(c)
				received <- got
			}), limits...)
			before, after := randomBytes(20_000), randomBytes(5000)
			for i := range 30 {
				c := dial(t, r.addr())
				gap := time.Duration(i%3) * 3 * time.Millisecond // the rest arrives while these are delayed, or with them
				for part := range slices.Chunk(before, len(before)/2) {
					c.Write(part)
					time.Sleep(gap)
				}
				raw, err := c.SyscallConn()
				if err != nil {
					t.Fatal(err)
				}
				raw.Control(func(fd uintptr) { err = unix.Sendto(int(fd), []byte("!"), unix.MSG_OOB, nil) })
				if err != nil {
					t.Fatal(err)
				}
				c.Write(after)
				c.CloseWrite()
				if got := <-received; !bytes.Equal(got, append(bytes.Clone(before), after...)) {
					t.Fatalf("%d of %d bytes arrived", len(got), len(before)+len(after))
				}
				c.Close()
			}
		})
	}
}
