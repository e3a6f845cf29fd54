package conn

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"os"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// After years of uptime a proxy paces, times out and forgets like a new one.
func TestLongUptime(t *testing.T) {
	const year = 365 * 24 * time.Hour
	for _, age := range []time.Duration{3 * year, 9 * year} {
		t.Run(age.String(), func(t *testing.T) {
			t.Parallel()
			started := time.Now()
			s := shaper.New(1000)
			p, err := New(Options{Shaper: s, Clock: pacer.NewClockAt(age), Log: testLog(t), TrafficLog: testLog(t)})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(p.Close)
			to := netip.MustParseAddrPort(testutil.ServeTCP(t, testutil.Echo))
			listen := shaper.Listener{
				Name: "l", Addresses: []shaper.Address{addressOf(shaper.TCP, netip.MustParseAddrPort(testutil.FreeAddr(t, "tcp")))},
				Downstream: []shaper.Downstream{{Host: to.Addr().String(), Port: to.Port()}},
				MaxQueue:   1000, ConnectTimeout: testTimeout, MaxLifetime: time.Hour,
			}
			limit := shaper.Limit{
				Name: "l", Rate: 8e6, MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 1,
				NewConnections: shaper.Frequency{N: 10, Per: time.Second},
			}
			apply := func() {
				t.Helper()
				if err := p.Apply(t.Context(), []shaper.Listener{listen}, policy(t, s, limit), nil); err != nil {
					t.Fatal(err)
				}
			}
			apply()
			begun := time.Now()
			c := dial(t, listen.Endpoints()[0].Addr.String())
			sent := make([]byte, 200_000)
			go c.Write(bytes.Clone(sent))
			if _, err := io.ReadFull(c, sent); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(begun); took < 150*time.Millisecond {
				t.Errorf("200 kB at 1 MB/s took %v", took)
			}
			next := dial(t, listen.Endpoints()[0].Addr.String()) // waits for the end of the first one
			next.Write(sent[:1])
			listen.TCPIdleTimeout = 2 * time.Second
			apply()
			c.SetReadDeadline(time.Now().Add(testTimeout))
			if _, err := c.Read(sent); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the idle connection does not end")
			}
			if _, err := io.ReadFull(next, sent[:1]); err != nil {
				t.Errorf("the waiting connection: %v", err)
			}
			_, late := p.Lateness()
			if busy := time.Since(started); late > busy {
				t.Errorf("the loop was late by %v in %v", late, busy)
			}
		})
	}
}
