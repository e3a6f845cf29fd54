package bpf

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/shaper"
)

// newRouter returns a router without a proxy, with its interfaces to the client and the server.
func newRouter(t *testing.T) (b *routerBench, inside, outside netlink.Link) {
	t.Helper()
	b = &routerBench{routerNet: routerNets["IPv4"], from: newHost(t), to: newHost(t)}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	return b, b.from.connect("inside", b.inside, b.client), b.to.connect("outside", b.outside, b.server)
}

// end closes connections and waits until they have ended.
func (b *routerBench) end(open ...net.Conn) {
	b.t.Helper()
	for _, c := range open {
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		err := c.(*net.TCPConn).CloseWrite()
		if err == nil {
			_, err = io.ReadAll(c)
		}
		if err = errors.Join(err, c.Close()); err != nil {
			b.t.Error(err)
		}
	}
}

// TestUncount_ReleasesSlots ends connections where no program sees it: their slots are released.
func TestUncount_ReleasesSlots(t *testing.T) {
	const most = 4
	b, inside, _ := newRouter(t)
	b.Attachment = shaper.Attachment{Name: "here", Interfaces: []string{"inside"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, IdleTimeout: time.Hour}
	b.testPlane = openPlane(t)
	b.to.do(func() error { b.listen(false, netip.AddrPortFrom(b.any, 80)); return nil })
	limit := func(connections int, at ...string) shaper.Limit {
		return shaper.Limit{Name: "cap", Match: shaper.Match{Attach: at}, MaxConnections: connections, Rate: 1e9, MaxDelay: time.Second}
	}
	apply := func(l shaper.Limit, attachments ...shaper.Attachment) {
		b.t.Helper()
		b.apply([]shaper.Limit{l}, attachments...)
	}
	dial := func(n int) (open []net.Conn) {
		b.t.Helper()
		for range n {
			b.from.do(func() error {
				c, err := b.connect(&net.Dialer{Timeout: time.Second}, hostPort(b.server, 80))
				if c != nil {
					open = append(open, c)
				}
				return err
			})
		}
		if len(open) != n {
			b.t.Fatalf("%d connections, want %d", len(open), n)
		}
		return open
	}
	// begin opens as many connections as the cap allows.
	begin := func(t *testing.T, attachments ...shaper.Attachment) []net.Conn {
		t.Helper()
		b.t = t
		apply(limit(most, "here"), attachments...)
		b.wantInFlight(0)
		open := dial(most)
		b.exchangeData(open...)
		b.wantInFlight(most)
		return open
	}
	free := func() {
		b.t.Helper()
		b.wantInFlight(0)
		b.end(dial(1)...)
	}

	t.Run("the limit does not count any more", func(t *testing.T) {
		open := begin(t, b.Attachment)
		apply(limit(0, "here"), b.Attachment)
		b.end(open...)
		apply(limit(most, "here"), b.Attachment)
		free()
	})
	t.Run("the limit matches others for a while", func(t *testing.T) {
		open := begin(t, b.Attachment)
		others := limit(most, "here")
		others.Match.Source = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}
		apply(others, b.Attachment)
		b.end(open...)
		apply(limit(most, "here"), b.Attachment)
		free()
	})
	t.Run("the attachment is renamed", func(t *testing.T) {
		open := begin(t, b.Attachment)
		there := b.Attachment
		there.Name = "there"
		apply(limit(most, "there"), there)
		b.wantInFlight(most) // silent connections included
		b.exchangeData(open...)
		b.wantInFlight(most)
		b.wantAt(hostPort(b.server, 80), 1, 0)
		b.end(open...)
		free()
	})
	t.Run("its interface moves to another attachment", func(t *testing.T) {
		both := b.Attachment
		both.Interfaces = []string{"inside", "outside"}
		open := begin(t, both)
		here, there := b.Attachment, b.Attachment
		here.Interfaces, there.Name = []string{"outside"}, "there"
		apply(limit(most, "here"), here, there)
		b.wantInFlight(0)
		b.end(open...)
		apply(limit(most, "here"), b.Attachment)
		free()
	})
	t.Run("a daemon was killed, and everything passes", func(t *testing.T) {
		open := begin(t, b.Attachment)
		b.crash()
		expireHeartbeat(t, b.testPlane)
		b.end(open[:most-1]...)
		other := dial(1)
		b.exchangeData(other...)
		b.open()
		apply(limit(most, "here"), b.Attachment)
		b.wantInFlight(2)
		b.end(append(other, open[most-1])...)
		free()
	})
	t.Run("their interface is gone", func(t *testing.T) {
		begin(t, b.Attachment)
		if err := netlink.LinkDel(inside); err != nil {
			t.Fatal(err)
		}
		within(t, 10*time.Second, func() bool {
			_, err := b.Status()
			return err != nil || b.policy.State(0).InFlight.Load() == 0
		})
	})
}
