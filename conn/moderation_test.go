package conn

import (
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// The loop rests while 20 datagrams or more arrive in a millisecond, and not after they cease.
func TestModeration(t *testing.T) {
	for _, tt := range []struct {
		every leaky.Time // from one datagram to the next
		rests bool
	}{
		{leaky.Second / 1_000, false},
		{leaky.Second / 18_000, false},
		{leaky.Second / 22_000, true},
		{leaky.Second / 500_000, true},
	} {
		var m moderation
		now := leaky.Second
		for range 1000 { // rounds
			n := 1
			if until := m.rest(now); until > now {
				n = int((until - now) / tt.every)
				now = until
			} else {
				now += tt.every
			}
			m.received += n
		}
		if rests := m.rest(now) > now; rests != tt.rests {
			t.Errorf("with a datagram every %v, the loop rests: %v", tt.every.Duration(), rests)
		}
		if now += leaky.Second; m.rest(now) > now {
			t.Errorf("after a second without datagrams the loop rests")
		}
	}
}

// Under many datagrams a second the loop rests, and goes on afterwards.
func TestModeration_Batches(t *testing.T) {
	server := testutil.ListenUDP(t, "127.0.0.1:0")
	var last atomic.Bool
	testutil.ServeUDP(t, server, func(data []byte, _ netip.AddrPort) []byte {
		if string(data) == "last" {
			last.Store(true)
		}
		return nil
	})
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.apply()
	c, err := net.Dial("udp4", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	rested := 0
	for start := time.Now(); time.Since(start) < 300*time.Millisecond || rested == 0 && time.Since(start) < testTimeout; {
		time.Sleep(time.Second / 2000)
		for range 25 { // 50,000 a second
			if _, err := c.Write([]byte("datagram")); err != nil {
				t.Fatal(err)
			}
		}
		r.proxy.home.loop.call(func(leaky.Time) {
			if r.proxy.home.loop.moderation.on {
				rested++
			}
		})
	}
	if rested == 0 {
		t.Error("the loop never rested")
	}
	time.Sleep(20 * time.Millisecond)
	testutil.WaitFor(t, "a datagram after many others", func() bool { // if one finds a full buffer, the next one does not
		if _, err := c.Write([]byte("last")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
		return last.Load()
	})
}
