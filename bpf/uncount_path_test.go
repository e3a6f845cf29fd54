package bpf

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/test/lab"
)

// pathBench is a router between a server and a client with two addresses, whose paths and
// attachments change.
type pathBench struct {
	*routerBench
	outside netlink.Link
}

func newPaths(t *testing.T) *pathBench {
	b := &pathBench{routerBench: &routerBench{routerNet: routerNets["IPv4"], from: newHost(t), to: newHost(t)}}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	b.Attachment = shaper.Attachment{Name: "here", Interfaces: []string{"inside"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, IdleTimeout: time.Hour}
	b.testPlane = openPlane(t)
	b.from.connect("inside", b.inside, b.client)
	b.outside = b.to.connect("outside", b.routerNet.outside, b.server)
	b.shell(b.from, "ip addr add 10.1.0.3/24 dev eth0")
	b.to.do(func() error {
		b.listen(false, netip.AddrPortFrom(b.any, 80))
		b.listen(false, netip.AddrPortFrom(b.any, 61000)) // the port order does not matter
		return nil
	})
	return b
}

// shell runs a command on a host, or in the test's namespace if it is nil.
func (b *pathBench) shell(at *host, command string) {
	b.t.Helper()
	run := func() error {
		if out, err := exec.Command("sh", "-ec", command).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", command, err, out)
		}
		return nil
	}
	if at != nil {
		at.do(run)
	} else if err := run(); err != nil {
		b.t.Fatal(err)
	}
}

// open dials n connections from an address of the client, of which want must be established.
func (b *pathBench) open(n, want int, from string, port uint16) (open []net.Conn) {
	b.t.Helper()
	dialer := &net.Dialer{Timeout: 5 * time.Second, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	for range n {
		b.from.do(func() error {
			c, err := b.connect(dialer, hostPort(b.server, port))
			if c != nil {
				open = append(open, c)
			}
			return err
		})
	}
	if len(open) != want {
		b.t.Errorf("%d of %d connections, want %d", len(open), n, want)
	}
	b.exchangeData(open...)
	return open
}

const pathMax = 2

func pathCap(at ...string) shaper.Limit {
	return shaper.Limit{Name: "cap", Match: shaper.Match{Attach: at}, MaxConnections: pathMax}
}

// TestUncount_PathMoves moves the path of connections to another interface of their attachment,
// and removes the first one: they stay counted.
func TestUncount_PathMoves(t *testing.T) {
	for _, c := range []struct {
		name string
		gone func(b *pathBench, a shaper.Attachment)
	}{
		{"the interface is removed from the attachment", func(b *pathBench, a shaper.Attachment) {
			a.Interfaces = []string{"second"}
			b.apply([]shaper.Limit{pathCap("here")}, a)
		}},
		{"the interface is gone", func(b *pathBench, _ shaper.Attachment) {
			if err := netlink.LinkDel(b.outside); err != nil {
				b.t.Fatal(err)
			}
			b.shell(b.to, "ip link set lo up; ip addr add 10.2.0.2/32 dev lo")
			within(b.t, 10*time.Second, func() bool {
				s, err := b.Status()
				return err == nil && !slices.ContainsFunc(s.Points, func(p PointStatus) bool { return p.Interface == "outside" })
			})
			time.Sleep(checkInterval)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newPaths(t)
			b.t = t
			var server int
			b.to.do(func() error { server = unix.Gettid(); return nil })
			b.shell(nil, fmt.Sprint("ip link add second type veth peer name eth1; ip link set eth1 netns ", server, "; ip addr add 10.3.0.1/24 dev second; ip link set second up"))
			t.Cleanup(func() { b.shell(nil, "ip link del second") })
			b.shell(b.to, "ip addr add 10.3.0.2/24 dev eth1; ip link set eth1 up")
			if err := lab.AwaitUp(&netlink.Handle{}, "second"); err != nil {
				t.Fatal(err)
			}
			for _, at := range []*host{nil, b.to} {
				b.shell(at, "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 >$f; done")
			}
			a := b.Attachment
			a.Direction, a.Interfaces = shaper.Egress, []string{"outside", "second"}
			b.apply([]shaper.Limit{pathCap("here")}, a)
			open := b.open(pathMax, pathMax, "10.1.0.2", 61000)
			b.shell(nil, "ip route add 10.2.0.2/32 via 10.3.0.2 dev second")
			b.shell(b.to, "ip route add 10.1.0.0/24 via 10.3.0.1 dev eth1")
			b.exchangeData(open...)
			c.gone(b, a)
			b.wantInFlight(pathMax)
			b.open(1, 0, "10.1.0.2", 61000)
			b.exchangeData(open...)
			b.end(open...)
			b.wantInFlight(0)
		})
	}
}

// TestUncount_AttachmentChanges releases the slots of connections whose segments no program tracks
// any more.
func TestUncount_AttachmentChanges(t *testing.T) {
	b := newPaths(t)
	begin := func(t *testing.T, limits []shaper.Limit, attachments ...shaper.Attachment) []net.Conn {
		t.Helper()
		b.t = t
		b.apply(limits, attachments...)
		b.wantInFlight(0)
		open := b.open(pathMax, pathMax, "10.1.0.2", 80)
		b.wantInFlight(pathMax)
		return open
	}
	one := []shaper.Limit{pathCap("here")}
	t.Run("its attachment changes direction", func(t *testing.T) {
		open := begin(t, one, b.Attachment)
		other := b.Attachment
		other.Direction = shaper.Egress
		b.apply(one, other)
		b.end(open...)
		b.wantInFlight(0)
	})
	t.Run("two attachments swap directions", func(t *testing.T) {
		in, out := b.Attachment, b.Attachment
		in.Name, out.Name, out.Direction = "a", "b", shaper.Egress
		both := []shaper.Limit{pathCap("a", "b")}
		open := begin(t, both, in, out)
		in.Direction, out.Direction = shaper.Egress, shaper.Ingress
		b.apply(both, in, out)
		b.exchangeData(open...)
		b.wantInFlight(pathMax)
		b.end(open...)
		b.wantInFlight(0)
	})
	t.Run("a daemon is stopped, and another attachment stays", func(t *testing.T) {
		kept := b.Attachment
		kept.Name, kept.Interfaces, kept.OnStop = "kept", []string{"outside"}, shaper.StopKeep
		open := begin(t, one, b.Attachment, kept)
		if err := b.Close(); err != nil {
			t.Error(err)
		}
		b.end(open...)
		b.testPlane.open()
		b.apply(one, b.Attachment, kept)
		b.wantInFlight(0)
		b.apply(one, b.Attachment)
	})
	t.Run("another tool removes the programs, and they cannot be attached again", func(t *testing.T) {
		a := b.Attachment
		a.Hook, a.Interfaces = shaper.HookClsact, []string{"inside", "outside"}
		open := begin(t, one, a)
		b.shell(nil, "tc qdisc del dev inside clsact; tc qdisc add dev inside ingress; tc filter add dev inside ingress protocol all prio 1 u32 match u32 0 0")
		t.Cleanup(func() { b.shell(nil, "tc qdisc del dev inside ingress") })
		within(t, 10*time.Second, func() bool { _, err := b.Status(); return err != nil || b.policy.State(0).InFlight.Load() == 0 })
		b.end(open...)
	})
}

// TestUncount_BlockedSource blocks the source whose connections take all slots, until these have
// ended: their segments meanwhile, and retransmissions, are seen only in part.
func TestUncount_BlockedSource(t *testing.T) {
	b := newPaths(t)
	b.apply([]shaper.Limit{pathCap("here")}, b.Attachment)
	open := b.open(pathMax, pathMax, "10.1.0.2", 80)
	b.apply([]shaper.Limit{pathCap("here"), {
		Name: "block", Match: shaper.Match{Attach: []string{"here"}, Source: []netip.Prefix{netip.MustParsePrefix("10.1.0.2/32")}}, Block: true,
	}}, b.Attachment)
	b.end(b.open(pathMax, pathMax, "10.1.0.3", 80)...)
	for _, c := range open {
		_ = c.Close()
	}
	b.apply([]shaper.Limit{pathCap("here")}, b.Attachment)
	time.Sleep(time.Second)
	within(t, 15*time.Second, func() bool {
		_, err := b.Status()
		return err == nil && b.policy.State(0).InFlight.Load() == 0
	})
}

// TestUncount_ReusedAttachmentName gives an attachment the former name of another one: it keeps its
// connections, and replies are remembered only for its own interfaces.
func TestUncount_ReusedAttachmentName(t *testing.T) {
	b := newPaths(t)
	here, there := b.Attachment, b.Attachment
	there.Name, there.Interfaces = "there", []string{"outside"}
	b.apply([]shaper.Limit{pathCap("here", "there")}, here, there)
	b.apply([]shaper.Limit{pathCap("here")}, here)
	open := b.open(pathMax, pathMax, "10.1.0.2", 80)
	replied := func() (has uint32) {
		t.Helper()
		if err := b.kernel.ReplySeen.Lookup(b.numbers.attachments["there"], &has); err != nil {
			t.Fatal(err)
		}
		return has
	}
	there.Interfaces = []string{"inside"}
	b.apply([]shaper.Limit{pathCap("there")}, there)
	b.wantInFlight(pathMax)
	b.open(1, 0, "10.1.0.2", 80)
	if replied() != 1 {
		t.Error("the replies seen are forgotten")
	}
	b.exchangeData(open...)
	b.end(open...)
	b.wantInFlight(0)
	there.Interfaces = []string{"outside"}
	b.apply([]shaper.Limit{pathCap("there")}, there)
	if replied() != 0 {
		t.Error("the replies seen at another interface are kept")
	}
}
