package conn

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// running is a proxy between a loopback port and a downstream of the test.
type running struct {
	t      testing.TB
	proxy  *Proxy
	shaper *shaper.Shaper
	listen Listen
}

// start runs a proxy in front of downstream, which is an address of this host.
func start(t testing.TB, protocol shaper.Protocol, downstream string, limits ...shaper.Limit) *running {
	t.Helper()
	s, clock := shaper.New(10000), leaky.NewClock()
	p, err := New(s, clock, testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	to := netip.MustParseAddrPort(downstream)
	r := &running{t: t, proxy: p, shaper: s, listen: Listen{
		Name:           "l",
		Endpoints:      []Endpoint{{Protocol: protocol, Addr: netip.MustParseAddrPort(freePort(t, protocol))}},
		Downstream:     []Downstream{{Host: to.Addr().String(), Port: to.Port()}},
		ConnectTimeout: time.Second, IdleTimeout: 300 * time.Millisecond, MaxFlows: 100,
	}}
	r.apply(limits...)
	return r
}

func (r *running) apply(limits ...shaper.Limit) {
	r.t.Helper()
	if err := r.proxy.Apply(r.t.Context(), []Listen{r.listen}, policy(r.t, r.shaper, limits...)); err != nil {
		r.t.Fatal(err)
	}
}

func (r *running) addr() string { return r.listen.Endpoints[0].Addr.String() }

func freePort(t testing.TB, protocol shaper.Protocol) string {
	t.Helper()
	if protocol == shaper.UDP {
		c, err := net.ListenPacket("udp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.LocalAddr().String()
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// serveTCP handles each connection in a goroutine until the test ends.
func serveTCP(t testing.TB, handle func(*net.TCPConn)) string {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				handle(c.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().String()
}

func dial(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp4", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return c.(*net.TCPConn)
}

func echo(c *net.TCPConn) { io.Copy(c, c) }

func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func TestTCPCarriesEveryByte(t *testing.T) {
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

// settle checks that nothing is left of connections that have ended.
func (r *running) settle() {
	r.t.Helper()
	deadline := time.Now().Add(5 * time.Second)
	for {
		left := ""
		r.proxy.loop.call(func(leaky.Time) {
			if n := len(r.proxy.sessions); n > 0 {
				left = fmt.Sprint(n, " sessions")
			}
			if n := len(r.proxy.flows); n > 0 {
				left = fmt.Sprint(n, " flows")
			}
			if n := len(r.proxy.loop.lines.byKey); n > 0 {
				left = fmt.Sprint(n, " lines")
			}
			if n := r.proxy.loop.queuedBytes; n > 0 {
				left = fmt.Sprint(n, " queued bytes")
			}
		})
		if left == "" && r.proxy.open.Load() == 0 {
			return
		}
		if time.Now().After(deadline) {
			r.t.Errorf("left behind: %s, %d open", left, r.proxy.open.Load())
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestHalfCloseIsKept(t *testing.T) {
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
				c.SetDeadline(time.Now().Add(2 * time.Second))
				if n, err := io.ReadFull(c, got); err != nil || string(got) != "abcdef" {
					t.Fatalf("got %q, err %v", got[:n], err)
				}
				c.Close()
			}
		})
	}
}

func TestRefusedByClosing(t *testing.T) {
	hold := make(chan struct{})
	r := start(t, shaper.TCP, serveTCP(t, func(*net.TCPConn) { <-hold }),
		shaper.Limit{Name: "cap", Connections: 1, Excess: shaper.ExcessClose})
	t.Cleanup(func() { close(hold) })
	first := dial(t, r.addr())
	first.Write([]byte("x"))
	waitFor(t, "a slot in use", func() bool { return r.shaper.Policy().State(0).InFlight.Load() == 1 })
	c := dial(t, r.addr())
	c.Write([]byte("a request"))
	if n, err := c.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("read %d bytes, %v, want the end", n, err)
	}
}

// Work that is put off must not pile up, or the rest of the loop waits for it.
func TestPutOffWorkDoesNotPileUp(t *testing.T) {
	r := start(t, shaper.TCP, serveTCP(t, func(c *net.TCPConn) { io.Copy(io.Discard, c) }))
	const streams = 8
	stop := time.Now().Add(500 * time.Millisecond)
	var wg sync.WaitGroup
	for range streams {
		c := dial(t, r.addr())
		wg.Go(func() {
			for b := make([]byte, 1<<20); time.Now().Before(stop); {
				c.Write(b)
			}
			c.Close()
		})
	}
	most := 0
	for time.Now().Before(stop) {
		r.proxy.loop.call(func(leaky.Time) { most = max(most, len(r.proxy.loop.again)) })
	}
	wg.Wait()
	if most > 2*streams || most == 0 {
		t.Errorf("up to %d pieces of work were put off for %d streams", most, streams)
	}
	r.settle()
}

func TestResetsUnderASharedLimit(t *testing.T) {
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
		time.Sleep(50 * time.Millisecond)
		c.SetLinger(0)
		c.Close()
		select {
		case err := <-ended:
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the downstream read %v, want a reset", err)
			}
		case <-time.After(time.Second):
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
		for s := range r.proxy.sessions {
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

func waitFor(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited 5 s for %s", what)
		}
	}
}

func TestReloadUnderWay(t *testing.T) {
	r := start(t, shaper.TCP, serveTCP(t, echo), shaper.Limit{Name: "up", Rate: 80e6, Direction: shaper.Both})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			sent := randomBytes(4 << 20)
			c := dial(t, r.addr())
			go func() {
				c.Write(sent)
				c.CloseWrite()
			}()
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, sent) {
				t.Errorf("got %d of %d bytes back, err %v", len(got), len(sent), err)
			}
		})
	}
	for i := range 30 {
		time.Sleep(10 * time.Millisecond)
		limits := []shaper.Limit{{Name: "up", Rate: uint64(50e6 + i*20e6), Direction: shaper.Both}}
		switch i % 4 {
		case 1:
			limits[0].Direction = shaper.ToDownstream
		case 2:
			limits = append(limits, shaper.Limit{Name: "more", Key: shaper.KeyConnection, Rate: 500e6, Connections: 2, MaxWait: time.Second, MaxWaiting: 10})
		case 3:
			limits = nil
		}
		r.apply(limits...)
	}
	wg.Wait()
	r.settle()
}

func TestApplyLeavesEverythingWhenItFails(t *testing.T) {
	r := start(t, shaper.TCP, serveTCP(t, echo), shaper.Limit{Name: "up", Rate: 80e6})
	c := dial(t, r.addr())
	old := r.shaper.Policy()
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	other := Listen{
		Name:       "other",
		Endpoints:  []Endpoint{{Protocol: shaper.TCP, Addr: netip.MustParseAddrPort(taken.Addr().String())}},
		Downstream: r.listen.Downstream,
	}
	err = r.proxy.Apply(t.Context(), []Listen{r.listen, other}, policy(t, r.shaper))
	if err == nil || r.shaper.Policy() != old {
		t.Fatalf("err %v, policy changed %v", err, r.shaper.Policy() != old)
	}
	c.Write([]byte("ping"))
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Errorf("the connection broke: %v", err)
	}
	dial(t, r.addr())
}

func TestDrain(t *testing.T) {
	r := start(t, shaper.TCP, serveTCP(t, echo))
	c := dial(t, r.addr())
	c.Write([]byte("ping"))
	io.ReadFull(c, make([]byte, 4))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if left := r.proxy.Drain(ctx); left != 1 {
		t.Errorf("%d connections left, want 1", left)
	}
	if _, err := net.Dial("tcp4", r.addr()); err == nil {
		t.Error("a draining proxy accepts connections")
	}
	c.Write([]byte("ping"))
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Errorf("the connection broke: %v", err)
	}
	c.Close()
	if left := r.proxy.Drain(t.Context()); left != 0 {
		t.Errorf("%d connections left, want none", left)
	}
}

func TestUDP(t *testing.T) {
	server, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		b := make([]byte, 65536)
		for {
			n, from, err := server.ReadFrom(b)
			if err != nil {
				return
			}
			server.WriteTo(b[:n], from)
		}
	}()
	for name, limits := range map[string][]shaper.Limit{
		"without limits": nil,
		"limited": {
			{Name: "bytes", Key: shaper.KeySource, Direction: shaper.Both, Rate: 80e6, MaxDelay: time.Second},
			{Name: "packets", Direction: shaper.Both, Packets: shaper.Frequency{N: 1000, Per: time.Second}, MaxDelay: time.Second},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, shaper.UDP, server.LocalAddr().String(), limits...)
			c, err := net.Dial("udp4", r.addr())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(5 * time.Second))
			for _, size := range []int{0, 1, 1472, 1500, 9000, 65507} {
				sent := randomBytes(size)
				if _, err := c.Write(sent); err != nil {
					t.Fatal(err)
				}
				got := make([]byte, 65536)
				n, err := c.Read(got)
				if err != nil || !bytes.Equal(got[:n], sent) {
					t.Errorf("%d bytes: got %d back, err %v", size, n, err)
				}
			}
			r.settle() // the flow expires
		})
	}
}

func TestUDPUnderAConnectionCap(t *testing.T) {
	server, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	r := start(t, shaper.UDP, server.LocalAddr().String(),
		shaper.Limit{Name: "cap", Connections: 2, MaxWait: time.Second, MaxWaiting: 10})
	for range 3 {
		c, err := net.Dial("udp4", r.addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.Write([]byte("x"))
	}
	state := r.shaper.Policy().State(0)
	waitFor(t, "the third to be refused", func() bool { return state.Connections[shaper.Refuse][shaper.ByConnections].Load() == 1 })
	if n := state.Connections[shaper.Pass][shaper.None].Load(); n != 2 {
		t.Errorf("%d flows passed, want 2", n)
	}
	for range 2 {
		server.SetReadDeadline(time.Now().Add(time.Second))
		if _, _, err := server.ReadFrom(make([]byte, 10)); err != nil {
			t.Error(err)
		}
	}
	r.settle()
}

func TestUDPPortThatGoesTakesItsQueueAlong(t *testing.T) {
	server, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	limit := shaper.Limit{Name: "both", Direction: shaper.Both, Rate: 8e5, MaxDelay: time.Second}
	r := start(t, shaper.UDP, server.LocalAddr().String(), limit)
	c, err := net.Dial("udp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 50 {
		c.Write(make([]byte, 1000))
	}
	counts := r.shaper.Listener("l")
	waitFor(t, "the first ones", func() bool { return counts.ToDownstream.Load() >= 2000 })
	r.listen.Endpoints = []Endpoint{{Protocol: shaper.UDP, Addr: netip.MustParseAddrPort(freePort(t, shaper.UDP))}}
	r.apply(limit)
	r.proxy.loop.call(func(leaky.Time) {
		seen := map[*datagram]bool{}
		for _, dg := range r.proxy.loop.datagrams {
			if seen[dg] {
				t.Error("a datagram was freed twice")
			}
			seen[dg] = true
		}
	})
	r.settle()
}

func TestUDPQueueIsBoundedByTime(t *testing.T) {
	server, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	r := start(t, shaper.UDP, server.LocalAddr().String(), shaper.Limit{
		Name: "packets", Packets: shaper.Frequency{N: 1000, Per: time.Second}, MaxDelay: 50 * time.Millisecond,
	})
	c, err := net.Dial("udp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 500 {
		c.Write(make([]byte, 100))
	}
	state := r.shaper.Policy().State(0)
	got := 0
	for b := make([]byte, 2000); ; got++ {
		server.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		if _, _, err := server.ReadFrom(b); err != nil {
			break
		}
	}
	dropped := int(state.Packets[shaper.Refuse][shaper.QueueFull].Load())
	if got < 50 || got > 200 || got+dropped != 500 {
		t.Errorf("%d arrived and %d were dropped, of 500 at once with room for 51", got, dropped)
	}
}

func TestDrainSendsWhatIsQueued(t *testing.T) {
	server, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	r := start(t, shaper.UDP, server.LocalAddr().String(), shaper.Limit{
		Name: "packets", Packets: shaper.Frequency{N: 100, Per: time.Second}, MaxDelay: time.Second,
	})
	c, err := net.Dial("udp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 20 {
		c.Write(make([]byte, 100))
	}
	state := r.shaper.Policy().State(0)
	waitFor(t, "the first", func() bool { return r.shaper.Listener("l").ToDownstream.Load() > 0 })
	if left := r.proxy.Drain(t.Context()); left != 0 {
		t.Errorf("%d connections left, want none", left)
	}
	if n := state.Packets[shaper.Delay][shaper.ByRate].Load() + state.Packets[shaper.Pass][shaper.None].Load(); n != 20 {
		t.Errorf("%d of 20 datagrams left", n)
	}
	c.Write(make([]byte, 100))
	time.Sleep(20 * time.Millisecond)
	if n := r.shaper.Listener("l").ToDownstream.Load(); n != 2000 {
		t.Errorf("%d bytes were forwarded, want 2000: a draining port takes datagrams in", n)
	}
}

func TestUDPQueueIsBoundedByMemory(t *testing.T) {
	server, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	r := start(t, shaper.UDP, server.LocalAddr().String(), shaper.Limit{Name: "bytes", Rate: 8e3, MaxDelay: time.Hour})
	r.proxy.loop.call(func(leaky.Time) { r.proxy.loop.maxQueued = 10 * 2048 })
	c, err := net.Dial("udp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 50 {
		c.Write(make([]byte, 1000))
	}
	state := r.shaper.Policy().State(0)
	waitFor(t, "39 refusals", func() bool { return state.Packets[shaper.Refuse][shaper.MemoryFull].Load() == 39 })
	r.proxy.loop.call(func(leaky.Time) {
		if n := r.proxy.loop.queuedBytes; n != 10*2048 {
			t.Errorf("%d bytes are queued", n)
		}
	})
}

func TestUDPFlowsAreBounded(t *testing.T) {
	server, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() { // answers only who asks for it
		b := make([]byte, 2000)
		for {
			n, from, err := server.ReadFrom(b)
			if err != nil {
				return
			}
			if string(b[:n]) == "ping" {
				server.WriteTo(b[:n], from)
			}
		}
	}()
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.listen.MaxFlows, r.listen.IdleTimeout = 20, time.Minute
	r.apply()
	ping := func(c net.Conn) error {
		c.SetDeadline(time.Now().Add(2 * time.Second))
		if _, err := c.Write([]byte("ping")); err != nil {
			return err
		}
		_, err := c.Read(make([]byte, 10))
		return err
	}
	honest, err := net.Dial("udp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer honest.Close()
	if err := ping(honest); err != nil {
		t.Fatal(err)
	}
	for range 200 {
		c, err := net.Dial("udp4", r.addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close() // not before, or its port may come twice
		c.Write([]byte("x"))
	}
	counts := r.shaper.Listener("l")
	waitFor(t, "the flood", func() bool { return counts.FlowsOpened.Load() == 201 })
	if n := counts.Flows.Load(); n > 20 {
		t.Errorf("%d flows are open, want at most 20", n)
	}
	before := counts.FlowsOpened.Load()
	if err := ping(honest); err != nil || counts.FlowsOpened.Load() != before {
		t.Errorf("the answered flow was lost: err %v", err)
	}
}
