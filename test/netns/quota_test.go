package netns

import (
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestQuota_Killed kills a daemon again and again while three sources use up a quota. What the downstream receives, as it counts it
// itself, is at most the quota, and at least that less a claim for each kill, and what was on its way then.
func TestQuota_Killed(t *testing.T) {
	t.Parallel()
	const (
		amount  = 40_000_000
		kills   = 6
		claim   = amount / 256
		sources = 3
	)
	f := ipv4
	rnd := testutil.Rand(t)
	n := newNetwork(t)
	var received atomic.Int64
	n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) {
		b := make([]byte, 64<<10)
		for {
			m, err := c.Read(b)
			received.Add(int64(m))
			if err != nil {
				return
			}
		}
	})
	text := config(f, limit("day", onTCP, `quota = "40MB/day UTC"`), limit("rate", onTCP, `rate = "8MB/s"`))
	state := filepath.Join(t.TempDir(), "state")
	var clients sync.WaitGroup
	stop := make(chan struct{})
	end := sync.OnceFunc(func() { close(stop); clients.Wait() })
	defer end()
	for _, source := range f.sources[:sources] {
		clients.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				c, err := n.client.dialTCP(source, f.listenAddr())
				if err != nil {
					time.Sleep(5 * time.Millisecond)
					continue
				}
				c.SetDeadline(time.Now().Add(10 * time.Second))
				_, _ = c.Write(make([]byte, 300_000))
				_ = c.CloseWrite()
				_, _ = io.ReadAll(c)
				c.Close()
			}
		})
	}
	last := n.shaper.shaperd(t, text, "--state", state)
	ports := last.Notify.Stored
	for range kills {
		time.Sleep(time.Duration(100+rnd.IntN(500)) * time.Millisecond)
		last.Kill()
		last = n.shaper.shaperdWith(t, ports, text, "--state", state)
	}
	waitFor(t, 60*time.Second, func() error {
		all, err := last.api().Quotas(t.Context(), "day", 1)
		if err == nil && all.UsedUp == 0 {
			err = fmt.Errorf("%+v", all)
		}
		return err
	})
	time.Sleep(300 * time.Millisecond)
	end()
	got := received.Load()
	t.Logf("%d of %d received after %d kills", got, amount, kills)
	if least := int64(amount - kills*(claim+sources<<20)); got > amount || got < least {
		t.Errorf("the downstream received %d bytes, want %d to %d", got, least, amount)
	}
}
