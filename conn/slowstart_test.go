package conn

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// During slow start a downstream has a part of its maximum that grows, and then all of it.
func TestSlowStart_Connections(t *testing.T) {
	t.Parallel()
	const most, slow = 10, 3 * time.Second
	var inside atomic.Int64
	r := start(t, shaper.TCP, server(t, func(c *net.TCPConn) {
		inside.Add(1)
		c.Write([]byte("h"))
		io.Copy(io.Discard, c)
		inside.Add(-1)
	}))
	r.listen.Downstream[0].MaxConnections, r.listen.SlowStart = most, slow
	r.listen.Ramp, r.listen.HoldTimeout, r.listen.ConnectTimeout = shaper.Frequency{N: 10000, Per: time.Second}, time.Minute, time.Minute
	r.apply()
	r.proxy.Hold("l", shaper.Forever, false)
	for range 3 * most {
		dial(t, r.addr())
	}
	begun := time.Now()
	r.proxy.Hold("l", 0, false)
	for {
		n := inside.Load()
		since := time.Since(begun) // later than when n was true
		if allowed := max(1, int64(float64(most)*since.Seconds()/slow.Seconds())); n > min(allowed, most) {
			t.Errorf("%d are open after %v, %d may be", n, since, allowed)
		}
		if since > slow {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	testutil.WaitFor(t, "all that may be open", func() bool { return inside.Load() == most })
}
