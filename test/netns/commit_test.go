package netns

import (
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/test/lab"
)

// TestReload_FailedCommitChangesNothing has the kernel reject a policy at the last moment of a
// reload that changes both planes. Neither may change: otherwise the proxy would enforce a policy
// that the packet plane does not have, while status and log report the old one.
func TestReload_FailedCommitChangesNothing(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	pins := newPinPath(t)
	text := func(rate, more string) string {
		return attachConfig(pins, attach(lab.MiddleRight, "police"),
			limit("packets", atWall, `packets = "`+rate+`pps"`), limit("bytes", `rate = "`+rate+`Mbit/s"`)) +
			rpcListener(netip.MustParseAddrPort("10.2.0.9:7001"), more)
	}
	d := n.shaper.shaperd(t, text("10", "tcp://0.0.0.0:7002"))
	found, err := filepath.Glob(filepath.Join(pins, "*", "policies"))
	if err != nil || len(found) != 1 {
		t.Fatalf("pinned maps of policies: %v, %v", found, err)
	}
	policies, err := ebpf.LoadPinnedMap(found[0], nil)
	must(t, err)
	defer policies.Close()
	must(t, policies.Freeze()) // makes it read-only

	d.reload(text("20", "tcp://0.0.0.0:7003"))
	d.awaitLog("the old configuration stays effective")
	for name, want := range map[string]float64{"packets": 10, "bytes": 10e6 / 8} {
		l, err := d.api().Limit(t.Context(), name)
		must(t, err)
		if l.Rate+l.Packets != want {
			t.Errorf("limit %q has rate %v, want %v", name, l.Rate+l.Packets, want)
		}
	}
	for port, open := range map[uint16]bool{7002: true, 7003: false} {
		c, err := n.shaper.dialTCP(netip.MustParseAddr("127.0.0.1"), netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port))
		if (err == nil) != open {
			t.Errorf("port %d: %v", port, err)
		}
		if err == nil {
			c.Close()
		}
	}
}
