package conn

import (
	"bytes"
	"net"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// serveUDP opens a UDP socket that is closed when the test ends.
func serveUDP(t *testing.T) net.PacketConn {
	t.Helper()
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// dialUDP opens a client socket that stays open until the test ends, so that its port is not
// reused.
func dialUDP(t *testing.T, r *proxyRig) net.Conn {
	t.Helper()
	c, err := net.Dial("udp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestUDP_EchoesDatagrams(t *testing.T) {
	t.Parallel()
	server := serveUDP(t)
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
			{Name: "bytes", Key: shaper.KeySource, Direction: shaper.Both, Rate: 80e6, MaxDelay: testTimeout},
			{Name: "packets", Direction: shaper.Both, Packets: shaper.Frequency{N: 1000, Per: time.Second}, MaxDelay: testTimeout},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, shaper.UDP, server.LocalAddr().String(), limits...)
			r.listen.UDPIdleTimeout = 3 * time.Second // longer than a reply takes on a busy host
			r.apply(limits...)
			c := dialUDP(t, r)
			c.SetDeadline(time.Now().Add(testTimeout))
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

func TestUDP_MaxConnections(t *testing.T) {
	server := serveUDP(t)
	limit := shaper.Limit{Name: "cap", MaxConnections: 2, QueueTimeout: 100 * time.Millisecond, MaxQueue: 10}
	r := start(t, shaper.UDP, server.LocalAddr().String(), limit)
	r.listen.UDPIdleTimeout = time.Hour
	r.apply(limit)
	stays(t, r, server)
	stays(t, r, server)
	dialUDP(t, r).Write([]byte("x"))
	state := r.shaper.Policy().State(0)
	testutil.WaitFor(t, "the third flow to be refused", func() bool { return state.Connections[shaper.Refuse][shaper.WaitTimeout].Load() == 1 })
	if n := state.Connections[shaper.Pass][shaper.None].Load(); n != 2 {
		t.Errorf("%d flows passed, want 2", n)
	}
	server.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, _, err := server.ReadFrom(make([]byte, 10)); err == nil {
		t.Error("a datagram of the flow that was refused has arrived")
	}
	r.proxy.EndAll()
	r.settle()
}

func TestUDPPort_RemovalDropsQueue(t *testing.T) {
	server := serveUDP(t)
	limit := shaper.Limit{Name: "both", Direction: shaper.Both, Rate: 8e5, MaxDelay: time.Second}
	r := start(t, shaper.UDP, server.LocalAddr().String(), limit)
	c := dialUDP(t, r)
	for range 50 {
		c.Write(make([]byte, 1000))
	}
	counts := r.shaper.Listener("l")
	testutil.WaitFor(t, "the first datagrams", func() bool { return counts.ToDownstream.Load() >= 2000 })
	r.listen.Addresses = []shaper.Address{addressOf(shaper.UDP, netip.MustParseAddrPort(testutil.FreeAddr(t, "udp")))}
	r.apply(limit)
	r.proxy.home.loop.call(func(leaky.Time) {
		seen := map[*datagram]bool{}
		for _, dg := range r.proxy.home.loop.memory.datagrams {
			if seen[dg] {
				t.Error("a datagram was freed twice")
			}
			seen[dg] = true
		}
	})
	r.settle()
}

func TestUDPQueue_BoundedByTime(t *testing.T) {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String(), shaper.Limit{
		Name: "packets", Packets: shaper.Frequency{N: 100, Per: time.Second}, MaxDelay: 500 * time.Millisecond,
	})
	c := dialUDP(t, r)
	begun := time.Now()
	for range 500 {
		c.Write(make([]byte, 100))
	}
	took := time.Since(begun)
	dropped := &r.shaper.Policy().State(0).Packets[shaper.Refuse][shaper.QueueFull]
	got, late := 0, time.Duration(0)
	last := time.Now()
	for b := make([]byte, 2000); got+int(dropped.Load()) < 500; got++ {
		server.SetReadDeadline(time.Now().Add(testTimeout))
		_, _, err := server.ReadFrom(b)
		late += max(0, time.Since(last)-15*time.Millisecond) // one is due every 10 ms
		last = time.Now()
		if err != nil {
			break
		}
	}
	// A thread that is late by more than half of max_delay in total drops the last datagrams, and
	// others leave while the client still sends.
	least, most := 49-int(100*late.Seconds()), 100+int(100*took.Seconds())
	if got < least || got > most || got+int(dropped.Load()) != 500 {
		t.Errorf("%d arrived and %d were dropped, of 500 sent in %v and %v late, want a queue of 51", got, dropped.Load(), took, late)
	}
}

func TestDrain_SendsQueuedDatagrams(t *testing.T) {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String(), shaper.Limit{
		Name: "packets", Packets: shaper.Frequency{N: 100, Per: time.Second}, MaxDelay: testTimeout,
	})
	c := dialUDP(t, r)
	for range 20 {
		c.Write(make([]byte, 100))
	}
	state := r.shaper.Policy().State(0)
	sent := func() int {
		return int(state.Packets[shaper.Delay][shaper.ByRate].Load() + state.Packets[shaper.Pass][shaper.None].Load())
	}
	testutil.WaitFor(t, "20 datagrams", func() bool { return sent()+queuedDatagrams(r.proxy) == 20 })
	if left := r.proxy.Shutdown(t.Context()); left != 0 {
		t.Errorf("%d connections remain, want none", left)
	}
	if n := sent(); n != 20 {
		t.Errorf("%d of 20 datagrams were sent", n)
	}
	c.Write(make([]byte, 100))
	time.Sleep(20 * time.Millisecond)
	if n := r.shaper.Listener("l").ToDownstream.Load(); n != 2000 {
		t.Errorf("%d bytes were forwarded, want 2000: a draining port accepts datagrams", n)
	}
}

func TestUDPQueue_BoundedByMemory(t *testing.T) {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String(), shaper.Limit{Name: "bytes", Rate: 80, MaxDelay: time.Hour}) // 100 s for each
	const room = 10 * (2048 + int(unsafe.Sizeof(datagram{})))
	r.proxy.home.loop.call(func(leaky.Time) { r.proxy.home.loop.memory.max = room })
	c := dialUDP(t, r)
	for range 50 {
		c.Write(make([]byte, 1000))
	}
	state := r.shaper.Policy().State(0)
	testutil.WaitFor(t, "39 refusals", func() bool { return state.Packets[shaper.Refuse][shaper.MemoryFull].Load() == 39 })
	r.proxy.home.loop.call(func(leaky.Time) {
		if n := r.proxy.home.loop.memory.used; n != room {
			t.Errorf("%d bytes are in use, want %d", n, room)
		}
	})
}

func TestUDP_MaxFlows(t *testing.T) {
	server := serveUDP(t)
	go func() { // replies only to "ping"
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
	r.listen.MaxFlows, r.listen.UDPIdleTimeout = 20, time.Minute
	r.apply()
	ping := func(c net.Conn) error {
		c.SetDeadline(time.Now().Add(testTimeout))
		if _, err := c.Write([]byte("ping")); err != nil {
			return err
		}
		_, err := c.Read(make([]byte, 10))
		return err
	}
	honest := dialUDP(t, r)
	for range 2 {
		if err := ping(honest); err != nil {
			t.Fatal(err)
		}
	}
	for range 200 {
		c := dialUDP(t, r)
		c.Write([]byte("x"))
	}
	counts := r.shaper.Listener("l")
	testutil.WaitFor(t, "the flood", func() bool { return counts.FlowsOpened.Load()+counts.FlowsRefused.Load() == 201 })
	time.Sleep(unansweredGrace.Duration())
	if n := counts.Flows.Load(); n > 20 {
		t.Errorf("%d flows are open, want at most 20", n)
	}
	before := counts.FlowsOpened.Load()
	if err := ping(honest); err != nil || counts.FlowsOpened.Load() != before {
		t.Errorf("the answered flow was lost: err %v", err)
	}
	// Unanswered flows are evicted.
	if err := ping(dialUDP(t, r)); err != nil {
		t.Errorf("a new flow: %v", err)
	}
}

// A flood does not evict a flow that waits for its first reply.
func TestUDPFlood_LeavesTimeForFirstReply(t *testing.T) {
	for attempts := 20; !floodDuringNewFlow(t); attempts-- {
		if attempts == 0 {
			t.Fatal("no flood was fast enough")
		}
	}
}

// floodDuringNewFlow reports whether the flood ended within the grace period of the new flow,
// so that the test is valid.
func floodDuringNewFlow(t *testing.T) bool {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.listen.MaxFlows, r.listen.UDPIdleTimeout = 20, time.Minute
	r.apply()
	honest := dialUDP(t, r)
	var others []net.Conn
	for range 100 {
		others = append(others, dialUDP(t, r))
	}
	begun := time.Now()
	honest.Write([]byte("ping"))
	b := make([]byte, 10)
	server.SetReadDeadline(time.Now().Add(testTimeout))
	_, from, err := server.ReadFrom(b)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range others {
		c.Write([]byte("x"))
	}
	counts := r.shaper.Listener("l")
	testutil.WaitFor(t, "the flood", func() bool { return counts.FlowsOpened.Load()+counts.FlowsRefused.Load() == 101 })
	if time.Since(begun) > unansweredGrace.Duration() {
		return false
	}
	if n := counts.FlowsRefused.Load(); n != 81 {
		t.Errorf("%d flows were refused, want 81", n)
	}
	server.WriteTo([]byte("pong"), from)
	honest.SetReadDeadline(time.Now().Add(testTimeout))
	if _, err := honest.Read(b); err != nil {
		t.Errorf("the reply was lost: %v", err)
	}
	return true
}

func TestUDP_MaxFlowsPerSource(t *testing.T) {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.listen.MaxFlowsPerSource, r.listen.UDPIdleTimeout = 5, time.Hour
	r.apply()
	counts := r.shaper.Listener("l")
	for range 5 {
		dialUDP(t, r).Write([]byte("x"))
	}
	testutil.WaitFor(t, "five flows", func() bool { return counts.Flows.Load() == 5 })
	r.proxy.home.loop.call(func(now leaky.Time) { // none of them is evicted for being without a reply
		for _, f := range r.proxy.home.flows {
			f.lastActive = now + 3600*leaky.Second
		}
	})
	for range 3 {
		dialUDP(t, r).Write([]byte("x"))
	}
	testutil.WaitFor(t, "refusals", func() bool { return counts.FlowsRefused.Load() == 3 })
	if n := counts.Flows.Load(); n != 5 {
		t.Errorf("%d flows, want 5", n)
	}
	r.proxy.home.loop.call(func(now leaky.Time) {
		for _, f := range r.proxy.home.flows {
			f.close(now)
		}
	})
	r.settle()
	r.proxy.home.loop.call(func(leaky.Time) {
		if n := len(r.proxy.listeners["l"].sources); n != 0 {
			t.Errorf("%d sources remain", n)
		}
	})
	dialUDP(t, r).Write([]byte("x"))
	testutil.WaitFor(t, "a flow to be admitted again", func() bool { return counts.FlowsOpened.Load() == 6 })
}

func TestUDP_AmplificationLimit(t *testing.T) {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.listen.Amplification, r.listen.UDPIdleTimeout = 3, time.Minute
	r.apply()
	counts := r.shaper.Listener("l")
	c := dialUDP(t, r)
	b := make([]byte, 2000)
	request := func(n int) net.Addr {
		t.Helper()
		c.Write(make([]byte, n))
		server.SetReadDeadline(time.Now().Add(testTimeout))
		_, from, err := server.ReadFrom(b)
		if err != nil {
			t.Fatal(err)
		}
		return from
	}
	// reply sends a reply of n bytes and reports whether it arrives.
	reply := func(to net.Addr, n int) bool {
		suppressed := counts.RepliesSuppressed.Load()
		server.WriteTo(make([]byte, n), to)
		c.SetReadDeadline(time.Now().Add(testTimeout))
		arrived := make(chan int)
		go func() { n, _ := c.Read(b); arrived <- n }()
		for {
			select {
			case got := <-arrived:
				return got == n
			case <-time.After(time.Millisecond):
				if counts.RepliesSuppressed.Load() > suppressed {
					c.SetReadDeadline(time.Now())
					return <-arrived > 0
				}
			}
		}
	}
	from := request(100)
	for i, tt := range []struct {
		n       int
		arrives bool
	}{{200, true}, {101, false}, {100, true}, {1, false}} {
		if got := reply(from, tt.n); got != tt.arrives {
			t.Errorf("reply %d, of %d bytes: arrived %v", i, tt.n, got)
		}
	}
	// Sending again proves nothing: with a forged address that works too.
	for range 10 {
		request(1)
	}
	if reply(from, 31) || !reply(from, 30) {
		t.Error("later requests do not count three times their bytes")
	}
}

// Of replies that the kernel has coalesced, those within the limit are forwarded.
func TestCapReply_JoinedDatagrams(t *testing.T) {
	r := start(t, shaper.UDP, serveUDP(t).LocalAddr().String())
	r.listen.Amplification = 2
	r.apply()
	f := &udpFlow{listener: r.proxy.listeners["l"], proxy: r.proxy.home, rxBytes: 500}
	for i, tt := range []struct {
		bytes, size, pass int
		suppressed        uint64
	}{
		{350, 100, 350, 0}, // 650 left
		{1000, 100, 600, 4},
		{60, 60, 0, 1},
		{0, 0, 0, 0}, // an empty reply passes
		{50, 50, 0, 1},
		{49, 49, 49, 0},
		{0, 0, 0, 1},
	} {
		before := f.listener.counts.RepliesSuppressed.Load()
		m := sock.Message{Data: make([]byte, tt.bytes), Size: tt.size}
		passes := f.capReply(&m)
		suppressed := f.listener.counts.RepliesSuppressed.Load() - before
		if passes != (tt.pass > 0 || tt.bytes == 0 && tt.suppressed == 0) || passes && len(m.Data) != tt.pass || suppressed != tt.suppressed {
			t.Errorf("reply %d, %d bytes: passes %v, %d of them, %d suppressed", i, tt.bytes, passes, len(m.Data), suppressed)
		}
	}
	if f.txBytes != 2*f.rxBytes {
		t.Errorf("%d bytes were sent for %d bytes received", f.txBytes, f.rxBytes)
	}
}

// A client that gets no reply has a flow queue of its own from its second datagram on, and its
// queued datagrams stay in order.
func TestUDP_RepeatedSenderGetsOwnFlowQueue(t *testing.T) {
	sink, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer sink.Close()
	limit := shaper.Limit{Name: "all", Packets: shaper.Frequency{N: 50, Per: time.Second}, MaxDelay: testTimeout, Match: shaper.Match{Protocol: shaper.UDP}}
	r := start(t, shaper.UDP, sink.LocalAddr().String(), limit)
	r.listen.UDPIdleTimeout = time.Minute
	r.apply(limit)
	own := func() (all, own int) {
		r.proxy.home.loop.call(func(leaky.Time) {
			for _, f := range r.proxy.home.flows {
				if all++; f.up.path[0].flowQueue != &f.up.path[0].lane.shared {
					own++
				}
			}
		})
		return all, own
	}
	var clients []net.Conn
	for range 3 {
		c, err := net.Dial("udp4", r.addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.Write([]byte{0})
		clients = append(clients, c)
	}
	testutil.WaitFor(t, "three flows", func() bool { all, own := own(); return all == 3 && own == 0 })
	for i := range byte(4) {
		clients[2].Write([]byte{1 + i})
	}
	testutil.WaitFor(t, "one flow with a queue of its own", func() bool { _, own := own(); return own == 1 })
	last := byte(0)
	sink.SetReadDeadline(time.Now().Add(testTimeout))
	for range 7 {
		var b [1]byte
		if _, err := sink.Read(b[:]); err != nil {
			t.Fatal(err)
		}
		if b[0] > 0 {
			if b[0] != last+1 {
				t.Errorf("datagram %d arrived after %d", b[0], last)
			}
			last = b[0]
		}
	}
}
