package bpf

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// newCrowded returns a bench that drops handshakes early from crowd connections on.
func newCrowded(t *testing.T, crowd uint64, limits ...shaper.Limit) *tcpBench {
	t.Helper()
	b := newTCPVariant(t, shaper.AttachPolice, map[string]any{
		kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Millisecond), kernelVarEarlyDropThreshold: crowd,
	}, testIdleTimeout, limits...)
	b.setAllReplySeen(t, true)
	b.setAllDeferUntil(t, math.MaxUint64)
	return b
}

// advance advances the clock and waits for the sweeper.
func (b *tcpBench) advance(d time.Duration) {
	b.t.Helper()
	b.now += uint64(d)
	b.awaitSweep()
}

// TestForgedSYNs_HonestClientsServed has a server answer forged SYNs: they do not fill the
// connection table, and clients that complete a handshake are served.
func TestForgedSYNs_HonestClientsServed(t *testing.T) {
	t.Parallel()
	const crowd, each = 100, 50 // a second
	b := newCrowded(t, crowd, shaper.Limit{Name: "all", MaxConnections: 3})
	most := 0
	for s := range 40 {
		for i := range each {
			d := dial(fmt.Sprintf("10.9.%d.%d:20000", s, i))
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
		}
		d := dial(fmt.Sprint("10.0.0.1:", 40000+s))
		b.establish(d)
		b.expectInFlight(1)
		b.exchange(d, client, rst, 0)
		b.advance(time.Second)
		live, gone := b.entries()
		most = max(most, live+gone)
	}
	// Each is checked every 3 s, and removed if its last segment is at least 3 s old.
	if want := crowd + 7*(each+1); most > want {
		t.Errorf("%d connections in the map, want at most %d", most, want)
	}
}

// TestForgottenHandshakes removes connections without slots from a crowded table. None of them is
// established without a slot, and other connections continue.
func TestForgottenHandshakes(t *testing.T) {
	t.Parallel()
	b := newCrowded(t, 0)
	begin := func(t *testing.T) {
		b.t = t
		b.clearMaps()
		b.setAllDeferUntil(t, math.MaxUint64)
		b.setLimits(capped(1))
	}
	// forget makes the table forget a handshake of d.
	forget := func(d *dialogue) {
		b.open(d)
		b.exchange(d, server, syn|ack, 0)
		b.advance(7 * time.Second)
		if _, gone := b.entries(); gone != 0 {
			b.t.Fatalf("%d handshakes in the map, want none", gone)
		}
	}
	for _, from := range []string{"10.0.0.1:40000", "10.0.0.1:40"} { // the port order does not matter
		for _, c := range []struct {
			name string
			run  func(d *dialogue) uint32 // returns the action on the client's last segment
			want uint32
			held int // slots afterwards
		}{
			{"its ACK", func(d *dialogue) uint32 {
				forget(d)
				return b.exchange(d, client, ack, 0)
			}, dropped, 0},
			{"its data", func(d *dialogue) uint32 {
				forget(d)
				d.nextSegment(client, ack, 0)
				return b.exchange(d, client, ack|fin, 10)
			}, dropped, 0},
			{"its ACK, after another SYN", func(d *dialogue) uint32 {
				forget(d)
				b.send(d.segment(client, syn, 1, 0, 0))
				b.reply(d.segment(server, ack, d.next[server], d.next[client], 0)) // RFC 5961
				return b.exchange(d, client, ack, 0)
			}, dropped, 0},
			{"its ACK, after the server has forgotten it", func(d *dialogue) uint32 {
				forget(d)
				b.advance(121 * time.Second)
				return b.exchange(d, client, ack, 0)
			}, passed, 0},
			{"another handshake", func(d *dialogue) uint32 {
				forget(d)
				b.establish(d)
				return b.exchange(d, client, ack, 10)
			}, passed, 1},
			{"an established connection", func(d *dialogue) uint32 {
				b.establish(d)
				b.advance(7 * time.Second)
				forget(dial("10.9.9.9:50000"))
				return b.exchange(d, client, ack, 10)
			}, passed, 1},
		} {
			t.Run(c.name+" from "+from, func(t *testing.T) {
				begin(t)
				before := b.counters()
				if got := c.run(dial(from)); got != c.want {
					t.Errorf("it met action %d, want %d", int32(got), int32(c.want))
				}
				b.expectInFlight(c.held)
				after := b.counters()
				if n := after.ConnsOverCap - before.ConnsOverCap; n != 0 {
					t.Errorf("%d connections refused", n)
				}
				if packets := after.MemoryFull[1] - before.MemoryFull[1]; (packets == 1) != (c.want == dropped) {
					t.Errorf("%d packets refused", packets)
				}
			})
		}
	}
	t.Run("unknown connections", func(t *testing.T) {
		begin(t)
		forget(dial("10.9.9.9:50000"))
		for _, from := range []string{"10.0.0.1:40000", "10.0.0.1:40"} {
			if got := b.exchange(dial(from), client, ack, 10); got != passed {
				t.Errorf("data from %s met action %d", from, int32(got))
			}
		}
	})
	t.Run("SYN+ACK retransmitted", func(t *testing.T) {
		begin(t)
		d := dial(testClient)
		forget(d)
		b.advance(100 * time.Second)
		b.reply(d.segment(server, syn|ack, d.next[server]-1, d.next[client], 0))
		b.advance(100 * time.Second)
		if got := b.exchange(d, client, ack, 0); got != dropped {
			t.Errorf("its ACK met action %d", int32(got))
		}
	})
	t.Run("after a SYN that may reserve", func(t *testing.T) {
		begin(t)
		d := dial(testClient)
		forget(d)
		b.advance(60 * time.Second)
		b.setAllDeferUntil(t, 0)
		b.send(d.segment(client, syn, 1, 0, 0))
		b.reply(d.segment(server, ack, d.next[server], d.next[client], 0)) // RFC 5961
		if got := b.exchange(d, client, ack, 0); got != dropped {
			t.Errorf("its ACK met action %d", int32(got))
		}
		b.expectInFlight(0)
	})
	t.Run("reservations deferred", func(t *testing.T) {
		begin(t)
		b.setAllDeferUntil(t, b.now+uint64(5*time.Second))
		forget(dial(testClient))
		b.open(dial("10.0.0.1:40001"))
		b.expectInFlight(0)
	})
}

// TestForgedSYNs_ThroughInterface sends forged SYNs to a server through an interface: some time after
// they have taken all slots, they take none.
func TestForgedSYNs_ThroughInterface(t *testing.T) {
	const most = 5
	b, inside, _ := newRouter(t)
	// Replies go to the client, which drops them as it does not have the address.
	_, forged, _ := net.ParseCIDR("10.9.0.0/24")
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: inside.Attrs().Index, Dst: forged, Gw: netip.MustParsePrefix(b.client).Addr().AsSlice()}); err != nil {
		t.Fatal(err)
	}
	b.testPlane = openPlane(t)
	b.to.do(func() error { b.listen(false, netip.MustParseAddrPort("0.0.0.0:80")); return nil })
	b.apply([]shaper.Limit{{Name: "cap", Match: shaper.Match{Attach: []string{"here"}}, MaxConnections: most}}, shaper.Attachment{
		Name: "here", Interfaces: []string{"inside"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, IdleTimeout: time.Hour,
	})
	var out int
	b.from.do(func() (err error) {
		out, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	})
	t.Cleanup(func() { _ = unix.Close(out) })
	port := uint16(20000)
	forge := func() {
		t.Helper()
		for range most {
			port++
			d := &dialogue{ends: [2]netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("10.9.0.1"), port), netip.MustParseAddrPort(hostPort(b.server, 80))}}
			packet := d.segment(client, syn, 1, 0, 0)[14:]
			if err := unix.Sendto(out, packet, 0, &unix.SockaddrInet4{Addr: [4]byte{10, 2, 0, 2}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	b.wantAt(hostPort(b.server, 80), 1, 1) // the programs have seen a reply
	b.wantInFlight(1)
	forge()
	b.wantInFlight(most)
	b.wantAt(hostPort(b.server, 80), 1, 0)
	for range 40 {
		forge()
		time.Sleep(100 * time.Millisecond)
	}
	for range most - 1 {
		forge()
		b.wantAt(hostPort(b.server, 80), 1, 1)
	}
	b.wantInFlight(most)
}
