package conn

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
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
			r := start(t, shaper.TCP, serveTCP(t, echo), limits...)
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					sent := randomBytes(8 << 20)
					c := dial(t, r.addr())
					go func() {
						c.Write(sent)
						c.CloseWrite()
					}()
					got, err := io.ReadAll(c)
					if err != nil || !bytes.Equal(got, sent) {
						t.Errorf("got %d of %d bytes back, equal %v, err %v", len(got), len(sent), bytes.Equal(got, sent), err)
					}
				})
			}
			wg.Wait()
			r.settle()
		})
	}
}

func TestHalfCloseIsKept(t *testing.T) {
	t.Parallel()
	for name, limits := range map[string][]shaper.Limit{
		"without limits": nil,
		"limited":        {{Name: "up", Rate: 8e6, Direction: shaper.Both}},
	} {
		t.Run(name, func(t *testing.T) {
			answer := randomBytes(300_000)
			addr := serveTCP(t, func(c *net.TCPConn) {
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

func TestHalfCloseWithoutAWord(t *testing.T) {
	addr := serveTCP(t, func(c *net.TCPConn) { c.Write([]byte("banner")) })
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

// The end of a connection takes nothing of a rate: it is passed on at once where there is
// nothing else, and with the last byte where there is. A byte that waits for its turn is
// measured beside it.
func TestEndDoesNotWaitForATurn(t *testing.T) {
	const others = 30
	told := make(chan time.Time, 2)
	addr := serveTCP(t, func(c *net.TCPConn) {
		b := make([]byte, 64<<10)
		for {
			n, err := c.Read(b)
			if n > 0 && b[0] == 'x' || err != nil && b[0] != 0 {
				told <- time.Now()
			}
			if err != nil {
				return
			}
		}
	})
	r := start(t, shaper.TCP, addr, shaper.Limit{Name: "all", Rate: 1e6})
	idle := dialFrom(t, "127.0.0.9", r.addr())
	idle.Write([]byte("I"))
	for i := range others {
		go dialFrom(t, fmt.Sprintf("127.0.1.%d", i+1), r.addr()).Write(make([]byte, 1<<20))
	}
	time.Sleep(500 * time.Millisecond)
	var turn, end, gap time.Duration
	for range 2 {
		c := dialFrom(t, "127.0.0.8", r.addr())
		begun := time.Now()
		c.Write([]byte("x"))
		c.CloseWrite()
		last := <-told
		turn += last.Sub(begun) / 2
		gap += (<-told).Sub(last) / 2
	}
	begun := time.Now()
	idle.CloseWrite()
	end = (<-told).Sub(begun)
	if turn < 50*time.Millisecond {
		t.Errorf("a byte waited for %v: nothing was held back", turn)
	}
	if end > turn/3 || gap > turn/3 {
		t.Errorf("an end waited for %v, one behind a byte for %v more, a byte for %v", end, gap, turn)
	}
}

// A read stops at urgent data; what is behind it must not stay behind.
func TestUrgentDataDoesNotStall(t *testing.T) {
	for name, limits := range map[string][]shaper.Limit{
		"without limits": nil,
		"limited":        {{Name: "up", Rate: 80e6}},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, shaper.TCP, serveTCP(t, echo), limits...)
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
				c.SetDeadline(time.Now().Add(patience))
				if n, err := io.ReadFull(c, got); err != nil || string(got) != "abcdef" {
					t.Fatalf("got %q, err %v", got[:n], err)
				}
				c.Close()
			}
		})
	}
}

// Work that is put off must not pile up, or the rest of the loop waits for it.
func TestPutOffWorkDoesNotPileUp(t *testing.T) {
	r := start(t, shaper.TCP, serveTCP(t, func(c *net.TCPConn) { io.Copy(io.Discard, c) }))
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
	for begun := time.Now(); time.Since(begun) < 500*time.Millisecond || most == 0 && time.Since(begun) < patience; {
		r.proxy.loop.call(func(leaky.Time) { most = max(most, len(r.proxy.loop.again)) })
	}
	enough.Store(true)
	wg.Wait()
	if most > 2*streams || most == 0 {
		t.Errorf("up to %d pieces of work were put off for %d streams", most, streams)
	}
	r.settle()
}

func TestResetsUnderASharedLimit(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, serveTCP(t, func(c *net.TCPConn) {
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
		addr := serveTCP(t, func(c *net.TCPConn) {
			_, err := io.Copy(io.Discard, c)
			ended <- err
		})
		r := start(t, shaper.TCP, addr, limited)
		c := dial(t, r.addr())
		c.Write(randomBytes(1 << 20)) // more than the rate lets through soon
		waitFor(t, "the first of it", func() bool { return r.shaper.Listener("l").ToDownstream.Load() > 0 })
		c.SetLinger(0)
		c.Close()
		select {
		case err := <-ended:
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the downstream read %v, want a reset", err)
			}
		case <-time.After(patience):
			t.Error("the downstream was not told")
		}
		r.settle()
	})
	t.Run("from the downstream", func(t *testing.T) {
		addr := serveTCP(t, func(c *net.TCPConn) {
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
		r := start(t, shaper.TCP, freePort(t, shaper.TCP))
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

// A downstream answers, and closes with the rest of the request unread: the reset that
// follows does not overtake the answer, however long that takes.
func TestAnswerBeforeAReset(t *testing.T) {
	t.Parallel()
	for name, limits := range map[string][]shaper.Limit{
		"without limits": nil,
		"limited":        {{Name: "down", Rate: 8 * 400_000, Direction: shaper.FromDownstream}},
		"both":           {{Name: "both", Rate: 8 * 400_000, Direction: shaper.Both}},
	} {
		t.Run(name, func(t *testing.T) {
			answer := randomBytes(100_000)
			r := start(t, shaper.TCP, serveTCP(t, func(c *net.TCPConn) {
				io.ReadFull(c, make([]byte, 1000))
				c.Write(answer)
				time.Sleep(100 * time.Millisecond) // for the request to be there, and not read
			}), limits...)
			c := dial(t, r.addr())
			go c.Write(make([]byte, 200_000))
			got := make([]byte, len(answer))
			if n, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, answer) {
				t.Fatalf("got %d of %d bytes, err %v", n, len(answer), err)
			}
			waitFor(t, "its end", func() bool { return r.shaper.Listener("l").Ended[shaper.ResetByServer].Load() == 1 })
			r.settle()
		})
	}
}

// A throttled source is held back by TCP: what it can send ahead is bounded by
// the kernel's buffers.
func TestThrottledSourceIsHeldBack(t *testing.T) {
	r := start(t, shaper.TCP, serveTCP(t, func(c *net.TCPConn) { io.Copy(io.Discard, c) }),
		shaper.Limit{Name: "up", Rate: 80e3})
	c := dial(t, r.addr())
	c.SetDeadline(time.Now().Add(500 * time.Millisecond))
	n, err := c.Write(make([]byte, 64<<20))
	if err == nil || n > 16<<20 {
		t.Errorf("wrote %d bytes, err %v: nothing held it back", n, err)
	}
	r.proxy.loop.call(func(leaky.Time) {
		for _, s := range r.proxy.sessions.all {
			if len(s.up.left) > scratchSize {
				t.Errorf("%d bytes are buffered", len(s.up.left))
			}
		}
	})
}

func TestClientThatLeavesFreesItsPlace(t *testing.T) {
	hold := make(chan struct{})
	addr := serveTCP(t, func(*net.TCPConn) { <-hold })
	t.Cleanup(func() { close(hold) })
	limit := shaper.Limit{Name: "cap", Connections: 1, MaxWait: time.Minute, MaxWaiting: 10}
	r := start(t, shaper.TCP, addr, limit)
	state := r.shaper.Policy().State(0)
	first := dial(t, r.addr())
	first.Write([]byte("x"))
	waitFor(t, "a slot in use", func() bool { return state.InFlight.Load() == 1 })
	for name, leave := range map[string]func(*net.TCPConn){
		"by closing":   func(c *net.TCPConn) { c.Close() },
		"by resetting": func(c *net.TCPConn) { c.Write([]byte("x")); c.SetLinger(0); c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			c := dial(t, r.addr())
			waitFor(t, "a waiter", func() bool { return state.Waiting.Load() == 1 })
			leave(c)
			waitFor(t, "no waiter", func() bool { return state.Waiting.Load() == 0 })
		})
	}
	// One that has asked and half-closed still waits for its answer.
	c := dial(t, r.addr())
	c.Write([]byte("x"))
	c.CloseWrite()
	waitFor(t, "a waiter", func() bool { return state.Waiting.Load() == 1 })
	time.Sleep(50 * time.Millisecond)
	if state.Waiting.Load() != 1 {
		t.Error("a client that half-closed was taken to have left")
	}
	// In flight, a reset frees the slot.
	first.SetLinger(0)
	first.Close()
	waitFor(t, "the next one in flight", func() bool { return state.Waiting.Load() == 0 && state.InFlight.Load() == 1 })
}

// Sources that have one connection after the other, a segment each, leave an upload its part:
// a fifth when four of them are there at a time, however many come.
func TestShortConnectionsLeaveAnUploadItsPart(t *testing.T) {
	for _, reset := range []bool{true, false} {
		var upload, all atomic.Uint64
		addr := serveTCP(t, func(c *net.TCPConn) {
			b := make([]byte, 64<<10)
			for {
				n, err := c.Read(b)
				all.Add(uint64(n))
				if n > 0 && b[0] == 'u' {
					upload.Add(uint64(n))
				} else if n > 0 {
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
				for time.Since(begun) < time.Second {
					n := sources.Add(1)
					c := dialFrom(t, fmt.Sprintf("127.1.%d.%d", n>>8&255, n&255), r.addr())
					if reset {
						c.SetLinger(0)
					}
					c.Write(bytes.Repeat([]byte("o"), 1400))
					c.SetReadDeadline(time.Now().Add(patience))
					c.Read(make([]byte, 1))
					c.Close()
				}
			})
		}
		others.Wait()
		if part := float64(upload.Load()) / float64(all.Load()); part < 0.16 || sources.Load() < 20 {
			t.Errorf("reset %v: the upload has %.2f of all, beside %d short connections, want a fifth", reset, part, sources.Load())
		}
		up.SetLinger(0)
		up.Close()
	}
}

// A client ends, and gives up its turn in a line for that. Who goes on there is the other
// direction of the same session, which finds a reset: the session has ended then, and nothing
// more is done with it. (Its timer was set, of which a second end closed sockets of others.)
func TestEndThatLetsAResetBeRead(t *testing.T) {
	var server atomic.Pointer[net.TCPConn]
	r := start(t, shaper.TCP, serveTCP(t, func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, minGrant))
		c.Write(make([]byte, minGrant))
		server.Store(c)
		io.Copy(io.Discard, c)
	}))
	r.listen.HalfClose = time.Hour
	r.apply(shaper.Limit{Name: "both", Rate: 8 * 2 * minGrant, Direction: shaper.Both})
	c := dial(t, r.addr())
	c.Write(make([]byte, minGrant))
	var s *session
	waitFor(t, "one direction that waits though nothing is left", func() (ok bool) {
		r.proxy.loop.call(func(now leaky.Time) {
			if len(r.proxy.sessions.all) == 0 || server.Load() == nil {
				return
			}
			s = r.proxy.sessions.all[0]
			if ok = s.up.moved == minGrant && s.down.moved == minGrant && s.down.unit.queued && !s.up.unit.queued; !ok {
				return
			}
			s.client.ready(unix.EPOLLIN, now) // as the loop may, for what has been read already
			server.Load().SetLinger(0)
			server.Load().Close()
			c.CloseWrite()
			for fd, events := range map[int]int16{s.server.fd: unix.POLLERR, s.client.fd: unix.POLLRDHUP} {
				n, err := 0, error(unix.EINTR)
				for errors.Is(err, unix.EINTR) {
					n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, 5000)
				}
				if n != 1 {
					t.Error("no reset, or no end: ", err)
				}
			}
			s.client.ready(unix.EPOLLIN|unix.EPOLLRDHUP, now+10*leaky.Second) // when the line is due
			if s.stage != ended || s.timer.Scheduled() {
				t.Errorf("stage %d; a timer is set: %v", s.stage, s.timer.Scheduled())
			}
		})
		return ok
	})
	r.settle()
}
