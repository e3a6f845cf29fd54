package conn

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// leave makes the loop believe that n descriptors are left.
func (r *proxyRig) leave(n int) {
	r.proxy.home.loop.call(func(leaky.Time) {
		l := r.proxy.home.loop
		l.headroom.maxFDs = l.headroom.descriptors() + n
	})
}

func TestAccept_PausesWhenDescriptorsLow(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	first := dial(t, r.addr())
	ping := func(c *net.TCPConn, timeout time.Duration) error {
		c.SetDeadline(time.Now().Add(testTimeout))
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		c.SetReadDeadline(time.Now().Add(timeout))
		_, err := io.ReadFull(c, make([]byte, 1))
		return err
	}
	if err := ping(first, testTimeout); err != nil {
		t.Fatal(err)
	}
	r.leave(0)
	second := dial(t, r.addr()) // the kernel accepts it
	if err := ping(second, 200*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a connection without a descriptor: %v, want it to wait", err)
	}
	if n := r.shaper.Listener("l").Accepted.Load(); n != 1 {
		t.Errorf("%d connections were accepted, want 1", n)
	}
	if err := ping(first, testTimeout); err != nil {
		t.Errorf("the existing connection: %v", err)
	}
	r.leave(1000)
	second.SetDeadline(time.Now().Add(testTimeout))
	if _, err := io.ReadFull(second, make([]byte, 1)); err != nil {
		t.Errorf("after descriptors were freed: %v", err)
	}
}

func TestAcceptedConnectionsAreShed(t *testing.T) {
	r := newFullProxy(t, shaper.Limit{QueueTimeout: time.Minute, MaxQueue: 10})
	c := dial(t, r.addr())
	state := r.shaper.Policy().State(0)
	testutil.WaitFor(t, "a waiter", func() bool { return state.Waiting.Load() == 1 })
	r.leave(-5)
	r.proxy.home.loop.call(func(now leaky.Time) {
		r.proxy.home.sessions.each(func(s *session) {
			if s.stage == stageRelaying {
				s.abort(shaper.ResetByClient, now)
			}
		})
	})
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read: %v, want a reset", err)
	}
	if n := r.shaper.Listener("l").Ended[shaper.Overload].Load(); n != 1 {
		t.Errorf("%d were shed, want 1", n)
	}
	r.settle()
}

func TestNoFlowWithoutDescriptors(t *testing.T) {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.leave(0)
	dialUDP(t, r).Write([]byte("x"))
	testutil.WaitFor(t, "a refusal", func() bool { return r.shaper.Listener("l").FlowsRefused.Load() == 1 })
}

// However connections and flows end, their descriptors are freed.
func TestSocketsAreCounted(t *testing.T) {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.listen.UDPIdleTimeout = time.Hour
	r.apply()
	count := func() (n int) {
		r.proxy.home.loop.call(func(leaky.Time) { n = int(r.proxy.headroom.sockets.Load()) })
		return n
	}
	before := count()
	for range 20 {
		dialUDP(t, r).Write([]byte("x"))
	}
	testutil.WaitFor(t, "flows", func() bool { return r.shaper.Listener("l").Flows.Load() == 20 })
	if n := count(); n != before+20 {
		t.Errorf("%d sockets with 20 flows, %d before", n, before)
	}
	r.listen.Addresses = []shaper.Address{addressOf(shaper.TCP, r.listen.Endpoints()[0].Addr)}
	r.listen.Downstream[0].Port = 1 // a port without a listener
	r.apply()
	for range 20 {
		if c, err := net.Dial("tcp4", r.addr()); err == nil {
			io.Copy(io.Discard, c)
			c.Close()
		}
	}
	r.settle()
	if n := count(); n != before {
		t.Errorf("%d sockets at the end, %d at the start", n, before)
	}
}

func TestMemoryCgroup(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("memory.max", "1000000\n")
	write("memory.stat", "anon 5\ninactive_file 100000\n")
	write("memory.current", "600000\n")
	h := &headroom{}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { h.watchMemory(ctx, folder); close(done) }()
	testutil.WaitFor(t, "50 %", func() bool { return h.memoryPercent.Load() == 50 })
	write("memory.current", "1060000\n")
	testutil.WaitFor(t, "96 %", func() bool { return h.memoryPercent.Load() == 96 })
	write("memory.max", "max\n")
	stop()
	<-done
}
