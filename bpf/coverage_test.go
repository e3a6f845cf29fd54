package bpf

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// attachOther attaches a foreign tcx program before all others, which consumes packets as
// Cilium's does (TCX_PASS).
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

// point returns the status of the only point.
func (p *testPlane) point() PointStatus {
	p.t.Helper()
	s, err := p.Status()
	if err != nil || len(s.Points) != 1 {
		p.t.Fatalf("%+v, %v", s.Points, err)
	}
	return s.Points[0]
}

// TestCoverage_ForeignProgramFirst attaches next to a foreign tcx program that passes nothing on to
// others: the limits are enforced nevertheless. A program attached later, before ours, is detected.
func TestCoverage_ForeignProgramFirst(t *testing.T) {
	t.Parallel()
	if !hasTCX(t) {
		return // no program can come first
	}
	for _, ingress := range []bool{true, false} {
		t.Run(direction(ingress).String(), func(t *testing.T) {
			w := newWire(t, "behind")
			at, l := ebpf.AttachTCXEgress, w.from
			if ingress {
				at, l = ebpf.AttachTCXIngress, w.to
			}
			attachOther(t, l, at)
			p := openPlane(t)
			a := shaper.Attachment{Name: "here", Interfaces: []string{l.Attrs().Name}, Direction: direction(ingress), Mode: shaper.AttachPolice}
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 50, 10)
			if s := p.point(); s.Err != "" || s.Uncovered != "" || len(s.PrecedingPrograms) != 0 {
				t.Errorf("%+v: want it enforced", s)
			}
			if all, err := FindForeign(p.pins, []shaper.Attachment{a}); err != nil || len(all) != 0 {
				t.Errorf("%+v, %v: want nothing before it", all, err)
			}
			other := attachOther(t, l, at)
			p.checkInterfaces(true)
			w.want(p, 1, 100, 100)
			p.checkInterfaces(true)
			if s := p.point(); !strings.Contains(s.Uncovered, "passes_all") || len(s.PrecedingPrograms) != 1 {
				t.Errorf("%+v: want it to name the program before it", s)
			}
			if all, err := FindForeign(p.pins, []shaper.Attachment{a}); err != nil || len(all) != 1 || !strings.Contains(all[0].What, "passes_all") || all[0].Refuses {
				t.Errorf("%+v, %v: want the program before it", all, err)
			}
			if err := other.Close(); err != nil {
				t.Fatal(err)
			}
			for source := range byte(7) { // the interface does not count packets refused at egress
				w.want(p, 2+source, 10, 10)
			}
			p.checkInterfaces(true)
			if s := p.point(); s.Uncovered != "" || len(s.PrecedingPrograms) != 0 {
				t.Errorf("%+v: want it enforced", s)
			}
		})
	}
}

// TestCoverage_QdiscBypass sends from a socket that bypasses all egress hooks.
func TestCoverage_QdiscBypass(t *testing.T) {
	w := newWire(t, "past")
	p := openPlane(t)
	p.apply([]shaper.Limit{tenAnHour("here")}, shaper.Attachment{Name: "here", Interfaces: []string{"past0"}, Mode: shaper.AttachPolice})
	w.want(p, 1, 50, 10)
	if err := unix.SetsockoptInt(w.out, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
		t.Fatal(err)
	}
	p.checkInterfaces(true)
	w.want(p, 1, 100, 100)
	p.checkInterfaces(true)
	if s := p.point(); !strings.Contains(s.Uncovered, "PACKET_QDISC_BYPASS") {
		t.Errorf("%+v: want it to report the bypass", s)
	}
}

// TestCoverage_QueuedAtReset resets while packets that were seen are still queued.
func TestCoverage_QueuedAtReset(t *testing.T) {
	for ahead, want := range map[uint64]uint64{900: 0, 890: 10, 0: 900} {
		var f coverage
		f.reset(5000, 6000, ahead)
		if missed, of, conclusive := f.update(5900, 6000, 10240); missed != want || of != 900 || !conclusive {
			t.Errorf("%d queued: %d of %d missed, want %d", ahead, missed, of, want)
		}
	}
}

// TestCoverage_Update compares sequences of counters.
func TestCoverage_Update(t *testing.T) {
	type step struct{ moved, seen uint64 } // increments
	for _, c := range []struct {
		name  string
		room  uint64
		steps []step
		want  string // for each step: "." inconclusive, "+" enforced, "-" not enforced
	}{
		{"all is seen", 0, []step{{1000, 1000}, {1000, 1001}, {1000, 999}}, "+++"},
		{"packets refused at ingress are seen", 0, []step{{1000, 1000}, {5, 5}}, "+."},
		{"nothing is seen", 0, []step{{1000, 0}, {1000, 0}}, "--"},
		{"a tenth is not seen", 0, []step{{1000, 900}, {1000, 900}}, "--"},
		{"recovers", 0, []step{{1000, 0}, {1000, 1000}}, "-+"},
		{"a card that counts late", 0, []step{{0, 1000}, {1000, 1000}, {1000, 0}}, ".++"},
		{"trains", 0, []step{{100, 4000}, {100, 4000}}, "++"},
		{"trains, but not forever", 0, []step{{100, 4000}, {100, 4000}, {4100, 0}, {100, 0}}, "++" + "+-"},
		{"a queue drains", 10240, []step{{100, 2000}, {100, 0}, {100, 0}, {100, 0}}, "++++"},
		{"little", 0, []step{{20, 0}, {20, 0}, {20, 0}, {20, 0}}, "...-"},
		{"too little", 0, []step{{10, 0}, {10, 0}, {10, 0}, {10, 0}, {10, 0}, {10, 0}, {10, 0}}, "......."},
		{"counters reset", 0, []step{{1000, 1000}, {^uint64(0) - 900, 0}, {1000, 1000}}, "+.+"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var f coverage
			moved, seen := uint64(5000), uint64(7)
			if _, _, conclusive := f.update(moved, seen, c.room); conclusive {
				t.Error("the first reading is conclusive")
			}
			got := ""
			for _, s := range c.steps {
				moved, seen = moved+s.moved, seen+s.seen
				missed, of, conclusive := f.update(moved, seen, c.room)
				switch {
				case !conclusive:
					got += "."
				case coverageError(missed, of, nil) != nil:
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
