package conn

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// newDownstreams returns a listener with downstreams, and no running proxy.
func newDownstreams(config shaper.Listener, hosts ...string) *listener {
	ln := &listener{name: "l", proxy: &worker{Proxy: &Proxy{shaper: shaper.New(1), log: quietLog, stateLog: newLogLimiter(quietLog, time.Minute)}, loop: &loop{pacer: pacer.New(pacer.NewClock())}}, pools: map[poolKey]*gate{}, poolState: &shaper.LimitState{}}
	c := &listenerConfig{Listener: config}
	for i, name := range hosts {
		if len(c.Downstream) <= i {
			c.Downstream = append(c.Downstream, shaper.Downstream{})
		}
		c.Downstream[i].Host, c.Downstream[i].Port = name, 80
		h := &host{}
		addr := netip.MustParseAddr(name)
		h.address.Store(&addr)
		c.hosts = append(c.hosts, h)
	}
	ln.config.Store(c)
	ln.setDownstreams(c, leaky.Second)
	return ln
}

// connectionsByHost picks downstreams for n sources, and returns the number of connections of
// each.
func (ln *listener) connectionsByHost(n int, now leaky.Time) map[string]int {
	got := map[string]int{}
	for i := range n {
		d, _ := ln.pick(target{source: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})}, nil, now)
		d.inFlight++
		got[d.Host]++
	}
	for _, d := range ln.downstreams {
		d.inFlight -= got[d.Host]
	}
	return got
}

func TestBalance_Weights(t *testing.T) {
	weights := []shaper.Downstream{{Weight: 1}, {Weight: 2}, {Weight: 5}}
	for _, tt := range []struct {
		balance shaper.Balance
		near    float64
	}{{shaper.RoundRobin, 0.001}, {shaper.LeastConnections, 0.002}, {shaper.SourceHash, 0.06}} {
		t.Run(fmt.Sprint(tt.balance), func(t *testing.T) {
			ln := newDownstreams(shaper.Listener{Balance: tt.balance, Downstream: weights}, "10.1.0.1", "10.1.0.2", "10.1.0.3")
			const n = 8000
			got := ln.connectionsByHost(n, leaky.Second)
			for i, d := range ln.downstreams {
				want := float64(weights[i].Weight) / 8
				if share := float64(got[d.Host]) / n; share < want-tt.near || share > want+tt.near {
					t.Errorf("%s has %.3f of the connections, want %.3f", d.Host, share, want)
				}
			}
		})
	}
}

// When a downstream is down only its own sources move, and they return with it.
func TestSourceHashIsStable(t *testing.T) {
	ln := newDownstreams(shaper.Listener{Balance: shaper.SourceHash}, "10.1.0.1", "10.1.0.2", "10.1.0.3", "10.1.0.4")
	where := func() (list []string) {
		for i := range 1000 {
			d, _ := ln.pick(target{source: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})}, nil, leaky.Second)
			list = append(list, d.Host)
		}
		return list
	}
	before := where()
	ln.downstreams[1].down = true
	moved := 0
	for i, host := range where() {
		if before[i] == "10.1.0.2" {
			moved++
		} else if host != before[i] {
			t.Fatalf("source %d moved from %s to %s", i, before[i], host)
		}
	}
	if moved < 150 {
		t.Errorf("%d sources moved", moved)
	}
	ln.downstreams[1].down = false
	for i, host := range where() {
		if host != before[i] {
			t.Fatalf("source %d did not return to %s", i, before[i])
		}
	}
}

func TestPick_SkipsUnavailable(t *testing.T) {
	ln := newDownstreams(shaper.Listener{Downstream: []shaper.Downstream{{MaxConnections: 1}, {}, {}}, EjectAfter: 2, EjectFor: time.Second}, "10.1.0.1", "10.1.0.2", "10.1.0.3")
	a, b, c := ln.downstreams[0], ln.downstreams[1], ln.downstreams[2]
	source := netip.MustParseAddr("10.0.0.1")
	now := leaky.Second
	pick := func(failed ...*downstream) *downstream {
		d, _ := ln.pick(target{source: source}, failed, now)
		return d
	}
	if d := pick(a, b); d != c {
		t.Error("a failed downstream was picked again")
	}
	if d := pick(a, b, c); d != nil {
		t.Error("a downstream was picked though all had failed")
	}
	a.inFlight = 1
	if d := pick(b, c); d != nil {
		t.Error("a full downstream was picked")
	}
	if _, full := ln.pick(target{source: source}, []*downstream{b, c}, now); !full {
		t.Error("pick did not report that the downstream is full")
	}
	b.down = true
	for range 5 {
		if pick() != c {
			t.Fatal("a full or down downstream was picked")
		}
	}
	c.recordFailure(80, errNoAddress, now)
	if pick() != c {
		t.Error("a downstream was ejected by its first failure")
	}
	c.recordFailure(80, errNoAddress, now)
	if d := pick(); d != nil {
		t.Errorf("%v was picked, though the only available downstream is full", d)
	}
	a.inFlight = 0
	if pick() != a {
		t.Error("a downstream with capacity was not picked")
	}
	a.down = true
	if pick() == nil {
		t.Error("no downstream was picked when all are unavailable")
	}
	a.down = false
	now += leaky.FromDuration(time.Second)
	if pick(a) != c {
		t.Error("an ejected downstream was not picked after the ejection ended")
	}
	c.recordFailure(80, errNoAddress, now)
	if pick(a) == c && !b.down {
		t.Error("a downstream that failed again was not ejected again")
	}
}

func TestSlowStart(t *testing.T) {
	ln := newDownstreams(shaper.Listener{SlowStart: 10 * time.Second, EjectAfter: 1, EjectFor: time.Second}, "10.1.0.1", "10.1.0.2")
	now := leaky.Second
	d := ln.downstreams[1]
	d.recordFailure(80, errNoAddress, now)
	now += 2 * leaky.Second
	d.recordSuccess(80, now)
	for _, tt := range []struct {
		after time.Duration
		want  float64 // share of all connections
	}{{0, 0.1 / 1.1}, {5 * time.Second, 0.5 / 1.5}, {10 * time.Second, 0.5}} {
		got := ln.connectionsByHost(1000, now+leaky.FromDuration(tt.after))
		if share := float64(got[d.Host]) / 1000; share < tt.want-0.01 || share > tt.want+0.01 {
			t.Errorf("after %v it has %.3f of the connections, want %.3f", tt.after, share, tt.want)
		}
	}
}

// taggedServer returns a downstream that sends name on each connection, and functions that open
// and close its port.
func taggedServer(t *testing.T, name string) (addr netip.AddrPort, open func(), shut func()) {
	addr = netip.MustParseAddrPort(testutil.FreeAddr(t, "tcp"))
	var l net.Listener
	open = func() {
		t.Helper()
		var err error
		if l, err = net.Listen("tcp4", addr.String()); err != nil {
			t.Fatal(err)
		}
		go func(l net.Listener) {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Write([]byte(name))
				go func() { io.Copy(io.Discard, c); c.Close() }()
			}
		}(l)
	}
	shut = func() { l.Close() }
	t.Cleanup(func() {
		if l != nil {
			l.Close()
		}
	})
	return addr, open, shut
}

// readTag returns the first byte or the error of a new connection, which stays open until the
// test ends.
func (r *proxyRig) readTag() string {
	r.t.Helper()
	c, err := net.Dial("tcp4", r.addr())
	if err != nil {
		return err.Error()
	}
	r.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(5 * time.Second))
	b := make([]byte, 1)
	if _, err := io.ReadFull(c, b); err != nil {
		return err.Error()
	}
	return string(b)
}

func TestDial_FailsOver(t *testing.T) {
	t.Parallel()
	a, openA, shutA := taggedServer(t, "a")
	b, openB, _ := taggedServer(t, "b")
	openA()
	openB()
	r := start(t, shaper.TCP, a.String())
	r.listen.Downstream = []shaper.Downstream{{Host: a.Addr().String(), Port: a.Port()}, {Host: b.Addr().String(), Port: b.Port()}}
	r.listen.EjectAfter, r.listen.EjectFor = 3, 2*time.Second
	r.apply()
	got := map[string]int{}
	for range 20 {
		got[r.readTag()]++
	}
	if got["a"] != 10 || got["b"] != 10 {
		t.Errorf("both up: connections %v", got)
	}
	shutA()
	for range 20 {
		if s := r.readTag(); s != "b" {
			t.Fatalf("one down: got %q, want b", s)
		}
	}
	up := map[string]bool{}
	for _, d := range r.proxy.Downstreams() {
		up[d.Downstream] = d.Up
	}
	if up[a.String()] || !up[b.String()] {
		t.Errorf("up: %v", up)
	}
	openA()
	testutil.WaitFor(t, "the first downstream again", func() bool { return r.readTag() == "a" })
}

func TestCheck_DownAndUp(t *testing.T) {
	a, openA, shutA := taggedServer(t, "a")
	openA()
	r := start(t, shaper.TCP, a.String())
	r.listen.Check = shaper.HealthCheck{Interval: 20 * time.Millisecond, Timeout: time.Second, Rise: 2, Fall: 3}
	r.apply()
	up := func() bool { return r.proxy.Downstreams()[0].Up }
	time.Sleep(100 * time.Millisecond)
	if !up() {
		t.Error("not up at first")
	}
	shutA()
	testutil.WaitFor(t, "down", func() bool { return !up() })
	openA()
	testutil.WaitFor(t, "up", up)
	r.listen.Check = shaper.HealthCheck{}
	r.apply()
	shutA()
	time.Sleep(100 * time.Millisecond)
	if !up() {
		t.Error("checks go on after they were turned off")
	}
	r.settle()
}

// A check counts against max_connections of a downstream: it waits for a free connection, and
// connections wait for it.
func TestCheck_CountsAsConnection(t *testing.T) {
	// It counts connections in the order in which they came: when it answers one, it has counted all before.
	server := script(t, func(_ int, c *net.TCPConn) { io.Copy(c, c); c.Close() })
	r := start(t, shaper.TCP, server.addr)
	r.listen.Downstream[0].MaxConnections, r.listen.ConnectTimeout = 2, time.Minute
	r.listen.Check = shaper.HealthCheck{Interval: 2 * time.Millisecond, Timeout: testTimeout, Rise: 1, Fall: 1}
	r.apply()
	testutil.WaitFor(t, "a check", func() bool { return server.count() > 0 })
	var in []*net.TCPConn
	for range 2 {
		c := dial(t, r.addr())
		c.Write([]byte{1})
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		in = append(in, c)
	}
	came := server.count()
	time.Sleep(100 * time.Millisecond)
	if n := server.count() - came; n > 0 {
		t.Errorf("%d connections more at a downstream with max_connections 2", n)
	}
	if d := r.proxy.Downstreams()[0]; !d.Up || d.InFlight != 2 {
		t.Errorf("%+v", d)
	}
	for _, c := range in {
		c.Close()
	}
	testutil.WaitFor(t, "checks to go on", func() bool { return server.count() > came })
	r.listen.Check = shaper.HealthCheck{}
	r.apply()
	testutil.WaitFor(t, "no connections in flight", func() bool { return r.proxy.Downstreams()[0].InFlight == 0 })
	r.settle()
}

// A connection that waits for a downstream, with its slots, is not overtaken by connections that
// wait for slots.
func TestDownstreamQueue_KeepsOrder(t *testing.T) {
	const n = 15
	order := make(chan byte, n)
	addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
		b := make([]byte, 1)
		io.ReadFull(c, b)
		time.Sleep(10 * time.Millisecond)
		order <- b[0]
	})
	r := start(t, shaper.TCP, addr)
	r.listen.Downstream[0].MaxConnections = 1
	r.listen.ConnectTimeout = time.Minute
	r.apply(shaper.Limit{Name: "cap", MaxConnections: 4, QueueTimeout: time.Minute, MaxQueue: 100})
	state := r.shaper.Policy().State(0)
	var clients sync.WaitGroup
	for i := range n {
		c := dial(t, r.addr())
		c.Write([]byte{byte(i)})
		testutil.WaitFor(t, "its arrival", func() bool {
			return r.shaper.Listener("l").Accepted.Load() == uint64(i+1)
		})
		clients.Go(func() { io.Copy(io.Discard, c); c.Close() })
	}
	clients.Wait()
	for i := range n {
		if got := <-order; int(got) != i {
			t.Errorf("connection %d was served instead of %d", got, i)
		}
	}
	r.settle()
	if state.InFlight.Load() != 0 {
		t.Errorf("%d slots are held", state.InFlight.Load())
	}
}

// A connection that waits for a full downstream, because the other one failed it, does not block
// later ones, which can go to the other.
func TestDownstreamQueue_HeadDoesNotBlock(t *testing.T) {
	full, openFull, _ := taggedServer(t, "f")
	other, openOther, _ := taggedServer(t, "o")
	openFull()
	limit := shaper.Limit{Name: "pace", NewConnections: shaper.Frequency{N: 1000, Per: time.Second}, QueueTimeout: time.Minute, MaxQueue: 10}
	r := start(t, shaper.TCP, full.String())
	r.listen.Downstream = []shaper.Downstream{
		{Host: full.Addr().String(), Port: full.Port(), MaxConnections: 1},
		{Host: other.Addr().String(), Port: other.Port()},
	}
	r.listen.ConnectTimeout = time.Minute
	r.apply(limit)
	first, got := dial(t, r.addr()), make([]byte, 1)
	if io.ReadFull(first, got); string(got) != "f" {
		t.Fatalf("the first connection got %q", got)
	}
	dial(t, r.addr())
	waiting := func() (n int) {
		r.proxy.home.loop.call(func(leaky.Time) {
			for _, s := range r.proxy.home.sessions.all {
				if s.queue != nil && len(s.failedDownstreams) == 1 {
					n++
				}
			}
		})
		return n
	}
	testutil.WaitFor(t, "a connection that waits for the full downstream", func() bool { return waiting() == 1 })
	openOther()
	if got := r.readTag(); got != "o" {
		t.Errorf("the later connection got %q", got)
	}
	if waiting() != 1 {
		t.Error("the head does not wait anymore")
	}
	first.Close() // lets the waiter in
	testutil.WaitFor(t, "no waiters", func() bool { return waiting() == 0 })
	passed := &r.shaper.Policy().State(0).Connections
	if n := passed[shaper.Pass][shaper.None].Load() + passed[shaper.Delay][shaper.ByNewConnections].Load() + passed[shaper.Delay][shaper.ByConnections].Load(); n != 3 {
		t.Errorf("3 connections were counted as admitted %d times", n)
	}
}

// The max_connections of a downstream holds, and waiters get served.
func TestDownstream_MaxConnections(t *testing.T) {
	var open, most atomic.Int64
	addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
		n := open.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		c.Write([]byte("x"))
		io.Copy(io.Discard, c)
		open.Add(-1)
	})
	r := start(t, shaper.TCP, addr)
	r.listen.Downstream[0].MaxConnections = 2
	r.listen.ConnectTimeout = time.Minute
	r.apply()
	served := make(chan error, 20)
	for range 20 {
		c := dial(t, r.addr())
		go func() {
			_, err := io.ReadFull(c, make([]byte, 1))
			time.Sleep(10 * time.Millisecond)
			c.Close()
			served <- err
		}()
	}
	for range 20 {
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
	if most.Load() != 2 {
		t.Errorf("%d at once, want 2", most.Load())
	}
	r.settle()
	// A connection that waits for longer than connect_timeout is ended.
	for range 2 {
		c := dial(t, r.addr())
		io.ReadFull(c, make([]byte, 1))
	}
	r.listen.ConnectTimeout = 100 * time.Millisecond
	r.apply()
	if _, err := dial(t, r.addr()).Read(make([]byte, 1)); err == nil {
		t.Error("a third connection was served")
	}
	ended := &r.shaper.Listener("l").Ended[shaper.NotConnected]
	testutil.WaitFor(t, "it to be counted", func() bool { return ended.Load() > 0 })
	if n := ended.Load(); n != 1 {
		t.Errorf("%d were not connected, want 1", n)
	}
	r.proxy.home.loop.call(func(leaky.Time) {
		ln := r.proxy.listeners["l"]
		if len(ln.pools) != 0 {
			t.Error("the queue is not empty")
		}
	})
}

// A downstream without a port is named as in the configuration; the downstream of a connection is
// reported with the port dialed.
func TestDownstreamWithoutPort(t *testing.T) {
	a := newApplyRig(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	a.downstream = shaper.Downstream{Host: "127.0.0.2"}
	port := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), testutil.FreePort(t, "tcp")) // free at both addresses
	server, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.2:%d", port.Port()))
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	a.apply([]listenerSpec{{name: "l", ports: []netip.AddrPort{port}}})
	c := dial(t, port.String())
	defer c.Close()
	if _, err := server.Accept(); err != nil {
		t.Fatal(err)
	}
	want := server.Addr().String()
	testutil.WaitFor(t, "an open connection", func() bool { return a.shaper.Listener("l").Open.Load() == 1 })
	a.proxy.Connections(func(c *shaper.ConnectionStatus) {
		if c.Downstream != want {
			t.Errorf("the connection goes to %s, want %s", c.Downstream, want)
		}
	})
	for _, d := range a.proxy.Downstreams() {
		if d.Downstream != "127.0.0.2" {
			t.Errorf("the downstream is %s, want 127.0.0.2", d.Downstream)
		}
	}
	if n := a.proxy.DrainDownstream("", "127.0.0.2", true); n != 1 {
		t.Errorf("%d were drained, want 1", n)
	}
}
