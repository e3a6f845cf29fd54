package conn

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/topk"
)

// connections returns the connections of p by source.
func connections(p *Proxy) map[netip.AddrPort]shaper.ConnectionStatus {
	all := map[netip.AddrPort]shaper.ConnectionStatus{}
	p.Connections(func(c *shaper.ConnectionStatus) { all[c.Source] = *c })
	return all
}

func local(c net.Conn) netip.AddrPort { return c.LocalAddr().(*net.TCPAddr).AddrPort() }

// TestConnections lists a throttled connection and one that waits for a slot.
func TestConnections(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Discard),
		shaper.Limit{Name: "slow", Rate: 800_000, MaxDelay: time.Second},
		shaper.Limit{Name: "one", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10})
	first := dial(t, r.addr())
	go first.Write(make([]byte, 1<<20))
	testutil.WaitFor(t, "the first is throttled by its rate", func() bool {
		c := connections(r.proxy)[local(first)]
		return c.Stage == "open" && c.ThrottledBy == "slow" && c.ToDownstream > 0 && c.Waited > 50*time.Millisecond && c.MostlyThrottledBy == "slow"
	})
	second := dial(t, r.addr())
	testutil.WaitFor(t, "the second waits for a slot", func() bool {
		c := connections(r.proxy)[local(second)]
		return c.Stage == "waiting" && c.ThrottledBy == "one" && c.Waited > 50*time.Millisecond && c.Downstream == ""
	})
	p := r.shaper.Policy()
	bucket := func(name string) shaper.BucketState {
		i := p.Find(name)
		return r.proxy.Buckets(i, p.Key(i, flowFrom("127.0.0.1", 1), shaper.Route{}))[0]
	}
	testutil.WaitFor(t, "the next grant is due", func() bool { // it reads 0 at the instant itself
		b := bucket("slow")
		return b.Queued == 1 && b.NextDeparture > 0 && b.NextDeparture <= time.Second
	})
	if b := bucket("one"); b.InFlight != 1 || b.Waiting != 1 {
		t.Errorf("bucket state: %+v", b)
	}

	// The waiting one is killed silently, then the other.
	for _, c := range []*net.TCPConn{second, first} {
		id := connections(r.proxy)[local(c)].ID
		if !r.proxy.Kill(id) {
			t.Fatal("the connection was not found")
		}
		if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a killed connection ended with %v", err)
		}
		if r.proxy.Kill(id) {
			t.Error("killed twice")
		}
	}
	r.settle()
	if n := r.shaper.Listener("l").Ended[shaper.Killed].Load(); n != 2 {
		t.Errorf("%d ended as killed, want 2", n)
	}
}

// TestRankings ranks a source that moves much and one that is refused.
func TestRankings(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Discard),
		shaper.Limit{Name: "slow", Key: shaper.KeySource, Rate: 8e6, MaxDelay: time.Second},
		shaper.Limit{Name: "none", Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix("127.0.0.9/32")}}, MaxConnections: 1, QueueTimeout: time.Millisecond, RefuseWith: shaper.RefuseClose})
	c := dial(t, r.addr())
	if _, err := c.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	c.CloseWrite()
	io.Copy(io.Discard, c)
	r.settle()
	nine := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}}
	held, err := nine.Dial("tcp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	testutil.WaitFor(t, "the slot is taken", func() bool { return r.shaper.Listener("l").Open.Load() == 1 })
	refused, err := nine.Dial("tcp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer refused.Close()
	io.Copy(io.Discard, refused)

	testutil.WaitFor(t, "the refusal to be counted", func() bool { return len(r.shaper.TopSources(topk.ByDrops, 1, r.proxy.clock.Now())) > 0 })
	now := r.proxy.clock.Now()
	moved := r.shaper.TopSources(topk.ByRate, 1, now)
	if len(moved) != 1 || moved[0].Key != netip.MustParseAddr("127.0.0.1") || moved[0].Weight[topk.ByDelay].Value <= 0 {
		t.Errorf("the source that moved most: %+v", moved)
	}
	dropped := r.shaper.TopSources(topk.ByDrops, 1, now)
	if len(dropped) != 1 || dropped[0].Key != netip.MustParseAddr("127.0.0.9") {
		t.Errorf("the source that was refused: %+v", dropped)
	}
	p := r.shaper.Policy()
	for i := range p.Len() {
		trait, want := topk.ByRate, "source 127.0.0.1/32"
		if p.Limit(i).Name == "none" {
			trait, want = topk.ByDrops, "all"
		}
		keys := p.State(i).Keys.Heaviest(trait, 5, now)
		if len(keys) != 1 || p.DescribeKey(i, keys[0].Key) != want {
			t.Errorf("keys of %q: %+v, want %s", p.Limit(i).Name, keys, want)
		}
	}
}

// A limit that observes ranks the key that it would delay, and delays nothing on account of that once
// it enforces. A stream would be delayed, not refused.
func TestObservedStream(t *testing.T) {
	limit := shaper.Limit{Name: "slow", Key: shaper.KeySource, Rate: 8e6, MaxDelay: 5 * time.Second, Observe: true}
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), limit)
	c := dial(t, r.addr())
	sent := make([]byte, 4<<20) // takes 4 s
	go c.Write(bytes.Clone(sent))
	io.ReadFull(c, sent)
	p, now := r.shaper.Policy(), r.proxy.clock.Now()
	for trait, want := range map[topk.SortKey]int{topk.ByRate: 1, topk.ByDelay: 1, topk.ByDrops: 0} {
		keys := p.State(0).Keys.Heaviest(trait, 5, now)
		if len(keys) != want || want == 1 && p.DescribeKey(0, keys[0].Key) != "source 127.0.0.1/32" {
			t.Errorf("keys by %d: %+v", trait, keys)
		}
	}
	bytes := &p.State(0).Bytes
	if n, all := bytes[shaper.Delay][shaper.ByRate].Load(), uint64(2*len(sent)); n < all/8 {
		t.Errorf("%d of %d bytes would have been delayed", n, all)
	}
	limit.Observe = false
	r.apply(limit)
	begun := time.Now()
	c.Write([]byte("x"))
	if _, err := io.ReadFull(c, sent[:1]); err != nil || time.Since(begun) > 3*time.Second {
		t.Errorf("enforced, a byte took %v, %v", time.Since(begun), err)
	}
	c.Close()
	r.settle()
}

// TestConformance lets a proxy conform, and then sets its bucket back repeatedly.
func TestConformance(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Discard),
		shaper.Limit{Name: "slow", Rate: 80e6, MaxDelay: time.Second})
	c := dial(t, r.addr())
	go func() {
		for b := make([]byte, 1<<20); ; {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}()
	conformance := &r.shaper.Policy().State(0).Conformance
	testutil.WaitFor(t, "a burst was seen", func() bool { return conformance.MaxExcess.Load() > 0 })
	time.Sleep(200 * time.Millisecond)
	if n := conformance.Violations.Load(); n != 0 {
		t.Fatalf("%d violations: excess up to %d, %d allowed", n, conformance.MaxExcess.Load(), conformance.MaxAllowed.Load())
	}
	testutil.WaitFor(t, "a violation was seen", func() bool {
		r.proxy.home.loop.call(func(leaky.Time) {
			for _, q := range r.proxy.home.loop.scheduler.byKey {
				q.bucket = leaky.Bucket{}
			}
		})
		return conformance.Violations.Load() > 0
	})
	// At another rate the past does not count.
	r.apply(shaper.Limit{Name: "slow", Rate: 8e6, MaxDelay: time.Second})
	was := conformance.Violations.Load()
	time.Sleep(100 * time.Millisecond)
	if n := conformance.Violations.Load() - was; n > 0 {
		t.Errorf("%d violations after the rate was lowered", n)
	}
	c.SetLinger(0) // to discard what is buffered
	c.Close()
	r.settle()
}

// TestBlock blocks a source: its connection is cut, and new ones are refused.
func TestBlock(t *testing.T) {
	server := testutil.ServeTCP(t, testutil.Echo)
	r := start(t, shaper.TCP, server, shaper.Limit{Name: "slow", Rate: 8e6, MaxDelay: time.Second})
	c := dial(t, r.addr())
	exchange := func(c net.Conn) error {
		if _, err := c.Write([]byte("hello")); err != nil {
			return err
		}
		_, err := io.ReadFull(c, make([]byte, 5))
		return err
	}
	if err := exchange(c); err != nil {
		t.Fatal(err)
	}
	block := shaper.Limit{Name: "block", Block: true, Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}}}
	slow := shaper.Limit{Name: "slow", Rate: 8e6, MaxDelay: time.Second}
	observed := block
	observed.Observe = true
	r.apply(slow, observed)
	if err := exchange(c); err != nil {
		t.Fatal("a block that observes: ", err)
	}
	r.apply(slow, block)
	if err := exchange(c); err == nil {
		t.Error("the existing connection was not cut")
	}
	if c, err := net.Dial("tcp4", r.addr()); err == nil { // it may be reset before
		defer c.Close()
		if exchange(c) == nil {
			t.Error("a new connection was accepted")
		}
	}
	p := r.shaper.Policy()
	for i := range p.Len() {
		if p.Limit(i).Block && p.State(i).Connections[shaper.Refuse][shaper.Blocked].Load() == 0 {
			t.Error("no connection was counted as blocked")
		}
	}
	r.apply(slow)
	last := dial(t, r.addr())
	if err := exchange(last); err != nil {
		t.Error("after the block: ", err)
	}
	last.Close()
	r.settle()
}

func TestBlockUDP(t *testing.T) {
	server := serveUDP(t)
	slow := shaper.Limit{Name: "slow", Rate: 800, MaxDelay: time.Minute}
	r := start(t, shaper.UDP, server.LocalAddr().String(), slow)
	c := dialUDP(t, r)
	for range 5 { // the last ones wait
		c.Write(make([]byte, 1000))
	}
	testutil.WaitFor(t, "all to have come", func() bool { return queuedDatagrams(r.proxy) == 4 })
	buffer := make([]byte, 2000)
	server.SetReadDeadline(time.Now().Add(testTimeout))
	if _, _, err := server.ReadFrom(buffer); err != nil {
		t.Fatal(err)
	}
	r.apply(slow, shaper.Limit{Name: "block", Block: true})
	if n := r.shaper.Listener("l").Flows.Load(); n != 0 {
		t.Errorf("%d flows of a blocked source", n)
	}
	c.Write(make([]byte, 1000))
	testutil.WaitFor(t, "the datagram was refused", func() bool {
		for i := range r.shaper.Policy().Len() {
			if st := r.shaper.Policy().State(i); st.Name == "block" && st.Connections[shaper.Refuse][shaper.Blocked].Load() == 1 {
				return true
			}
		}
		return false
	})
	server.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if n, _, err := server.ReadFrom(buffer); err == nil {
		t.Errorf("%d bytes of a blocked source", n)
	}
}

// TestDrainDownstream drains one of two downstreams, then both.
func TestDrainDownstream(t *testing.T) {
	name := func(name string) string {
		return testutil.ServeTCP(t, func(c *net.TCPConn) { io.WriteString(c, name); io.Copy(io.Discard, c) })
	}
	first := name("a")
	r := start(t, shaper.TCP, first)
	second := netip.MustParseAddrPort(name("b"))
	r.listen.Downstream = append(r.listen.Downstream, shaper.Downstream{Host: second.Addr().String(), Port: second.Port()})
	r.listen.ConnectTimeout = time.Minute
	r.apply()
	server := func() string {
		c := dial(t, r.addr())
		defer c.Close()
		var b [1]byte
		if _, err := io.ReadFull(c, b[:]); err != nil {
			t.Fatal(err)
		}
		return string(b[:])
	}
	if n := r.proxy.DrainDownstream("l", first, true); n != 1 {
		t.Fatalf("%d downstreams drained", n)
	}
	if n := r.proxy.DrainDownstream("", "10.9.9.9:1", true); n != 0 {
		t.Errorf("%d unknown downstreams drained", n)
	}
	r.apply() // a reload keeps it
	for range 4 {
		if got := server(); got != "b" {
			t.Errorf("%s got a connection", got)
		}
	}
	r.proxy.DrainDownstream("", second.String(), true)
	got := make(chan string, 1)
	c := dial(t, r.addr())
	go func() {
		b := make([]byte, 1)
		io.ReadFull(c, b)
		got <- string(b)
	}()
	testutil.WaitFor(t, "it waits", func() bool {
		status := connections(r.proxy)[local(c)]
		return status.Stage == "waiting" && status.ThrottledBy == poolName
	})
	select {
	case b := <-got:
		t.Fatalf("%q answered, all are drained", b)
	case <-time.After(50 * time.Millisecond):
	}
	r.proxy.DrainDownstream("", first, false)
	if b := <-got; b != "a" {
		t.Errorf("%q answered", b)
	}

	// A new downstream may be configured as drained. For an existing one the command takes precedence.
	r.listen.Downstream[0].Drained = true
	third := netip.MustParseAddrPort(name("c"))
	r.listen.Downstream = append(r.listen.Downstream, shaper.Downstream{Host: third.Addr().String(), Port: third.Port(), Drained: true})
	r.apply()
	for range 4 {
		if got := server(); got != "a" {
			t.Errorf("%s got a connection", got)
		}
	}
}

func TestAccessLog(t *testing.T) {
	var log testutil.Buffer
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), shaper.Limit{Name: "slow", Rate: 8e6, MaxDelay: time.Second})
	r.proxy.accessLog = slog.New(slog.NewTextHandler(&log, nil))
	quiet := dial(t, r.addr())
	quiet.CloseWrite()
	io.Copy(io.Discard, quiet)
	r.settle()
	if text := log.String(); text != "" {
		t.Errorf("without access_log: %s", text)
	}
	r.listen.AccessLog = true
	r.apply(shaper.Limit{Name: "slow", Rate: 8e6, MaxDelay: time.Second})
	c := dial(t, r.addr())
	c.Write(make([]byte, 100_000))
	c.CloseWrite()
	io.Copy(io.Discard, c)
	r.settle()
	text := log.String()
	for _, want := range []string{
		"msg=access", "listener=l", "protocol=tcp", fmt.Sprintf("source=%v", local(c)), "to_downstream=100000", "from_downstream=100000",
		"mostly_throttled_by=slow", "ended=closed", "connect_seconds=", "first_byte_seconds=", "turns=",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in %s", want, text)
		}
	}
	if strings.Contains(text, "waited_seconds=0 ") || strings.Contains(text, "connect_seconds=0 ") || strings.Contains(text, "turns=0 ") || strings.Count(text, "\n") != 1 {
		t.Errorf("want one line, with a wait: %s", text)
	}
}

// Where caps cross, a free slot that is reserved for a source that needs several is shown as reserved.
func TestBuckets_ShowReservedSlot(t *testing.T) {
	t.Parallel()
	caps := []shaper.Limit{
		{Name: "a", Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix("127.0.1.0/24"), netip.MustParsePrefix("127.0.3.0/24")}}},
		{Name: "b", Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix("127.0.2.0/24"), netip.MustParsePrefix("127.0.3.0/24")}}},
	}
	for i := range caps {
		caps[i].MaxConnections, caps[i].QueueTimeout, caps[i].MaxQueue = 1, time.Minute, 10
	}
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), caps...)
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for _, source := range []string{"127.0.1.1", "127.0.1.2", "127.0.2.1", "127.0.2.2", "127.0.3.1"} {
		clients.Go(func() {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
			for {
				select {
				case <-stop:
					return
				default:
				}
				c, err := d.Dial("tcp4", r.addr())
				if err != nil {
					t.Error(err)
					return
				}
				c.SetDeadline(time.Now().Add(testTimeout))
				c.Write([]byte("x"))
				c.Read(make([]byte, 1))
				time.Sleep(10 * time.Millisecond)
				c.Close()
			}
		})
	}
	p := r.shaper.Policy()
	testutil.WaitFor(t, "a slot that is reserved", func() bool {
		for i, from := range []string{"127.0.1.1", "127.0.2.1"} {
			if r.proxy.Buckets(i, p.Key(i, flowFrom(from, 1), shaper.Route{}))[0].Reserved {
				return true
			}
		}
		return false
	})
	close(stop)
	clients.Wait()
}
