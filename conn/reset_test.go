package conn

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// A downstream replies, and closes with the rest of the request unread: the reset that follows does
// not overtake the reply, however long that takes.
func TestReplyIsDeliveredBeforeReset(t *testing.T) {
	t.Parallel()
	for name, limits := range map[string][]shaper.Limit{
		"without limits": nil,
		"limited":        {{Name: "down", Rate: 8 * 400_000, Direction: shaper.FromDownstream}},
		"both":           {{Name: "both", Rate: 8 * 400_000, Direction: shaper.Both}},
	} {
		for _, slow := range []bool{false, true} {
			for _, shut := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, slow client: %v, half-closed: %v", name, slow, shut), func(t *testing.T) {
					t.Parallel()
					answer := randomBytes(100_000)
					r := start(t, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
						io.ReadFull(c, make([]byte, 1000))
						c.Write(answer)
						if shut {
							c.CloseWrite()
						}
						testutil.WaitFor(t, "more of the request, unread", func() bool { return unread(t, c) > 0 })
						// The end resets the connection, which discards what the kernel has not sent.
						testutil.WaitFor(t, "the answer's arrival at the proxy", func() bool { return unacked(t, c) == 0 })
					}), limits...)
					c := dial(t, r.addr())
					if slow {
						c.SetReadBuffer(4096)
					}
					go c.Write(make([]byte, 200_000))
					if slow {
						time.Sleep(500 * time.Millisecond)
					}
					got := make([]byte, len(answer))
					if n, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, answer) {
						t.Fatalf("got %d of %d bytes, err %v", n, len(answer), err)
					}
					testutil.WaitFor(t, "its end", func() bool { return r.shaper.Listener("l").Ended[shaper.ResetByServer].Load() == 1 })
					r.settle()
				})
			}
		}
	}
}

// TestReset_ClientDoesNotRead waits for a client that does not read what a downstream sent before it failed, or
// leaves, while the policy changes.
func TestReset_ClientDoesNotRead(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		leave func(*proxyRig, *net.TCPConn)
		ended shaper.Ending
	}{
		{"stays", func(*proxyRig, *net.TCPConn) {}, shaper.ResetByServer},
		{"resets", func(_ *proxyRig, c *net.TCPConn) { c.SetLinger(0); c.Close() }, shaper.ResetByClient},
		{"is blocked", func(r *proxyRig, _ *net.TCPConn) { r.apply(shaper.Limit{Name: "block", Block: true}) }, shaper.Refused},
		{"stays without listener", func(r *proxyRig, _ *net.TCPConn) {
			if err := r.proxy.Apply(r.t.Context(), nil, policy(r.t, r.shaper), nil); err != nil {
				r.t.Error(err)
			}
		}, shaper.ResetByServer},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
				io.ReadFull(c, make([]byte, 4000))
				c.Write(make([]byte, 100_000))
				testutil.WaitFor(t, "the answer's arrival at the proxy", func() bool { return unacked(t, c) == 0 })
				c.SetLinger(0)
			}), shaper.Limit{Name: "slots", MaxConnections: 1})
			r.apply(shaper.Limit{Name: "slots", MaxConnections: 1}, shaper.Limit{Name: "slow", Rate: 8 * 5000, Direction: shaper.ToDownstream})
			conn := dial(t, r.addr())
			conn.SetReadBuffer(4096)
			listener := r.shaper.Listener("l")
			conn.Write(make([]byte, 4000))
			stage := func() (stage stage) {
				r.proxy.home.loop.call(func(leaky.Time) {
					for _, s := range r.proxy.home.sessions.all {
						stage = s.stage
					}
				})
				return stage
			}
			testutil.WaitFor(t, "the reset", func() bool { return stage() == stageResetting })
			r.proxy.Connections(func(c *shaper.ConnectionStatus) {
				if c.Stage != "closing" || c.Waited < 20*time.Millisecond || c.MostlyThrottledBy != "slow" {
					t.Errorf("%+v, want a wait for its limit", c)
				}
			})
			r.apply(shaper.Limit{Name: "by source", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, MaxConnections: 2})
			if got, n := stage(), r.shaper.Policy().State(0).InFlight.Load(); got != stageResetting || n != 1 {
				t.Fatalf("stage %d after a reload, %d in flight", got, n)
			}
			c.leave(r, conn)
			testutil.WaitFor(t, "its end", func() bool { return listener.Ended[c.ended].Load() == 1 })
			r.settle()
		})
	}
}

// unacked returns how many bytes of c the peer's kernel has not acknowledged.
func unacked(t *testing.T, c *net.TCPConn) (n int) { return queueLength(t, c, unix.SIOCOUTQ) }

// unread returns how many bytes have arrived at c and were not read.
func unread(t *testing.T, c *net.TCPConn) (n int) { return queueLength(t, c, unix.SIOCINQ) }

func queueLength(t *testing.T, c *net.TCPConn, which uint) (n int) {
	raw, err := c.SyscallConn()
	if err == nil {
		raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), which) })
	}
	if err != nil {
		t.Error(err)
	}
	return n
}
