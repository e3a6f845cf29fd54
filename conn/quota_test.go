package conn

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

// memoryFile is a file of quotas in memory.
type memoryFile struct {
	mu      sync.Mutex
	fails   error
	records map[string]*quota.Record
	writes  int
}

func (f *memoryFile) Write(records map[string]*quota.Record) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fails != nil {
		return f.fails
	}
	f.writes++
	for name, r := range records {
		if r == nil {
			delete(f.records, name)
		} else {
			f.records[name] = r
		}
	}
	return nil
}

func (f *memoryFile) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fails = err
}

// claimed is what the file has of a budget, over all slots.
func (f *memoryFile) claimed(name string) (sum uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.records[name]; r != nil {
		for _, n := range r.Used {
			sum += n
		}
	}
	return sum
}

// quotaRig is a proxy with a file of quotas, and a clock on the wall that tests set.
type quotaRig struct {
	*proxyRig
	file *memoryFile
	wall atomic.Pointer[time.Time]
}

func startQuotas(t *testing.T, protocol shaper.Protocol, downstream string, limits ...shaper.Limit) *quotaRig {
	t.Helper()
	r := &quotaRig{proxyRig: start(t, protocol, downstream), file: &memoryFile{records: map[string]*quota.Record{}}}
	r.set(time.Date(2026, 11, 28, 15, 50, 0, 0, time.UTC))
	r.proxy.home.loop.call(func(leaky.Time) { r.proxy.home.loop.quotas.wall = func() time.Time { return *r.wall.Load() } })
	r.proxy.UseQuotas(r.file, nil)
	r.apply(limits...)
	return r
}

func (r *quotaRig) set(wall time.Time) { r.wall.Store(&wall) }

var aDay = quota.Period{Calendar: quota.Day, Zone: "UTC"}

// sink counts what a downstream receives.
type sink struct{ received atomic.Int64 }

func (s *sink) serve(c *net.TCPConn) {
	_, _ = io.Copy(writeCounter{&s.received}, c)
}

// expect waits until the downstream has received n bytes, and checks that it receives no more.
func (s *sink) expect(t *testing.T, n int64) {
	t.Helper()
	deadline := time.Now().Add(testTimeout)
	for s.received.Load() < n && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	time.Sleep(20 * time.Millisecond)
	if got := s.received.Load(); got != n {
		t.Errorf("the downstream received %d bytes, want %d", got, n)
	}
}

type writeCounter struct{ n *atomic.Int64 }

func (w writeCounter) Write(b []byte) (int, error) { w.n.Add(int64(len(b))); return len(b), nil }

// send sends n bytes on a connection of its own, and returns the error of that, or what the other side did at the end.
func send(source, addr string, n int) error {
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}).Dial("tcp4", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(testTimeout))
	if _, err := c.Write(make([]byte, n)); err != nil {
		return err
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	_, err = io.ReadAll(c)
	return err
}

func TestQuota_Bytes(t *testing.T) {
	t.Parallel()
	var at sink
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), shaper.Limit{
		Name: "day", Key: shaper.KeySource, Quota: quota.Quota{Amount: 1_000_000, Period: aDay},
	})
	for i, want := range []bool{true, true, false, false} {
		if err := send("127.0.0.1", r.addr(), 400_000); (err == nil) != want {
			t.Errorf("connection %d: %v", i, err)
		}
	}
	at.expect(t, 1_000_000)
	if err := send("127.0.0.2", r.addr(), 400_000); err != nil {
		t.Errorf("another source: %v", err)
	}
	at.expect(t, 1_400_000)
	r.set(r.wall.Load().AddDate(0, 0, 1))
	testutil.WaitFor(t, "the next day", func() bool { return send("127.0.0.1", r.addr(), 1000) == nil })
	r.set(r.wall.Load().AddDate(0, 0, -1))
	time.Sleep(1100 * time.Millisecond) // longer than a slot is not looked at
	_ = send("127.0.0.1", r.addr(), 2_000_000)
	if n := at.received.Load(); n > 2_400_000 {
		t.Errorf("the downstream received %d bytes: the day before has begun again", n)
	}
	r.settle()
}

// A connection that has sent exactly what was left gets its answer, and ends in order.
func TestQuota_LastByte(t *testing.T) {
	t.Parallel()
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), shaper.Limit{
		Name: "day", Quota: quota.Quota{Amount: 100_000, Period: aDay},
	})
	c := dial(t, r.addr())
	sent := randomBytes(100_000)
	go c.Write(sent)
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("the answer: %v, equal %v", err, bytes.Equal(got, sent))
	}
	time.Sleep(50 * time.Millisecond)
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(got); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %d bytes, %v", n, err)
	}
	r.settle()
}

// Whenever the downstream has received something, it is in the file already.
func TestQuota_ClaimsAhead(t *testing.T) {
	t.Parallel()
	var r *quotaRig
	var received atomic.Int64
	downstream := testutil.ServeTCP(t, func(c *net.TCPConn) {
		b := make([]byte, 64<<10)
		for {
			n, err := c.Read(b)
			if sum := received.Add(int64(n)); uint64(sum) > r.file.claimed("day") {
				t.Errorf("%d bytes received, %d in the file", sum, r.file.claimed("day"))
			}
			if err != nil {
				return
			}
		}
	})
	r = startQuotas(t, shaper.TCP, downstream,
		shaper.Limit{Name: "day", Quota: quota.Quota{Amount: 20_000_000, Period: aDay}},
		shaper.Limit{Name: "narrow", Key: shaper.KeySource, Rate: 400e6, MaxDelay: time.Second},
	)
	var clients sync.WaitGroup
	for i := range 8 {
		clients.Go(func() {
			for range 5 {
				_ = send(fmt.Sprintf("127.0.0.%d", 1+i%3), r.addr(), 700_000)
			}
		})
	}
	clients.Wait()
	for send("127.0.0.1", r.addr(), 700_000) == nil { // what others had held when the last ones were refused
	}
	r.settle()
	testutil.WaitFor(t, "the whole quota", func() bool { return received.Load() == 20_000_000 })
}

// Two limits with quotas and a rate cross, connections come and end, and the policy is reloaded: what is counted in the end is what
// was received. The quotas are not used up: a reset drops what the downstream has not read.
func TestQuota_CountsWhatIsReceived(t *testing.T) {
	t.Parallel()
	rnd := testutil.Rand(t)
	var at sink
	limits := func(rate uint64) []shaper.Limit {
		return []shaper.Limit{
			{Name: "day", Quota: quota.Quota{Amount: 1 << 40, Period: aDay}},
			{Name: "source", Key: shaper.KeySource, Rate: rate, MaxDelay: time.Second, Quota: quota.Quota{Amount: 1 << 30, Period: quota.Period{Rolling: time.Hour}}},
			{Name: "all", Rate: 300e6, MaxDelay: time.Second},
		}
	}
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), limits(100e6)...)
	var clients sync.WaitGroup
	for i := range 6 {
		seed := rnd.Uint64()
		clients.Go(func() {
			for n := range 12 {
				_ = send(fmt.Sprintf("127.0.0.%d", 1+i%3), r.addr(), int(seed>>n%400_000)+1)
			}
		})
	}
	for range 10 {
		time.Sleep(time.Duration(rnd.IntN(40)) * time.Millisecond)
		r.apply(limits(uint64(20+rnd.IntN(200)) * 1e6)...)
	}
	clients.Wait()
	r.settle()
	var day, sources uint64
	r.proxy.Quotas(func(q *shaper.QuotaStatus) {
		if q.Limit == "day" {
			day = q.Used
		} else {
			sources += q.Used
		}
	})
	testutil.WaitFor(t, "the downstream to read the last of it", func() bool { return uint64(at.received.Load()) >= day })
	if n := uint64(at.received.Load()); day != n || sources != n || n == 0 {
		t.Errorf("the downstream received %d bytes, counted were %d of the day and %d of sources", n, day, sources)
	}
}

func TestQuota_Slow(t *testing.T) {
	t.Parallel()
	var at sink
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), shaper.Limit{
		Name: "day", MaxDelay: time.Second, Quota: quota.Quota{Amount: 2_000_000, Period: aDay}, QuotaSlow: 800_000, // 100 kB/s
	})
	c := dial(t, r.addr())
	begun := time.Now() // of the slow rate, or before: what the downstream reads late has left since then
	go func() {
		for {
			if _, err := c.Write(make([]byte, 64<<10)); err != nil {
				return
			}
		}
	}()
	testutil.WaitFor(t, "the quota to be used up", func() bool { return at.received.Load() >= 2_000_000 })
	time.Sleep(time.Second)
	n := at.received.Load() - 2_000_000
	if took := time.Since(begun).Seconds(); float64(n) > 100_000*took+20_000 {
		t.Errorf("%d bytes in %.2f s at 100 kB/s", n, took)
	}
	testutil.WaitFor(t, "bytes at the slow rate", func() bool { return at.received.Load() >= 2_050_000 })
	r.set(r.wall.Load().AddDate(0, 0, 1))
	testutil.WaitFor(t, "the next day", func() bool { return at.received.Load() >= 3_500_000 })
	c.SetLinger(0) // what waits would take long
	c.Close()
	r.settle()
}

// While the file cannot be written only what was claimed passes; when it can be, all goes on.
func TestQuota_FileFails(t *testing.T) {
	t.Parallel()
	var at sink
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), shaper.Limit{Name: "day", Quota: quota.Quota{Amount: 256_000, Period: aDay}})
	r.file.fail(errors.New("no space left"))
	done := make(chan error)
	go func() { done <- send("127.0.0.1", r.addr(), 200_000) }()
	testutil.WaitFor(t, "the failure to be told", func() bool {
		err := r.proxy.QuotaError()
		return err != nil && strings.Contains(err.Error(), "no space left")
	})
	if n := at.received.Load(); n != 0 {
		t.Errorf("%d bytes passed that are not in the file", n)
	}
	r.file.fail(nil)
	if err := <-done; err != nil {
		t.Errorf("afterwards: %v", err)
	}
	at.expect(t, 200_000)
	if err := r.proxy.QuotaError(); err != nil {
		t.Errorf("still told: %v", err)
	}
}

func TestQuota_Datagrams(t *testing.T) {
	t.Parallel()
	var received atomic.Int64
	downstream := testutil.ListenUDP(t, "127.0.0.1:0")
	testutil.ServeUDP(t, downstream, func(data []byte, _ netip.AddrPort) []byte { received.Add(1); return data })
	r := startQuotas(t, shaper.UDP, downstream.LocalAddr().String(), shaper.Limit{
		Name: "day", Match: shaper.Match{Protocol: shaper.UDP}, MaxDelay: testTimeout, Quota: quota.Quota{Amount: 50, Unit: quota.Packets, Period: aDay},
	})
	c, err := net.Dial("udp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 200 {
		c.Write([]byte("ping"))
		time.Sleep(time.Millisecond)
	}
	testutil.WaitFor(t, "refusals", func() bool {
		return r.shaper.Policy().State(0).Packets[shaper.Refuse][shaper.QuotaUsed].Load() > 100
	})
	testutil.WaitFor(t, "50 datagrams", func() bool { return received.Load() >= 50 })
	time.Sleep(20 * time.Millisecond)
	if n := received.Load(); n != 50 {
		t.Errorf("the downstream received %d datagrams of 50", n)
	}
}

func TestQuota_Connections(t *testing.T) {
	t.Parallel()
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), shaper.Limit{
		Name: "day", Key: shaper.KeySource, QueueTimeout: testTimeout, MaxQueue: 10, Quota: quota.Quota{Amount: 7, Unit: quota.Connections, Period: aDay},
	})
	passes := func(source string) bool {
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}).Dial("tcp4", r.addr())
		if err != nil {
			return false
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(testTimeout))
		c.Write([]byte("x"))
		_, err = io.ReadFull(c, make([]byte, 1))
		return err == nil
	}
	passed := map[string]int{}
	for range 10 {
		for _, source := range []string{"127.0.0.1", "127.0.0.2"} {
			if passes(source) {
				passed[source]++
			}
		}
	}
	if passed["127.0.0.1"] != 7 || passed["127.0.0.2"] != 7 {
		t.Errorf("%v passed, want 7 each", passed)
	}
	if n := r.file.claimed("day|source=127.0.0.1/32"); n != 7 {
		t.Errorf("the file has %d of 7", n)
	}
	policy := r.shaper.Policy()
	if !r.proxy.ResetQuota(0, policy.KeyOf(0, netip.MustParseAddr("127.0.0.1"))) {
		t.Error("there was nothing to reset")
	}
	if !passes("127.0.0.1") || passes("127.0.0.2") {
		t.Error("after a reset of one source")
	}
	r.settle()
}

// An end in order gives back what was claimed and not used; the next proxy goes on from there.
func TestQuota_Restart(t *testing.T) {
	t.Parallel()
	var at sink
	downstream := testutil.ServeTCP(t, at.serve)
	limit := shaper.Limit{Name: "day", Quota: quota.Quota{Amount: 1_000_000, Period: aDay}}
	r := startQuotas(t, shaper.TCP, downstream, limit)
	if err := send("127.0.0.1", r.addr(), 300_001); err != nil {
		t.Fatal(err)
	}
	if n := r.file.claimed("day"); n <= 300_001 {
		t.Errorf("%d claimed of 300,001 used", n)
	}
	r.proxy.Close()
	if n := r.file.claimed("day"); n != 300_001 {
		t.Errorf("after the end the file has %d, want 300,001", n)
	}
	next := start(t, shaper.TCP, downstream)
	next.proxy.home.loop.call(func(leaky.Time) { next.proxy.home.loop.quotas.wall = func() time.Time { return *r.wall.Load() } })
	next.proxy.UseQuotas(r.file, maps.Clone(r.file.records))
	next.apply(limit)
	_ = send("127.0.0.1", next.addr(), 5_000_000)
	at.expect(t, 1_000_000)
}

// More keys than are counted apart share one quota, and get their own when others are over.
func TestQuota_ManyKeys(t *testing.T) {
	t.Parallel()
	var at sink
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, at.serve), shaper.Limit{
		Name: "day", Key: shaper.KeySource, Quota: quota.Quota{Amount: 10_000, Period: aDay},
	})
	r.proxy.home.loop.call(func(now leaky.Time) {
		qs, p := r.proxy.home.loop.quotas, r.shaper.Policy()
		for i := range shaper.MaxQuotaKeys {
			b := qs.open(p, 0, p.KeyOf(0, netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})), now)
			b.Use(1)
			qs.close(b)
		}
	})
	_ = send("127.0.0.1", r.addr(), 6000)
	_ = send("127.0.0.2", r.addr(), 6000)
	at.expect(t, 10_000) // of both together
	if err := send("127.0.0.3", r.addr(), 100); err == nil {
		t.Error("a third one is not refused")
	}
	r.set(r.wall.Load().AddDate(0, 0, 1))
	time.Sleep(1100 * time.Millisecond) // longer than a slot is not looked at
	if err := send("127.0.0.4", r.addr(), 9000); err != nil {
		t.Errorf("a source on the next day: %v", err)
	}
	if err := send("127.0.0.5", r.addr(), 9000); err != nil {
		t.Errorf("another source on the next day: %v", err)
	}
}
