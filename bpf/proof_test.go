package bpf

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd/shaper"
)

// attachOther puts another program of tcx at an interface, in front of all others, which ends
// the way of packets there as Cilium's does (TCX_PASS).
func attachOther(t *testing.T, l netlink.Link, at ebpf.AttachType) link.Link {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "passes_all", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	other, err := link.AttachTCX(link.TCXOptions{Interface: l.Attrs().Index, Program: prog, Attach: at, Anchor: link.Head()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	return other
}

// statusOf returns the status of the one attachment there is.
func (p *testPlane) point() PointStatus {
	p.t.Helper()
	s, err := p.Status()
	if err != nil || len(s.Points) != 1 {
		p.t.Fatalf("%+v, %v", s.Points, err)
	}
	return s.Points[0]
}

// TestBehindAnother attaches where a program of tcx stands that lets nothing through to
// others: the limits hold nevertheless. One that comes later and goes first is found out.
func TestBehindAnother(t *testing.T) {
	if !hasTCX(t) {
		return // its guest has no tcx, and nobody is before anybody
	}
	for _, ingress := range []bool{true, false} {
		t.Run(way(ingress), func(t *testing.T) {
			w := newWire(t, "behind")
			at, l := ebpf.AttachTCXEgress, w.from
			if ingress {
				at, l = ebpf.AttachTCXIngress, w.to
			}
			attachOther(t, l, at)
			p := openPlane(t)
			a := Attachment{Name: "here", Interfaces: []string{l.Attrs().Name}, Ingress: ingress, Mode: Police}
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 50, 10)
			if s := p.point(); s.Err != "" || s.Bypass != "" || len(s.Before) != 0 {
				t.Errorf("%+v: want it enforced", s)
			}
			if all, err := FindForeign(p.pins, []Attachment{a}); err != nil || len(all) != 0 {
				t.Errorf("%+v, %v: want nothing before it", all, err)
			}
			other := attachOther(t, l, at)
			p.check(true)
			w.want(p, 1, 100, 100)
			p.check(true)
			if s := p.point(); !strings.Contains(s.Bypass, "passes_all") || len(s.Before) != 1 {
				t.Errorf("%+v: want it to tell who is before it", s)
			}
			if all, err := FindForeign(p.pins, []Attachment{a}); err != nil || len(all) != 1 || !strings.Contains(all[0].What, "passes_all") || all[0].Refuses {
				t.Errorf("%+v, %v: want the one that is before it", all, err)
			}
			if err := other.Close(); err != nil {
				t.Fatal(err)
			}
			for source := range byte(7) { // what is refused at egress the interface has not moved
				w.want(p, 2+source, 10, 10)
			}
			p.check(true)
			if s := p.point(); s.Bypass != "" || len(s.Before) != 0 {
				t.Errorf("%+v: want it enforced", s)
			}
		})
	}
}

// TestPastTheHooks sends by a socket that passes by all hooks of egress.
func TestPastTheHooks(t *testing.T) {
	w := newWire(t, "past")
	p := openPlane(t)
	p.apply([]shaper.Limit{tenAnHour("here")}, Attachment{Name: "here", Interfaces: []string{"past0"}, Mode: Police})
	w.want(p, 1, 50, 10)
	if err := unix.SetsockoptInt(w.out, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
		t.Fatal(err)
	}
	p.check(true)
	w.want(p, 1, 100, 100)
	p.check(true)
	if s := p.point(); !strings.Contains(s.Bypass, "PACKET_QDISC_BYPASS") {
		t.Errorf("%+v: want it to tell", s)
	}
}

// TestProofBegins begins while packets wait that were seen, as far as they are known to.
func TestProofBegins(t *testing.T) {
	for ahead, want := range map[uint64]uint64{900: 0, 890: 10, 0: 900} {
		var f proof
		f.begin(5000, 6000, ahead)
		if missed, of, proved := f.look(5900, 6000, 10240); missed != want || of != 900 || !proved {
			t.Errorf("%d waited: %d of %d missed, want %d", ahead, missed, of, want)
		}
	}
}

// TestProof holds counts against each other as they may come.
func TestProof(t *testing.T) {
	type step struct{ moved, seen uint64 } // more of them
	for _, c := range []struct {
		name  string
		room  uint64
		steps []step
		want  string // of each step: proved or not, enforced or not
	}{
		{"all is seen", 0, []step{{1000, 1000}, {1000, 1001}, {1000, 999}}, "+++"},
		{"what is refused at ingress is seen", 0, []step{{1000, 1000}, {5, 5}}, "+."},
		{"nothing is seen", 0, []step{{1000, 0}, {1000, 0}}, "--"},
		{"a tenth is not seen", 0, []step{{1000, 900}, {1000, 900}}, "--"},
		{"it comes back", 0, []step{{1000, 0}, {1000, 1000}}, "-+"},
		{"a card that counts late", 0, []step{{0, 1000}, {1000, 1000}, {1000, 0}}, ".++"},
		{"trains", 0, []step{{100, 4000}, {100, 4000}}, "++"},
		{"but not for ever", 0, []step{{100, 4000}, {100, 4000}, {4100, 0}, {100, 0}}, "++" + "+-"},
		{"a queue drains", 10240, []step{{100, 2000}, {100, 0}, {100, 0}, {100, 0}}, "++++"},
		{"little", 0, []step{{20, 0}, {20, 0}, {20, 0}, {20, 0}}, "...-"},
		{"too little", 0, []step{{10, 0}, {10, 0}, {10, 0}, {10, 0}, {10, 0}, {10, 0}, {10, 0}}, "......."},
		{"begun again", 0, []step{{1000, 1000}, {^uint64(0) - 900, 0}, {1000, 1000}}, "+.+"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var f proof
			moved, seen := uint64(5000), uint64(7)
			if _, _, proved := f.look(moved, seen, c.room); proved {
				t.Error("the first look proves something")
			}
			got := ""
			for _, s := range c.steps {
				moved, seen = moved+s.moved, seen+s.seen
				missed, of, proved := f.look(moved, seen, c.room)
				switch {
				case !proved:
					got += "."
				case bypass(missed, of, nil) != nil:
					got += "-"
				default:
					got += "+"
				}
			}
			if got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}
