package conn

import (
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

var perServer = shaper.Limit{Name: "per-server", Key: shaper.KeyDownstream, Direction: shaper.Both, Rate: 8e6, MaxDelay: time.Second}

// queueKeys returns the keys of the queues in use, as text.
func (r *proxyRig) queueKeys() (keys []string) {
	p := r.shaper.Policy()
	r.proxy.home.loop.call(func(leaky.Time) {
		for key := range r.proxy.home.loop.scheduler.byKey {
			keys = append(keys, p.DescribeKey(0, key))
		}
	})
	slices.Sort(keys)
	return keys
}

func downstreamAt(addr string) shaper.Downstream {
	at := netip.MustParseAddrPort(addr)
	return shaper.Downstream{Host: at.Addr().String(), Port: at.Port()}
}

func wantKeys(downstreams ...string) (keys []string) {
	for _, d := range downstreams {
		keys = append(keys, "downstream "+d)
	}
	slices.Sort(keys)
	return keys
}

// Each downstream has a bucket, which is that of a connection when it has been chosen: also after another one could not be
// reached.
func TestKeyDownstream_TCP(t *testing.T) {
	a, b := testutil.ServeTCP(t, testutil.Echo), testutil.ServeTCP(t, testutil.Echo)
	r := start(t, shaper.TCP, a, perServer)
	r.listen.Downstream = []shaper.Downstream{downstreamAt(a), downstreamAt(b), downstreamAt(testutil.FreeAddr(t, "tcp"))}
	r.apply(perServer)
	for range 4 {
		c := dial(t, r.addr())
		c.Write([]byte("x"))
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(wantKeys(a, b), r.queueKeys()); diff != "" {
		t.Error(diff)
	}
}

// A flow that a reload moves to another downstream is in its bucket.
func TestKeyDownstream_MovesWithFlow(t *testing.T) {
	serve := func() string {
		c := testutil.ListenUDP(t, "127.0.0.1:0")
		testutil.EchoUDP(t, c)
		return c.LocalAddr().String()
	}
	a, b := serve(), serve()
	r := start(t, shaper.UDP, a, perServer)
	r.listen.UDPIdleTimeout = time.Minute
	r.apply(perServer)
	c := dialUDP(t, r)
	exchange := func() {
		t.Helper()
		testutil.WaitFor(t, "an answer", func() bool {
			c.Write([]byte("x"))
			c.SetReadDeadline(time.Now().Add(time.Second))
			_, err := c.Read(make([]byte, 10))
			return err == nil
		})
	}
	exchange()
	if diff := cmp.Diff(wantKeys(a), r.queueKeys()); diff != "" {
		t.Error(diff)
	}
	r.listen.Downstream = []shaper.Downstream{downstreamAt(b)}
	r.apply(perServer)
	exchange()
	if diff := cmp.Diff(wantKeys(b), r.queueKeys()); diff != "" {
		t.Error(diff)
	}
}

// The rates of two downstreams do not add up to one: what one takes does not delay the other.
func TestKeyDownstream_RatesAreApart(t *testing.T) {
	drains := func() string { return testutil.ServeTCP(t, testutil.Discard) }
	a, b := drains(), drains()
	slow := perServer
	slow.Rate = 8e5 // 100 kB/s
	r := start(t, shaper.TCP, a, slow)
	r.listen.Downstream = []shaper.Downstream{downstreamAt(a), downstreamAt(b)}
	r.apply(slow)
	var all []net.Conn
	for range 2 {
		c := dial(t, r.addr())
		c.SetDeadline(time.Time{})
		go c.Write(make([]byte, 8<<20)) // more than the test lasts
		all = append(all, c)
	}
	moved := func() (n []uint64) {
		for _, d := range r.proxy.Downstreams() {
			n = append(n, d.State.ToDownstream.Load())
		}
		return n
	}
	testutil.WaitFor(t, "both to have begun", func() bool { n := moved(); return n[0] > 0 && n[1] > 0 })
	begun := time.Now()
	from := moved()
	time.Sleep(time.Second)
	// Of one bucket, no more than half would be for each. When the loop stands still nothing is made up for, and it takes longer to
	// show.
	testutil.WaitFor(t, "both to get more than half of 100,000 B/s", func() bool {
		n := moved()
		took := time.Since(begun).Seconds()
		for i := range n {
			rate := float64(n[i]-from[i]) / took
			if rate > 150_000 {
				t.Fatalf("downstream %d got %.0f B/s, want 100,000", i, rate)
			}
			if rate < 65_000 {
				return false
			}
		}
		return true
	})
	for _, c := range all {
		c.Close()
	}
}
