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
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// proxyRig is a proxy between a loopback port and a downstream of the test.
type proxyRig struct {
	t      testing.TB
	proxy  *Proxy
	shaper *shaper.Shaper
	listen shaper.Listener
	short  chan struct{} // receives when OnShort was called
}

// start runs a proxy in front of downstream, an address of this host.
func start(t testing.TB, protocol shaper.Protocol, downstream string, limits ...shaper.Limit) *proxyRig {
	t.Helper()
	s, clock := shaper.New(10000), pacer.NewClock()
	short := make(chan struct{}, 1)
	p, err := New(Options{Shaper: s, Clock: clock, Log: testLog(t), TrafficLog: testLog(t), OnShort: func() {
		select {
		case short <- struct{}{}:
		default:
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	to := netip.MustParseAddrPort(downstream)
	r := &proxyRig{t: t, proxy: p, shaper: s, short: short, listen: shaper.Listener{
		Name:       "l",
		Addresses:  []shaper.Address{addressOf(protocol, netip.MustParseAddrPort(testutil.FreeAddr(t, protocol.String())))},
		Downstream: []shaper.Downstream{{Host: to.Addr().String(), Port: to.Port()}},
		MaxQueue:   1000, ConnectTimeout: testTimeout, UDPIdleTimeout: time.Second, MaxFlows: 100,
	}}
	r.apply(limits...)
	return r
}

func (r *proxyRig) apply(limits ...shaper.Limit) {
	r.t.Helper()
	if err := r.proxy.Apply(r.t.Context(), []shaper.Listener{r.listen}, policy(r.t, r.shaper, limits...), nil); err != nil {
		r.t.Fatal(err)
	}
}

func (r *proxyRig) addr() string { return r.listen.Endpoints()[0].Addr.String() }

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

// dialFrom is dial from another address of this host.
func dialFrom(t *testing.T, source, addr string) *net.TCPConn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
	c, err := d.Dial("tcp4", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

// forwarded returns how many bytes the kernel has taken for downstreams, of all connections and flows that are open. Unlike what
// a downstream has read, it does not lag behind when the downstream is late.
func forwarded(p *Proxy) (sum uint64) {
	p.stopAll(func(leaky.Time) {
		for _, w := range p.workers {
			for _, s := range w.sessions.all {
				sum += s.up.moved
			}
			for _, f := range w.flows {
				sum += f.up.moved
			}
		}
	})
	return sum
}

// settle checks that nothing is left of connections that have ended.
func (r *proxyRig) settle() {
	r.t.Helper()
	deadline := time.Now().Add(testTimeout)
	for {
		left := ""
		r.proxy.home.loop.call(func(leaky.Time) {
			if n := len(r.proxy.home.sessions.all); n > 0 {
				left = fmt.Sprint(n, " sessions")
			}
			if n := len(r.proxy.home.flows); n > 0 {
				left = fmt.Sprint(n, " flows")
			}
			if n := len(r.proxy.home.loop.scheduler.byKey); n > 0 {
				left = fmt.Sprint(n, " lines")
			}
			if n := r.proxy.home.loop.memory.used; n > 0 {
				left = fmt.Sprint(n, " queued bytes")
			}
		})
		if left == "" && r.proxy.openConns.Load() == 0 {
			return
		}
		if time.Now().After(deadline) {
			r.t.Errorf("left behind: %s, %d open", left, r.proxy.openConns.Load())
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// testTimeout is how long tests wait for something to happen.
const testTimeout = 20 * time.Second

// startEchoes starts n connections that each send random bytes to an echo server, and compares what
// comes back. The result waits for them.
func startEchoes(t *testing.T, r *proxyRig, n, bytesEach int) *sync.WaitGroup {
	t.Helper()
	wg := &sync.WaitGroup{}
	for range n {
		wg.Go(func() {
			sent := randomBytes(bytesEach)
			c := dial(t, r.addr())
			c.SetDeadline(time.Now().Add(3 * testTimeout))
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
	return wg
}

func TestReloadDuringTransfer(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), shaper.Limit{Name: "up", Rate: 80e6, Direction: shaper.Both})
	echoes := startEchoes(t, r, 4, 4<<20)
	for i := range 30 {
		time.Sleep(10 * time.Millisecond)
		limits := []shaper.Limit{{Name: "up", Rate: uint64(50e6 + i*20e6), Direction: shaper.Both}}
		switch i % 4 {
		case 1:
			limits[0].Direction = shaper.ToDownstream
		case 2:
			limits = append(limits, shaper.Limit{Name: "more", Key: shaper.KeyConnection, Rate: 500e6, MaxConnections: 2, QueueTimeout: time.Minute, MaxQueue: 10})
		case 3:
			limits = nil
		}
		r.apply(limits...)
	}
	echoes.Wait()
	r.settle()
}

func TestApply_FailureChangesNothing(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), shaper.Limit{Name: "up", Rate: 80e6})
	c := dial(t, r.addr())
	old := r.shaper.Policy()
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	other := shaper.Listener{
		Name: "other",
		Addresses: []shaper.Address{
			addressOf(shaper.TCP, netip.MustParseAddrPort(testutil.FreeAddr(t, "tcp"))),
			addressOf(shaper.UDP, netip.MustParseAddrPort(testutil.FreeAddr(t, "udp"))),
			addressOf(shaper.TCP, netip.MustParseAddrPort(taken.Addr().String())),
		},
		Downstream: r.listen.Downstream,
	}
	committed := false
	err = r.proxy.Apply(t.Context(), []shaper.Listener{r.listen, other}, policy(t, r.shaper), func() error { committed = true; return nil })
	if err == nil || committed || r.shaper.Policy() != old {
		t.Fatalf("err %v, committed %v, policy changed %v", err, committed, r.shaper.Policy() != old)
	}
	// Nor does it if the other plane fails, last of all.
	other.Addresses = other.Addresses[:2]
	fails := errors.New("the other plane fails")
	err = r.proxy.Apply(t.Context(), []shaper.Listener{other}, policy(t, r.shaper), func() error { return fails })
	if !errors.Is(err, fails) || r.shaper.Policy() != old {
		t.Fatalf("err %v, policy changed %v", err, r.shaper.Policy() != old)
	}
	if c, err := net.Dial("tcp4", other.Endpoints()[0].Addr.String()); err == nil {
		c.Close()
		t.Error("an uncommitted port is open")
	}
	c.Write([]byte("ping"))
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Errorf("the connection broke: %v", err)
	}
	dial(t, r.addr())
}

func TestShutdown(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	c := dial(t, r.addr())
	c.Write([]byte("ping"))
	io.ReadFull(c, make([]byte, 4))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if left := r.proxy.Shutdown(ctx); left != 1 {
		t.Errorf("%d connections left, want 1", left)
	}
	if _, err := net.Dial("tcp4", r.addr()); err == nil {
		t.Error("the proxy accepts connections during Shutdown")
	}
	c.Write([]byte("ping"))
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Errorf("the connection broke: %v", err)
	}
	c.Close()
	if left := r.proxy.Shutdown(t.Context()); left != 0 {
		t.Errorf("%d connections left, want none", left)
	}
}
