package bpf

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/shaper"
)

// TestStatus_MissingInterfaces has attachments without interfaces: an unmatched pattern is no error, but a
// named interface that is missing is one, also if another one exists. An interface that appears and
// cannot be attached to is reported with the reason.
func TestStatus_MissingInterfaces(t *testing.T) {
	t.Parallel()
	w := newWire(t, "ab")
	p := openPlane(t)
	p.apply(nil,
		shaper.Attachment{Name: "named", Interfaces: []string{w.to.Attrs().Name, "nowhere0"}, Mode: shaper.AttachPolice},
		shaper.Attachment{Name: "tunnels", Interfaces: []string{"abwg*"}, Mode: shaper.AttachPolice, Hook: shaper.HookClsact})
	want := func(points ...PointStatus) {
		t.Helper()
		var got []PointStatus
		for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			s, err := p.Status()
			if err != nil {
				t.Fatal(err)
			}
			got = nil
			for _, pt := range s.Points {
				got = append(got, PointStatus{Attachment: pt.Attachment, Interface: pt.Interface, Err: pt.Err, UnmatchedPatterns: pt.UnmatchedPatterns})
			}
			if slices.EqualFunc(got, points, func(a, b PointStatus) bool {
				return a.Attachment == b.Attachment && a.Interface == b.Interface && a.UnmatchedPatterns == b.UnmatchedPatterns &&
					(a.Err == "") == (b.Err == "") && strings.Contains(a.Err, b.Err)
			}) {
				return
			}
		}
		t.Fatalf("attachments are %+v\nwant %+v", got, points)
	}
	missing, there := PointStatus{Attachment: "named", Err: "missing interface nowhere0"}, PointStatus{Attachment: "named", Interface: "ab1"}
	want(missing, there, PointStatus{Attachment: "tunnels", UnmatchedPatterns: "abwg*"})
	p.checkInterfaces(true)
	want(missing, there, PointStatus{Attachment: "tunnels", UnmatchedPatterns: "abwg*"})
	if text := p.logged.String(); strings.Contains(text, "abwg") || !strings.Contains(text, "missing interface nowhere0") {
		t.Errorf("it logs\n%s", text)
	}

	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "abtemp"}, PeerName: "abpeer"}); err != nil {
		t.Fatal(err)
	}
	spoiled, err := netlink.LinkByName("abtemp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(spoiled) })
	// The older qdisc takes no egress filters.
	if err := netlink.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: spoiled.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS,
	}}); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetName(spoiled, "abwg1"); err != nil {
		t.Fatal(err)
	}
	failed := PointStatus{Attachment: "tunnels", Interface: "abwg1", Err: "the qdisc ingress occupies its place"}
	want(missing, there, failed)
	if err := netlink.LinkDel(spoiled); err != nil {
		t.Fatal(err)
	}
	want(missing, there, PointStatus{Attachment: "tunnels", UnmatchedPatterns: "abwg*"})
	if n := len(p.faults); n != 1 { // of the missing interface
		t.Errorf("%d faults, want one: %v", n, p.faults)
	}
}

// TestRepair_InterfaceRemoved removes an interface just after all were listed: that is not reported as
// a detached program.
func TestRepair_InterfaceRemoved(t *testing.T) {
	w := newWire(t, "am")
	p := openPlane(t)
	p.apply(nil, shaper.Attachment{Name: "here", Interfaces: []string{w.from.Attrs().Name}, Mode: shaper.AttachPolice})
	p.changeMu.Lock()
	defer p.changeMu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	wanted, err := wantedPoints(p.attachments)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkDel(w.from); err != nil {
		t.Fatal(err)
	}
	for key, pt := range p.points {
		p.repair(pt, wanted[key])
	}
	text := p.logged.String()
	if !strings.Contains(text, `"interface removed" attachment=here interface=am0`) || strings.Contains(text, "ERROR") {
		t.Errorf("it logs\n%s", text)
	}
	if len(p.points) != 0 || len(p.faults) != 0 {
		t.Errorf("%d points, and faults %v", len(p.points), p.faults)
	}
}
