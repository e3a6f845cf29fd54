package conn

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

// heldFile is a file of quotas whose writes hang while a test has hold locked.
type heldFile struct {
	memoryFile
	hold sync.Mutex
}

func (f *heldFile) Write(records map[string]*quota.Record) error {
	f.hold.Lock()
	defer f.hold.Unlock()
	return f.memoryFile.Write(records)
}

// holdFile gives r a file whose writes hang until the result is unlocked.
func (r *quotaRig) holdFile() *heldFile {
	f := &heldFile{memoryFile: memoryFile{records: map[string]*quota.Record{}}}
	f.hold.Lock()
	r.proxy.home.loop.call(func(leaky.Time) { r.proxy.home.loop.quotas.store = f })
	return f
}

// status returns the state of the only budget of a limit.
func (r *quotaRig) status(limit string) (status shaper.QuotaStatus) {
	r.proxy.Quotas(func(q *shaper.QuotaStatus) {
		if q.Limit == limit {
			status = *q
		}
	})
	return status
}

// waiting is how many connections wait at gates.
func (r *quotaRig) waiting() (n int) {
	r.proxy.home.loop.call(func(leaky.Time) {
		for _, wq := range r.proxy.home.admission.quotas {
			n += wq.waiting
		}
	})
	return n
}

// abort sends n bytes on a connection of its own, and resets that a little later.
func abort(addr string, n int, after time.Duration) {
	c, err := net.Dial("tcp4", addr)
	if err != nil {
		return
	}
	c.Write(make([]byte, n))
	time.Sleep(after)
	c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

// Short connections under a slow quota pass no faster than one long connection does.
func TestQuota_SlowByShortConnections(t *testing.T) {
	t.Parallel()
	var at sink
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), shaper.Limit{
		Name: "day", MaxDelay: time.Second, Quota: quota.Quota{Amount: 100_000, Period: aDay}, QuotaSlow: 80_000, // 10 kB/s
	})
	begun := time.Now() // of the slow rate, or before: what the downstream reads late has left since then
	_ = send("127.0.0.1", r.addr(), 100_000)
	testutil.WaitFor(t, "the quota to be used up", func() bool { return at.received.Load() >= 100_000 })
	for since := time.Now(); time.Since(since) < time.Second; {
		abort(r.addr(), 1448, 3*time.Millisecond)
	}
	n := at.received.Load() - 100_000
	took := time.Since(begun).Seconds()
	if float64(n) > 10_000*took+20_000 {
		t.Errorf("%d bytes in %.2f s at 10 kB/s", n, took)
	}
}

// Connections that come and go under a slow quota take nothing of its rate from those that stay, nor of the rate on the next day.
func TestQuota_SlowDoesNotStarve(t *testing.T) {
	t.Parallel()
	var at sink
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), shaper.Limit{
		Name: "day", Rate: 80_000_000, MaxDelay: time.Second, Quota: quota.Quota{Amount: 1_000_000, Period: aDay}, QuotaSlow: 800_000, // 100 kB/s
	})
	_ = send("127.0.0.1", r.addr(), 1_000_000)
	testutil.WaitFor(t, "the quota to be used up", func() bool { return at.received.Load() >= 1_000_000 })
	for range 6 {
		abort(r.addr(), 20_000, 10*time.Millisecond)
	}
	before, since := at.received.Load(), time.Now()
	c := dial(t, r.addr())
	go c.Write(make([]byte, 1_000_000))
	testutil.WaitFor(t, "50 kB", func() bool { return at.received.Load() >= before+50_000 })
	if took := time.Since(since); took > testTimeout/2 {
		t.Errorf("50 kB at 100 kB/s took %v", took)
	}
	c.SetLinger(0)
	c.Close()
	r.set(r.wall.Load().AddDate(0, 0, 1))
	since = time.Now()
	if err := send("127.0.0.1", r.addr(), 900_000); err != nil {
		t.Error(err)
	}
	if took := time.Since(since); took > testTimeout/2 {
		t.Errorf("on the next day 900 kB at 10 MB/s took %v", took)
	}
}

// A datagram that takes the last of a slow quota counts in full under another.
func TestQuota_LastOfSlowCountsInFull(t *testing.T) {
	t.Parallel()
	var received atomic.Int64
	downstream := testutil.ListenUDP(t, "127.0.0.1:0")
	testutil.ServeUDP(t, downstream, func(data []byte, _ netip.AddrPort) []byte { received.Add(int64(len(data))); return nil })
	r := startQuotas(t, shaper.UDP, downstream.LocalAddr().String(),
		shaper.Limit{Name: "own", Key: shaper.KeySource, MaxDelay: testTimeout, Quota: quota.Quota{Amount: 10, Period: aDay}, QuotaSlow: 8_000_000},
		shaper.Limit{Name: "all", MaxDelay: testTimeout, Quota: quota.Quota{Amount: 100_000, Period: aDay}},
	)
	for i := range int64(20) {
		udpFrom(t, fmt.Sprintf("127.0.1.%d", i+1), r.addr()).Write(make([]byte, 1400))
		testutil.WaitFor(t, "a datagram", func() bool { return received.Load() >= (i+1)*1400 })
	}
	if n := r.status("all").Used; n != 20*1400 {
		t.Errorf("%d bytes passed, counted were %d", 20*1400, n)
	}
}

// With slow no unit is refused because others, which are booked, hold the last of the quota.
func TestQuota_SlowWhileBooked(t *testing.T) {
	for amount := uint64(64 * 15); amount < 64*45 && !t.Failed(); amount += 64 {
		r := newRig(t,
			shaper.Limit{Name: "all", Rate: 8e8, Quota: quota.Quota{Amount: amount, Period: aDay}, QuotaSlow: 100_000_000},
			shaper.Limit{Name: "source", Key: shaper.KeySource, Rate: 400_000},
			shaper.Limit{Name: "second", Rate: 8e8, Match: shaper.Match{Port: []shaper.PortRange{{First: 2, Last: 2}}}})
		wall := time.Date(2026, 11, 28, 15, 50, 0, 0, time.UTC)
		r.scheduler.quotas = &quotas{
			wall: func() time.Time { return wall }, sharing: r.scheduler.sharing, budgets: map[string]*budget{}, keys: map[string]int{},
			writing: true, // and that hangs: all of the quota is claimed below
		}
		var units []*stream
		for i := range 20 {
			for port := uint16(1); port <= 2; port++ {
				s := &stream{rig: r, left: 64}
				s.unit = unit{owner: s, path: r.path(flowFrom(fmt.Sprintf("10.0.0.%d", i+1), port)), bytes: 64, credit: grantCredit}
				units = append(units, s)
			}
		}
		b := r.scheduler.quotas.list[0]
		b.Need(amount)
		b.Claimed(b.Claim(), true)
		for _, s := range units {
			r.scheduler.submit(&s.unit, leaky.Second)
		}
		r.advance(2*leaky.Second, onTime)
		if left := slices.ContainsFunc(units, func(s *stream) bool { return s.left > 0 }); left {
			t.Errorf("a quota of %d: not all units have left", amount)
		}
	}
}

// An observing limit with a rate and a quota of connections counts connections.
func TestQuota_ObserveCountsConnections(t *testing.T) {
	t.Parallel()
	var at sink
	l := shaper.Limit{
		Name: "day", Observe: true, Rate: 800_000_000, MaxDelay: time.Second, QueueTimeout: testTimeout, MaxQueue: 10,
		Quota: quota.Quota{Amount: 1000, Unit: quota.Connections, Period: aDay},
	}
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), l)
	if err := send("127.0.0.1", r.addr(), 50_000); err != nil {
		t.Error(err)
	}
	if n := r.status("day").Used; n != 1 {
		t.Errorf("one connection counts as %d", n)
	}
	l.Observe = false
	r.apply(l)
	if err := send("127.0.0.1", r.addr(), 50_000); err != nil {
		t.Errorf("the second of 1000 connections: %v", err)
	}
}

// A flow for which another may be evicted, and that has no claim yet, waits for that and is not refused.
func TestQuota_EvictionAwaitsClaim(t *testing.T) {
	t.Parallel()
	limit := shaper.Limit{
		Name: "day", MaxConnections: 1, QueueTimeout: testTimeout, MaxQueue: 10, Quota: quota.Quota{Amount: 7, Unit: quota.Connections, Period: aDay},
	}
	r := startQuotas(t, shaper.UDP, echoUDP(t, 0).String(), limit)
	r.listen.UDPIdleTimeout = time.Minute // longer than the test takes
	r.apply(limit)
	ask := func(source string) (answer func() error) {
		c := udpFrom(t, source, r.addr())
		c.SetDeadline(time.Now().Add(testTimeout))
		c.Write([]byte("ping"))
		return func() error { _, err := c.Read(make([]byte, 10)); return err }
	}
	if err := ask("127.0.0.1")(); err != nil {
		t.Fatal(err)
	}
	time.Sleep((unansweredGrace + leaky.Second/10).Duration()) // it may be evicted now
	file := r.holdFile()
	r.proxy.ResetQuota(0, r.shaper.Policy().KeyOf(0, netip.Addr{})) // nothing is claimed any more
	answer := ask("127.0.0.2")
	testutil.WaitFor(t, "the second flow to wait", func() bool { return r.waiting() == 1 })
	file.hold.Unlock()
	if err := answer(); err != nil {
		t.Errorf("the second flow: %v", err)
	}
	evicted, refused := r.shaper.Listener("l").FlowsEvicted.Load(), r.shaper.Policy().State(0).Connections[shaper.Refuse][shaper.QuotaUsed].Load()
	if evicted != 1 || refused != 0 {
		t.Errorf("%d flows were evicted and %d refused, want one and none", evicted, refused)
	}
}

// A reset during a write reaches the file.
func TestQuota_ResetDuringWrite(t *testing.T) {
	t.Parallel()
	var at sink
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), shaper.Limit{Name: "day", Quota: quota.Quota{Amount: 2_560_000, Period: aDay}})
	file := r.holdFile()
	file.hold.Unlock()
	c := dial(t, r.addr())
	c.Write(make([]byte, 500_000))
	at.expect(t, 500_000)
	file.hold.Lock()
	writing := func() (writing bool) {
		r.proxy.home.loop.call(func(leaky.Time) { writing = r.proxy.home.loop.quotas.writing })
		return writing
	}
	for n := int64(500_100); !writing(); n += 100 { // little by little, so that nothing waits for the next claim
		c.Write(make([]byte, 100))
		testutil.WaitFor(t, "100 bytes", func() bool { return at.received.Load() == n })
	}
	r.proxy.ResetQuota(0, r.shaper.Policy().KeyOf(0, netip.Addr{}))
	file.hold.Unlock()
	// The first claim, and the next if a unit that finds nothing to read took the first.
	testutil.WaitFor(t, "the reset to be in the file", func() bool { return file.claimed("day") <= 20_000 })
}

// A reset begins the present period, wherever the clock once was.
func TestQuota_ResetAfterClock(t *testing.T) {
	t.Parallel()
	var at sink
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), shaper.Limit{Name: "day", Quota: quota.Quota{Amount: 100_000, Period: aDay}})
	dial(t, r.addr()).Write([]byte("x"))
	at.expect(t, 1)
	today := *r.wall.Load()
	r.set(today.AddDate(70, 0, 0))      // the host does not know the time yet
	time.Sleep(1100 * time.Millisecond) // longer than a slot is not looked at
	_ = send("127.0.0.1", r.addr(), 1)
	if ends := r.status("day").Ends; ends <= 0 {
		t.Fatalf("the day ends in %v", ends)
	}
	r.set(today)
	r.proxy.ResetQuota(0, r.shaper.Policy().KeyOf(0, netip.Addr{}))
	if ends := r.status("day").Ends; ends > 24*time.Hour {
		t.Errorf("after a reset the day ends in %v", ends)
	}
}

// Connections that wait for a claim when others take the last of the quota are refused at once.
func TestQuota_WaitersBeyondQuota(t *testing.T) {
	t.Parallel()
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), shaper.Limit{
		Name: "day", QueueTimeout: testTimeout, MaxQueue: 100, Quota: quota.Quota{Amount: 7, Unit: quota.Connections, Period: aDay},
	})
	file := r.holdFile()
	var passed atomic.Int64
	var clients sync.WaitGroup
	for range 12 {
		c := dial(t, r.addr())
		clients.Go(func() {
			c.Write([]byte("x"))
			if _, err := io.ReadFull(c, make([]byte, 1)); err == nil {
				passed.Add(1)
			}
		})
	}
	testutil.WaitFor(t, "all to wait", func() bool { return r.waiting() == 12 })
	file.hold.Unlock()
	clients.Wait()
	refused := &r.shaper.Policy().State(0).Connections[shaper.Refuse]
	if used, late := refused[shaper.QuotaUsed].Load(), refused[shaper.WaitTimeout].Load(); passed.Load() != 7 || used != 5 || late != 0 {
		t.Errorf("%d passed, %d were refused, and %d after a timeout; want 7, 5 and none", passed.Load(), used, late)
	}
}

// Connections that send nothing leave no removals for the file, which would pile up while that hangs.
func TestQuota_IdleConnectionsRemoveNothing(t *testing.T) {
	t.Parallel()
	var at sink
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), shaper.Limit{
		Name: "day", Key: shaper.KeySource, Quota: quota.Quota{Amount: 2_560_000, Period: aDay},
	})
	file := r.holdFile()
	defer file.hold.Unlock()
	for range 100 {
		if err := send("127.0.0.1", r.addr(), 0); err != nil {
			t.Fatal(err)
		}
	}
	r.settle()
	r.proxy.home.loop.call(func(leaky.Time) {
		if n := len(r.proxy.home.loop.quotas.removed); n > 0 {
			t.Errorf("%d removals of a record that is not in the file wait", n)
		}
	})
}

// A quota is told as waited for while something waits for a claim, and no longer.
func TestQuota_WaitingIsTold(t *testing.T) {
	t.Parallel()
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), shaper.Limit{
		Name: "day", QueueTimeout: testTimeout, MaxQueue: 10, Quota: quota.Quota{Amount: 700, Unit: quota.Connections, Period: aDay},
	})
	file := r.holdFile()
	c := dial(t, r.addr())
	testutil.WaitFor(t, "it to be told", func() bool { return r.status("day").Waiting })
	file.hold.Unlock()
	c.Write([]byte("x"))
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, "the end of it", func() bool { return !r.status("day").Waiting })
}
