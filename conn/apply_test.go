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

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// listenerSpec is a listener of a test: a name and its ports.
type listenerSpec struct {
	name        string
	ports       []netip.AddrPort
	transparent bool
}

// applyRig is a proxy whose listeners change in a test.
type applyRig struct {
	t          *testing.T
	proxy      *Proxy
	shaper     *shaper.Shaper
	protocol   shaper.Protocol
	downstream shaper.Downstream
}

func newApplyRig(t *testing.T, protocol shaper.Protocol, downstream string) *applyRig {
	s := shaper.New(10000)
	p, err := New(Options{Shaper: s, Clock: pacer.NewClock(), Log: testLog(t), TrafficLog: testLog(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	to := netip.MustParseAddrPort(downstream)
	return &applyRig{t: t, proxy: p, shaper: s, protocol: protocol, downstream: shaper.Downstream{Host: to.Addr().String(), Port: to.Port()}}
}

func (a *applyRig) port() netip.AddrPort {
	return netip.MustParseAddrPort(testutil.FreeAddr(a.t, a.protocol.String()))
}

func (a *applyRig) apply(listens []listenerSpec, limits ...shaper.Limit) {
	a.t.Helper()
	var all []shaper.Listener
	for _, l := range listens {
		listen := shaper.Listener{
			Name: l.name, Downstream: []shaper.Downstream{a.downstream}, Transparent: l.transparent,
			MaxQueue: 1000, ConnectTimeout: time.Minute, UDPIdleTimeout: time.Minute, MaxFlows: 100,
		}
		for _, addr := range l.ports {
			listen.Addresses = append(listen.Addresses, addressOf(a.protocol, addr))
		}
		all = append(all, listen)
	}
	policy, err := a.shaper.Compile(limits, all, nil, nil, false)
	if err != nil {
		a.t.Fatal(err)
	}
	if err := a.proxy.Apply(a.t.Context(), all, policy, nil); err != nil {
		a.t.Fatal(err)
	}
}

// capped returns limits for one listener: 2 connections, and rate bytes/s.
func capped(listener string, rate uint64) []shaper.Limit {
	only := shaper.Match{Listen: []string{listener}}
	return []shaper.Limit{
		{Name: "slots", Match: only, MaxConnections: 2, QueueTimeout: time.Minute, MaxQueue: 10},
		{Name: "rate", Match: only, Rate: 8 * rate},
	}
}

// A connection stays under limits whatever happens to its listener: under those that it had, or those
// of the listener that has its port now. (A limit that lost its connections let them move 787 MB/s.)
func TestApply_ConnectionsStayLimited(t *testing.T) {
	const rate = 200_000
	for _, c := range []struct {
		name    string
		listens func(port, other netip.AddrPort) []listenerSpec
		limits  func() []shaper.Limit
		full    bool // the existing connections take the slots of new ones
	}{
		{"another name", func(port, _ netip.AddrPort) []listenerSpec {
			return []listenerSpec{{name: "pg", ports: []netip.AddrPort{port}}}
		}, func() []shaper.Limit { return capped("pg", rate) }, true},
		{"moves to another listener", func(port, other netip.AddrPort) []listenerSpec {
			return []listenerSpec{{name: "postgres", ports: []netip.AddrPort{other}}, {name: "pg", ports: []netip.AddrPort{port}}}
		}, func() []shaper.Limit { return capped("pg", rate) }, true},
		{"another port", func(_, other netip.AddrPort) []listenerSpec {
			return []listenerSpec{{name: "postgres", ports: []netip.AddrPort{other}}}
		}, func() []shaper.Limit { return capped("postgres", rate) }, true},
		{"another name and other limits", func(port, _ netip.AddrPort) []listenerSpec {
			return []listenerSpec{{name: "pg", ports: []netip.AddrPort{port}}}
		}, func() []shaper.Limit {
			limits := capped("pg", rate)
			limits[0].Name, limits[1].Name = "pg-slots", "pg-rate"
			return limits
		}, true},
		{"removed, and its limits", func(_, other netip.AddrPort) []listenerSpec {
			return []listenerSpec{{name: "pg", ports: []netip.AddrPort{other}}}
		}, func() []shaper.Limit { return nil }, false},
		{"removed, and its limits are another's", func(_, other netip.AddrPort) []listenerSpec {
			return []listenerSpec{{name: "pg", ports: []netip.AddrPort{other}}}
		}, func() []shaper.Limit { return capped("pg", rate) }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var open atomic.Int64
			var mu sync.Mutex
			var served []*net.TCPConn
			a := newApplyRig(t, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
				mu.Lock()
				served = append(served, c)
				mu.Unlock()
				open.Add(1)
				defer open.Add(-1)
				testutil.Discard(c)
			}))
			arrived := func() (n int64) {
				mu.Lock()
				defer mu.Unlock()
				for _, c := range served {
					n += received(t, c)
				}
				return n
			}
			port, other := a.port(), a.port()
			a.apply([]listenerSpec{{name: "postgres", ports: []netip.AddrPort{port}}}, capped("postgres", rate)...)
			var clients []*net.TCPConn
			for range 2 {
				c := dial(t, port.String())
				clients = append(clients, c)
				go func() {
					for {
						if _, err := c.Write(make([]byte, 64<<10)); err != nil {
							return
						}
					}
				}()
			}
			testutil.WaitFor(t, "two connections", func() bool { return open.Load() == 2 && arrived() > 0 })
			waits := dial(t, port.String())
			slots := a.shaper.Policy().State(a.shaper.Policy().Find("slots"))
			testutil.WaitFor(t, "a waiter", func() bool { return slots.Waiting.Load() == 1 })
			listens := c.listens(port, other)
			a.apply(listens, c.limits()...)
			for range 2 { // a reload without changes has no effect
				begun := time.Now()
				before := arrived()
				time.Sleep(150 * time.Millisecond)
				moved := float64(arrived() - before)
				if due := rate*time.Since(begun).Seconds() + 64<<10; moved > due {
					t.Errorf("%.0f bytes moved, and %.0f may", moved, due)
				}
				a.apply(listens, c.limits()...)
			}
			before := arrived()
			testutil.WaitFor(t, "more bytes", func() bool { return arrived() > before })
			late := dial(t, listens[len(listens)-1].ports[0].String())
			late.Write([]byte("x"))
			if c.full {
				time.Sleep(50 * time.Millisecond)
				if n := open.Load(); n != 2 {
					t.Errorf("%d connections at the downstream, want 2", n)
				}
			} else {
				testutil.WaitFor(t, "a third connection", func() bool { return open.Load() == 3 })
			}
			for _, c := range append(clients, waits, late) {
				c.SetLinger(0)
				c.Close()
			}
			testutil.WaitFor(t, "the end", func() bool { return a.proxy.openConns.Load() == 0 })
			testutil.WaitFor(t, "no queue and no gate to be left", func() (none bool) {
				a.proxy.home.loop.call(func(leaky.Time) {
					none = len(a.proxy.home.loop.scheduler.byKey) == 0 && len(a.proxy.home.admission.byKey) == 0
				})
				return none
			})
			for _, name := range []string{"postgres", "pg"} {
				if n := a.shaper.Listener(name).Open.Load(); n != 0 {
					t.Errorf("%s: %d open", name, n)
				}
			}
		})
	}
}

// received returns how many bytes the kernel has received on a socket, whether or not its reader has been scheduled since.
func received(t *testing.T, c *net.TCPConn) (n int64) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	if cerr := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	return int64(info.Bytes_received)
}

// Queued datagrams keep waiting, and none is lost, when their listener gets another name or
// downstream, or becomes transparent.
func TestApply_KeepsQueuedDatagrams(t *testing.T) {
	server, err := net.ListenPacket("udp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	a := newApplyRig(t, shaper.UDP, server.LocalAddr().String())
	port := a.port()
	limit := shaper.Limit{Name: "up", Packets: shaper.Frequency{N: 1, Per: time.Minute}, MaxDelay: time.Hour}
	limit.Match.Protocol = shaper.UDP
	listen := listenerSpec{name: "sms", ports: []netip.AddrPort{port}}
	a.apply([]listenerSpec{listen}, limit)
	c := udpFrom(t, "127.0.0.1", port.String())
	const n = 20
	for i := range n {
		fmt.Fprintf(c, "%02d", i)
	}
	testutil.WaitFor(t, "all but the first to be queued", func() bool { return queuedDatagrams(a.proxy) == n-1 })
	for i := range 6 {
		listen.transparent = i%2 == 0
		a.downstream.Host = []string{"127.0.0.1", "127.0.0.2"}[i/2%2]
		listen.name = []string{"sms", "text", "sms"}[i%3]
		limits := []shaper.Limit{limit}
		if i == 4 {
			limits = append(limits, shaper.Limit{Name: "wide", Rate: 8e6, MaxDelay: time.Second})
		}
		a.apply([]listenerSpec{listen}, limits...)
	}
	if left := queuedDatagrams(a.proxy); left != n-1 {
		t.Errorf("%d datagrams are queued, want %d", left, n-1)
	}
	begun := time.Now()
	limit.Packets = shaper.Frequency{N: 50, Per: time.Second}
	a.apply([]listenerSpec{listen}, limit)
	server.SetReadDeadline(time.Now().Add(testTimeout))
	b := make([]byte, 10)
	for i := range n {
		k, _, err := server.ReadFrom(b)
		if err != nil || string(b[:k]) != fmt.Sprintf("%02d", i) {
			t.Fatalf("datagram %d: %q, %v", i, b[:k], err)
		}
	}
	if took := time.Since(begun); took < (n-2)*20*time.Millisecond { // the first of those that were queued may go at once
		t.Errorf("they took %v, want 20 ms for each", took)
	}
	a.proxy.home.loop.call(func(leaky.Time) {
		if n := len(a.proxy.home.flowList.all); n != 1 || len(a.proxy.home.flows) != 1 {
			t.Errorf("%d flows, want the one", n)
		}
	})
}

// Connections that wait for a slot when their listener is removed are refused: no limit applies to
// them any more.
func TestApply_RefusesWaitersOfRemovedListener(t *testing.T) {
	var open atomic.Int64
	a := newApplyRig(t, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
		open.Add(1)
		defer open.Add(-1)
		io.Copy(io.Discard, c)
	}))
	port := a.port()
	a.apply([]listenerSpec{{name: "postgres", ports: []netip.AddrPort{port}}}, capped("postgres", 1e6)...)
	var clients []*net.TCPConn
	for range 6 {
		clients = append(clients, dial(t, port.String()))
	}
	policy, n := a.shaper.Policy(), 0
	for policy.Limit(n).Name != "slots" {
		n++
	}
	slots := policy.State(n)
	testutil.WaitFor(t, "waiters", func() bool { return slots.Waiting.Load() == 4 && open.Load() == 2 })
	var ended atomic.Int64
	for _, c := range clients {
		go func() {
			c.Read(make([]byte, 1))
			ended.Add(1)
		}()
	}
	a.apply(nil)
	testutil.WaitFor(t, "those that wait to end", func() bool { return ended.Load() >= 4 })
	time.Sleep(100 * time.Millisecond)
	if ended.Load() != 4 || open.Load() != 2 {
		t.Errorf("%d ended and %d at the downstream, want 4 and 2", ended.Load(), open.Load())
	}
}

// Connections are updated in batches, with other work in between.
func TestApply_UpdatesConnectionsInBatches(t *testing.T) {
	a := newApplyRig(t, shaper.TCP, "127.0.0.1:9")
	l := a.proxy.home.loop
	var r registry[*session]
	l.call(func(leaky.Time) {
		for i := range 100 {
			r.add(&session{}, uint64(i))
		}
	})
	done, between := map[*session]bool{}, 0
	inBatches(l, &r, func(s *session, _ leaky.Time) {
		if len(done) == 0 {
			l.post(func(leaky.Time) { between = len(done) })
		}
		for begun := l.clock.Now(); l.clock.Now() < begun+followSlice/4; { // as long as 50 updates take
			continue
		}
		if done[s] = true; len(done)%10 == 0 {
			r.remove(s) // some end
		}
	})
	if len(done) != 100 || between == 0 || between > 20 {
		t.Errorf("%d of 100 were updated, %d of them before other work had its turn", len(done), between)
	}
}

// When a port moves to another listener, its connections move too, and keep their slots at a
// downstream that the other listener does not have. Waiters for that downstream proceed when they end.
// (They were never woken, new connections waited behind them, and none was served.)
func TestApply_MovedConnectionReleasesDownstream(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	first, moves := r.listen.Addresses[0], addressOf(shaper.TCP, netip.MustParseAddrPort(testutil.FreeAddr(t, "tcp")))
	l := r.listen
	l.Downstream[0].MaxConnections, l.ConnectTimeout = 1, time.Minute
	apply := func(listens ...shaper.Listener) {
		t.Helper()
		policy, err := r.shaper.Compile(nil, listens, nil, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.proxy.Apply(t.Context(), listens, policy, nil); err != nil {
			t.Fatal(err)
		}
	}
	echoed := func(c *net.TCPConn) {
		t.Helper()
		c.Write([]byte{1})
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatal("no echo: ", err)
		}
	}
	l.Addresses = []shaper.Address{first, moves}
	apply(l)
	moved := dial(t, moves.Endpoints()[0].Addr.String())
	echoed(moved)
	other := netip.MustParseAddrPort(testutil.ServeTCP(t, testutil.Echo))
	l.Addresses = []shaper.Address{first}
	apply(l, shaper.Listener{
		Name: "other", Addresses: []shaper.Address{moves}, MaxQueue: 1000, ConnectTimeout: l.ConnectTimeout,
		Downstream: []shaper.Downstream{{Host: other.Addr().String(), Port: other.Port()}},
	})
	waits := dial(t, first.Endpoints()[0].Addr.String())
	testutil.WaitFor(t, "a connection that waits", func() bool {
		n := 0
		r.proxy.home.loop.call(func(leaky.Time) { n = r.proxy.listeners["l"].poolQuota.waiting })
		return n == 1
	})
	echoed(moved)
	moved.Close()
	echoed(waits)
}
