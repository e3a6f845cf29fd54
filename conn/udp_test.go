package conn

import (
	"bytes"
	"net"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"shaperd/leaky"
	"shaperd/shaper"
)

// serveUDP opens a socket for the test.
func serveUDP(t *testing.T) net.PacketConn {
	t.Helper()
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// dialUDP opens a socket that stays open as long as the test, so that its port
// does not come twice.
func dialUDP(t *testing.T, r *running) net.Conn {
	t.Helper()
	c, err := net.Dial("udp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestUDP(t *testing.T) {
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
			{Name: "bytes", Key: shaper.KeySource, Direction: shaper.Both, Rate: 80e6, MaxDelay: time.Second},
			{Name: "packets", Direction: shaper.Both, Packets: shaper.Frequency{N: 1000, Per: time.Second}, MaxDelay: time.Second},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, shaper.UDP, server.LocalAddr().String(), limits...)
			r.listen.IdleTimeout = 3 * time.Second // longer than an answer takes on a busy host
			r.apply(limits...)
			c := dialUDP(t, r)
			c.SetDeadline(time.Now().Add(patience))
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
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String(),
		shaper.Limit{Name: "cap", Connections: 2, MaxWait: 100 * time.Millisecond, MaxWaiting: 10})
	for range 3 {
		c := dialUDP(t, r)
		c.Write([]byte("x"))
	}
	state := r.shaper.Policy().State(0)
	waitFor(t, "the third to be refused", func() bool { return state.Connections[shaper.Refuse][shaper.WaitTimeout].Load() == 1 })
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
	server := serveUDP(t)
	limit := shaper.Limit{Name: "both", Direction: shaper.Both, Rate: 8e5, MaxDelay: time.Second}
	r := start(t, shaper.UDP, server.LocalAddr().String(), limit)
	c := dialUDP(t, r)
	for range 50 {
		c.Write(make([]byte, 1000))
	}
	counts := r.shaper.Listener("l")
	waitFor(t, "the first ones", func() bool { return counts.ToDownstream.Load() >= 2000 })
	r.listen.Endpoints = []Endpoint{{Protocol: shaper.UDP, Addr: netip.MustParseAddrPort(freePort(t, shaper.UDP))}}
	r.apply(limit)
	r.proxy.loop.call(func(leaky.Time) {
		seen := map[*datagram]bool{}
		for _, dg := range r.proxy.loop.memory.datagrams {
			if seen[dg] {
				t.Error("a datagram was freed twice")
			}
			seen[dg] = true
		}
	})
	r.settle()
}

func TestUDPQueueIsBoundedByTime(t *testing.T) {
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
	got := 0
	for b := make([]byte, 2000); got+int(dropped.Load()) < 500; got++ {
		server.SetReadDeadline(time.Now().Add(2 * time.Second))
		if _, _, err := server.ReadFrom(b); err != nil {
			break
		}
	}
	// A thread that is late by more than half of max_delay in all sheds the last ones, and
	// while they are sent others leave.
	if most := 100 + int(100*took.Seconds()); got < 25 || got > most || got+int(dropped.Load()) != 500 {
		t.Errorf("%d arrived and %d were dropped, of 500 sent in %v with room for 51", got, dropped.Load(), took)
	}
}

func TestDrainSendsWhatIsQueued(t *testing.T) {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String(), shaper.Limit{
		Name: "packets", Packets: shaper.Frequency{N: 100, Per: time.Second}, MaxDelay: time.Second,
	})
	c := dialUDP(t, r)
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
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String(), shaper.Limit{Name: "bytes", Rate: 8e3, MaxDelay: time.Hour})
	const room = 10 * (2048 + int(unsafe.Sizeof(datagram{})))
	r.proxy.loop.call(func(leaky.Time) { r.proxy.loop.memory.most = room })
	c := dialUDP(t, r)
	for range 50 {
		c.Write(make([]byte, 1000))
	}
	state := r.shaper.Policy().State(0)
	waitFor(t, "39 refusals", func() bool { return state.Packets[shaper.Refuse][shaper.MemoryFull].Load() == 39 })
	r.proxy.loop.call(func(leaky.Time) {
		if n := r.proxy.loop.memory.used; n != room {
			t.Errorf("%d bytes are in use, want %d", n, room)
		}
	})
}

func TestUDPFlowsAreBounded(t *testing.T) {
	server := serveUDP(t)
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
	waitFor(t, "the flood", func() bool { return counts.FlowsOpened.Load()+counts.FlowsRefused.Load() == 201 })
	time.Sleep(muteGrace.Duration())
	if n := counts.Flows.Load(); n > 20 {
		t.Errorf("%d flows are open, want at most 20", n)
	}
	before := counts.FlowsOpened.Load()
	if err := ping(honest); err != nil || counts.FlowsOpened.Load() != before {
		t.Errorf("the answered flow was lost: err %v", err)
	}
	// Those that were never answered make room.
	if err := ping(dialUDP(t, r)); err != nil {
		t.Errorf("a new flow: %v", err)
	}
}

// A flow that waits for its first answer is not pushed out by a flood.
func TestFloodLeavesNewFlowsTimeForAnAnswer(t *testing.T) {
	for again := 5; !floodBesideNewFlow(t); again-- {
		if again == 0 {
			t.Fatal("no flood is fast enough")
		}
	}
}

// floodBesideNewFlow reports whether the flood was over in the time that the flow has.
func floodBesideNewFlow(t *testing.T) bool {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.listen.MaxFlows, r.listen.IdleTimeout = 20, time.Minute
	r.apply()
	honest := dialUDP(t, r)
	begun := time.Now()
	honest.Write([]byte("ping"))
	b := make([]byte, 10)
	server.SetReadDeadline(time.Now().Add(patience))
	_, from, err := server.ReadFrom(b)
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		dialUDP(t, r).Write([]byte("x"))
	}
	counts := r.shaper.Listener("l")
	waitFor(t, "the flood", func() bool { return counts.FlowsOpened.Load()+counts.FlowsRefused.Load() == 101 })
	if time.Since(begun) > muteGrace.Duration() {
		return false
	}
	if n := counts.FlowsRefused.Load(); n != 81 {
		t.Errorf("%d flows were refused, want 81", n)
	}
	server.WriteTo([]byte("pong"), from)
	honest.SetReadDeadline(time.Now().Add(patience))
	if _, err := honest.Read(b); err != nil {
		t.Errorf("the answer was lost: %v", err)
	}
	return true
}

func TestFlowsOfOneSourceAreBounded(t *testing.T) {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.listen.MaxFlowsPerSource = 5
	r.apply()
	for range 8 {
		dialUDP(t, r).Write([]byte("x"))
	}
	counts := r.shaper.Listener("l")
	waitFor(t, "refusals", func() bool { return counts.FlowsRefused.Load() == 3 })
	if n := counts.Flows.Load(); n != 5 {
		t.Errorf("%d flows, want 5", n)
	}
	r.settle()
	r.proxy.loop.call(func(leaky.Time) {
		if n := len(r.proxy.sites["l"].sources); n != 0 {
			t.Errorf("%d sources are left", n)
		}
	})
	dialUDP(t, r).Write([]byte("x"))
	waitFor(t, "room again", func() bool { return counts.FlowsOpened.Load() == 6 })
}

func TestAnswersDoNotAmplify(t *testing.T) {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.listen.Amplification, r.listen.IdleTimeout = 3, time.Minute
	r.apply()
	counts := r.shaper.Listener("l")
	c := dialUDP(t, r)
	b := make([]byte, 2000)
	ask := func(n int) net.Addr {
		t.Helper()
		c.Write(make([]byte, n))
		server.SetReadDeadline(time.Now().Add(time.Second))
		_, from, err := server.ReadFrom(b)
		if err != nil {
			t.Fatal(err)
		}
		return from
	}
	// answer sends an answer and reports whether it arrives.
	answer := func(to net.Addr, n int) bool {
		withheld := counts.Withheld.Load()
		server.WriteTo(make([]byte, n), to)
		c.SetReadDeadline(time.Now().Add(5 * time.Second))
		arrived := make(chan int)
		go func() { n, _ := c.Read(b); arrived <- n }()
		for {
			select {
			case got := <-arrived:
				return got == n
			case <-time.After(time.Millisecond):
				if counts.Withheld.Load() > withheld {
					c.SetReadDeadline(time.Now())
					return <-arrived > 0
				}
			}
		}
	}
	from := ask(100)
	for i, tt := range []struct {
		n       int
		arrives bool
	}{{200, true}, {101, false}, {100, true}, {1, false}} {
		if got := answer(from, tt.n); got != tt.arrives {
			t.Errorf("answer %d, of %d bytes: arrived %v", i, tt.n, got)
		}
	}
	// To send again proves nothing: whoever forges the address can do that blind.
	for range 10 {
		ask(1)
	}
	if answer(from, 31) || !answer(from, 30) {
		t.Error("what was asked since counts for more, or less, than three times its bytes")
	}
}

// Of answers that the kernel has joined those are sent on that are within the bound.
func TestAnswersThatTheKernelJoins(t *testing.T) {
	r := start(t, shaper.UDP, serveUDP(t).LocalAddr().String())
	r.listen.Amplification = 2
	r.apply()
	f := &udpFlow{site: r.proxy.sites["l"], proxy: r.proxy, asked: 500}
	for i, tt := range []struct {
		bytes, size, pass int
		withheld          uint64
	}{
		{350, 100, 350, 0}, // 650 left
		{1000, 100, 600, 4},
		{60, 60, 0, 1},
		{0, 0, 0, 0}, // an empty one passes
		{50, 50, 0, 1},
		{49, 49, 49, 0},
		{0, 0, 0, 1},
	} {
		before := f.site.counts.Withheld.Load()
		m := message{data: make([]byte, tt.bytes), size: tt.size}
		passes := f.withhold(&m)
		withheld := f.site.counts.Withheld.Load() - before
		if passes != (tt.pass > 0 || tt.bytes == 0 && tt.withheld == 0) || passes && len(m.data) != tt.pass || withheld != tt.withheld {
			t.Errorf("answer %d, %d bytes: passes %v, %d of them, %d withheld", i, tt.bytes, passes, len(m.data), withheld)
		}
	}
	if f.told != 2*f.asked {
		t.Errorf("%d bytes were sent on, of %d asked", f.told, f.asked)
	}
}

// A sender that nobody answers takes turns of its own from its second datagram on, and what
// it has queued by then stays in order.
func TestOneWaySenderTakesTurnsOfItsOwn(t *testing.T) {
	sink, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer sink.Close()
	r := start(t, shaper.UDP, sink.LocalAddr().String(), shaper.Limit{
		Name: "all", Packets: shaper.Frequency{N: 50, Per: time.Second}, MaxDelay: time.Second, Match: shaper.Match{Protocol: shaper.UDP},
	})
	own := func() (all, own int) {
		r.proxy.loop.call(func(leaky.Time) {
			for _, f := range r.proxy.flows {
				if all++; f.up.path[0].leaf != &f.up.path[0].lane.first {
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
	waitFor(t, "three flows", func() bool { all, own := own(); return all == 3 && own == 0 })
	for i := range byte(4) {
		clients[2].Write([]byte{1 + i})
	}
	waitFor(t, "one with turns of its own", func() bool { _, own := own(); return own == 1 })
	last := byte(0)
	sink.SetReadDeadline(time.Now().Add(patience))
	for range 7 {
		var b [1]byte
		if _, err := sink.Read(b[:]); err != nil {
			t.Fatal(err)
		}
		if b[0] > 0 {
			if b[0] != last+1 {
				t.Errorf("datagram %d came after %d", b[0], last)
			}
			last = b[0]
		}
	}
}
