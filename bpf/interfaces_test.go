package bpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/shaper"
)

// TestPlane_AttachesToNewInterfaces adds interfaces: they are attached to at once, with the loaded
// programs, and Status is answered meanwhile.
func TestPlane_AttachesToNewInterfaces(t *testing.T) {
	const n = 20
	p := openPlane(t)
	p.apply([]shaper.Limit{tenAnHour("here")}, shaper.Attachment{Name: "here", Interfaces: []string{"many[0-9]*"}, Mode: shaper.AttachPolice})
	loaded := len(p.programs)
	if loaded != 1 {
		t.Errorf("%d programs are loaded without an interface, want one", loaded)
	}
	for i := range n {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprint("many", i)}, PeerName: fmt.Sprint("peer", i)}
		if err := netlink.LinkAdd(veth); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = netlink.LinkDel(veth) })
	}
	began := time.Now()
	within(t, 10*time.Second, func() bool {
		s, err := p.Status()
		if err != nil {
			t.Fatal(err)
		}
		up := 0
		for _, pt := range s.Points {
			if pt.Interface != "" && pt.Err == "" {
				up++
			}
		}
		return up == n
	})
	t.Logf("%d new interfaces are attached to after %v", n, time.Since(began))
	p.changeMu.Lock()
	defer p.changeMu.Unlock()
	if len(p.programs) != loaded {
		t.Errorf("%d programs are loaded for %d interfaces, want %d", len(p.programs), n, loaded)
	}
}

// TestPlane_FollowsLinkEvents adds and renames an interface: link events report it before the
// periodic checks.
func TestPlane_FollowsLinkEvents(t *testing.T) {
	t.Parallel()
	p := openPlane(t)
	p.apply([]shaper.Limit{tenAnHour("here")}, shaper.Attachment{Name: "here", Interfaces: []string{"newcomer0"}, Mode: shaper.AttachPolice})
	w := newWire(t, "newcomer")
	within(t, 10*time.Second, func() bool { return p.point().Interface != "" })
	w.want(p, 1, 20, 10)
	if err := netlink.LinkSetDown(w.from); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetName(w.from, "another0"); err != nil {
		t.Fatal(err)
	}
	within(t, 10*time.Second, func() bool { return p.point().Interface == "" })
}
