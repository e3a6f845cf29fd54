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

	"shaperd/shaper"
)

// newRouter is a router that has no proxy yet, and its interfaces to the client and the server.
func newRouter(t *testing.T) (b *ownBench, inside, outside netlink.Link) {
	t.Helper()
	b = &ownBench{ownNet: ownNets["IPv4"], from: newHost(t), to: newHost(t)}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	return b, b.from.connect("inside", b.inside, b.client), b.to.connect("outside", b.outside, b.server)
}

// end has connections end. Nothing of them is under way then.
func (b *ownBench) end(open ...net.Conn) {
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

// TestSlotsComeBack has connections end where nobody sees it: they hold no slots for that.
func TestSlotsComeBack(t *testing.T) {
	const most = 4
	b, inside, _ := newRouter(t)
	b.Attachment = Attachment{Name: "here", Interfaces: []string{"inside"}, Ingress: true, Mode: Police, IdleTimeout: time.Hour}
	b.testPlane = openPlane(t)
	b.to.do(func() error { b.listen(false, netip.AddrPortFrom(b.any, 80)); return nil })
	limit := func(connections int, at ...string) shaper.Limit {
		return shaper.Limit{Name: "cap", Match: shaper.Match{Attach: at}, Connections: connections, Rate: 1e9, MaxDelay: time.Second}
	}
	apply := func(l shaper.Limit, attachments ...Attachment) {
		b.t.Helper()
		b.apply([]shaper.Limit{l}, attachments...)
	}
	dial := func(n int) (open []net.Conn) {
		b.t.Helper()
		for range n {
			b.from.do(func() error {
				c, err := b.connect(&net.Dialer{Timeout: time.Second}, at(b.server, 80))
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
	// begin has as many connections be in flight as may be.
	begin := func(t *testing.T, attachments ...Attachment) []net.Conn {
		t.Helper()
		b.t = t
		apply(limit(most, "here"), attachments...)
		b.wantInFlight(0)
		open := dial(most)
		b.chat(open...)
		b.wantInFlight(most)
		return open
	}
	free := func() {
		b.t.Helper()
		b.wantInFlight(0)
		b.end(dial(1)...)
	}

	t.Run("a connection's limit counts no more", func(t *testing.T) {
		open := begin(t, b.Attachment)
		apply(limit(0, "here"), b.Attachment)
		b.end(open...)
		apply(limit(most, "here"), b.Attachment)
		free()
	})
	t.Run("it is for others for a while", func(t *testing.T) {
		open := begin(t, b.Attachment)
		others := limit(most, "here")
		others.Match.Source = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}
		apply(others, b.Attachment)
		b.end(open...)
		apply(limit(most, "here"), b.Attachment)
		free()
	})
	t.Run("the attachment has another name", func(t *testing.T) {
		open := begin(t, b.Attachment)
		there := b.Attachment
		there.Name = "there"
		apply(limit(most, "there"), there)
		b.wantInFlight(most) // also of those that are silent
		b.chat(open...)
		b.wantInFlight(most)
		b.wantAt(at(b.server, 80), 1, 0)
		b.end(open...)
		free()
	})
	t.Run("its interface has another attachment beside that", func(t *testing.T) {
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
	t.Run("a daemon was killed and let all pass", func(t *testing.T) {
		open := begin(t, b.Attachment)
		b.crash()
		stale(t, b.testPlane)
		b.end(open[:most-1]...)
		other := dial(1)
		b.chat(other...)
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
