package conn

import (
	"bytes"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// A downstream that fails before it has said anything gets what the client has sent again, on another connection; one
// that has said something does not, and neither does one that was sent too much.
func TestRetryUnanswered(t *testing.T) {
	for _, tt := range []struct {
		name    string
		sent    int
		failing int32 // connections that fail
		reset   bool  // by a reset
		says    bool  // something, before they fail
		rate    uint64
		wanted  bool
		want    int32 // connections
		ok      bool
	}{
		{"closes", 100, 2, false, false, 0, true, 3, true},
		{"resets", 100, 2, true, false, 0, true, 3, true},
		{"all that is kept", maxResend, 2, true, false, 0, true, 3, true},
		{"at a rate", 10_000, 1, true, false, 800_000, true, 2, true},
		{"too much", maxResend + 1, 1, true, false, 0, true, 1, false},
		{"too often", 100, 9, false, false, 0, true, 1 + maxResends, false},
		{"says something", 100, 1, false, true, 0, true, 1, false},
		{"says something, resets", 100, 1, true, true, 0, true, 1, false},
		{"not wanted", 100, 1, false, false, 0, false, 1, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			sent := randomBytes(tt.sent)
			var came atomic.Int32
			l, err := net.Listen("tcp4", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					n := came.Add(1)
					go func() {
						defer c.Close()
						got := make([]byte, len(sent))
						if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, sent) {
							t.Errorf("connection %d: got other bytes, %v", n, err)
						}
						if n <= tt.failing {
							if tt.says {
								c.Write([]byte("what"))
								time.Sleep(10 * time.Millisecond)
							}
							if tt.reset {
								c.(*net.TCPConn).SetLinger(0)
							}
							return
						}
						c.Write(got)
					}()
				}
			}()
			var limits []shaper.Limit
			if tt.rate > 0 {
				limits = append(limits, shaper.Limit{Name: "l", Rate: tt.rate, Direction: shaper.Both, MaxDelay: time.Second})
			}
			r := start(t, shaper.TCP, l.Addr().String(), limits...)
			r.listen.RetryUnanswered = tt.wanted
			r.apply(limits...)
			c := dial(t, r.addr())
			if _, err := c.Write(sent); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(sent))
			_, err = io.ReadFull(c, got)
			if ok := err == nil && bytes.Equal(got, sent); ok != tt.ok || came.Load() != tt.want {
				t.Errorf("answered %v (%v) after %d connections; want %v after %d", ok, err, came.Load(), tt.ok, tt.want)
			}
			c.Close()
			r.settle()
		})
	}
}

// A server that is killed while clients greet it, and comes back, serves them all.
func TestRetryUnanswered_Hold(t *testing.T) {
	g := newGreeter(t)
	r := start(t, shaper.TCP, g.addr)
	r.listen.OnDown, r.listen.Ramp, r.listen.HoldTimeout = shaper.DownHold, shaper.Frequency{N: 1000, Per: time.Second}, time.Minute
	r.listen.RetryUnanswered = true
	r.apply()
	l, err := net.Listen("tcp4", g.addr) // accepts, and says nothing
	if err != nil {
		t.Fatal(err)
	}
	greeted := r.visitors(t, 20, testTimeout)
	testutil.WaitFor(t, "all to be connected", func() bool { return r.proxy.Downstreams()[0].InFlight == 20 })
	l.Close() // resets all
	testutil.WaitFor(t, "all to wait", func() bool { return r.status().Waiting == 20 })
	g.start()
	if n := greeted(); n != 20 {
		t.Errorf("%d of 20 were greeted", n)
	}
	g.stop()
	r.settle()
}
