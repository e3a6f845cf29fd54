package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// The programs of a killed daemon stay enforced, or pass everything without Keep, and the
// next daemon takes over with all buckets.
func TestTakeover_AfterKill(t *testing.T) {
	t.Parallel()
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			w := newWire(t, "killed")
			p := openPlane(t)
			a := shaper.Attachment{Name: "here", Interfaces: []string{"killed1"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: hook, OnStop: shaper.StopKeep}
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 10)
			p.crash()
			w.want(p, 1, 20, 0)
			w.want(p, 2, 20, 10)
			p.open()
			w.want(p, 2, 20, 0)
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 0)
			w.want(p, 3, 20, 10)

			a.OnStop = shaper.StopOpen
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 0)
			p.crash()
			w.want(p, 1, 20, 0)
			expireHeartbeat(t, p)
			w.want(p, 1, 20, 20)
			if err := Detach(p.pins); err != nil {
				t.Fatal(err)
			}
			p.Plane = nil
			w.want(p, 1, 20, 20)
			assertNoTrace(t, w.to, p.pins)
		})
	}
}

// expireHeartbeat makes the last heartbeat too old.
func expireHeartbeat(t *testing.T, p *testPlane) {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(pinDir(p.pins, 1024), kernelMapHeartbeats), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Put(uint32(0), uint64(1)); err != nil {
		t.Fatal(err)
	}
	within(t, 10*time.Second, func() bool { return monotonic() > 6*leaky.Second }) // if the host has just booted
}

// assertNoTrace asserts that no trace is left. The kernel releases pinned objects some time
// after the file is gone.
func assertNoTrace(t *testing.T, l netlink.Link, pins string) {
	t.Helper()
	if _, err := os.Stat(pins); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pins are left: %v", err)
	}
	left := leftAt(t, l)
	for end := time.Now().Add(10 * time.Second); len(left) > 0 && time.Now().Before(end); left = leftAt(t, l) {
		time.Sleep(10 * time.Millisecond)
	}
	if len(left) > 0 {
		t.Errorf("at %s are left: %v", l.Attrs().Name, left)
	}
}

// leftAt lists the programs and filters at an interface.
func leftAt(t *testing.T, l netlink.Link) (left []string) {
	t.Helper()
	for _, kind := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress, ebpf.AttachXDP} {
		q, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: kind})
		if err == nil && len(q.Programs) > 0 {
			left = append(left, kind.String())
		}
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		if filters, err := netlink.FilterList(l, parent); err == nil && len(filters) > 0 {
			left = append(left, fmt.Sprint(filters))
		}
	}
	now, err := netlink.LinkByIndex(l.Attrs().Index)
	if err != nil {
		t.Fatal(err)
	}
	if now.Attrs().Xdp != nil && now.Attrs().Xdp.Attached {
		left = append(left, "XDP")
	}
	return left
}

// Programs that another tool removes are attached again soon, and so are interfaces that reappear.
func TestPlane_ReattachesAfterRemoval(t *testing.T) {
	t.Parallel()
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			w := newWire(t, "reattach")
			p := openPlane(t)
			a := shaper.Attachment{Name: "here", Interfaces: []string{"reattach*"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: hook}
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 10)
			removeProgram(t, w.to, hook)
			w.want(p, 1, 20, 20)
			within(t, 15*time.Second, func() bool { return w.send(1, 20) == 0 })

			if err := netlink.LinkDel(w.from); err != nil {
				t.Fatal(err)
			}
			again := newWire(t, "reattach")
			within(t, 15*time.Second, func() bool { return again.send(1, 20) == 0 })
		})
	}
}

// removeProgram removes the program of an interface as another tool would.
func removeProgram(t *testing.T, l netlink.Link, hook shaper.Hook) {
	t.Helper()
	switch hook {
	case shaper.HookClsact:
		if err := netlink.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		}}); err != nil {
			t.Fatal(err)
		}
	default:
		it := new(link.Iterator)
		defer it.Close()
		for it.Next() {
			raw, ok := it.Take().(interface {
				Info() (*link.Info, error)
				Detach() error
			})
			if !ok {
				t.Fatal("this link cannot be detached")
			}
			info, err := raw.Info()
			if err != nil {
				t.Fatal(err)
			}
			tcx, xdp := info.TCX(), info.XDP()
			if tcx != nil && tcx.Ifindex == uint32(l.Attrs().Index) || xdp != nil && xdp.Ifindex == uint32(l.Attrs().Index) {
				if err := raw.Detach(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// A daemon with another table size takes over the attachments, and removes the old
// maps.
func TestTakeover_OtherTableSize(t *testing.T) {
	t.Parallel()
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			w := newWire(t, "size")
			p := openPlane(t)
			a := shaper.Attachment{Name: "here", Interfaces: []string{"size1"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: hook, OnStop: shaper.StopKeep}
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 10)
			p.crash()
			p.keys = 4096
			p.open()
			w.want(p, 1, 20, 0) // still by the old table
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 10)
			if dirs, err := filepath.Glob(filepath.Join(p.pins, "*")); err != nil || len(dirs) != 1 {
				t.Errorf("%v, %v: want one directory", dirs, err)
			}
			p.crash()
			w.want(p, 1, 20, 0)
			if err := Detach(p.pins); err != nil {
				t.Fatal(err)
			}
			p.Plane = nil
			assertNoTrace(t, w.to, p.pins)
		})
	}
}

// TestTakeover_ReplacesSweeper has daemons take over from one another: the sweeper runs a program of
// the last one, and nothing is left of the others.
func TestTakeover_ReplacesSweeper(t *testing.T) {
	b, _, _ := newRouter(t)
	a := shaper.Attachment{Name: "here", Interfaces: []string{"inside"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, OnStop: shaper.StopKeep, IdleTimeout: time.Hour}
	b.testPlane = openPlane(t)
	b.to.do(func() error { b.listen(false, netip.AddrPortFrom(b.any, 80)); return nil })
	limits := []shaper.Limit{{Name: "cap", Match: shaper.Match{Attach: []string{"here"}}, MaxConnections: 100}}
	var ids []ebpf.ProgramID
	for range 3 {
		b.apply(limits, a)
		for _, programs := range b.programs {
			info, err := programs.limit.Info()
			if err != nil {
				t.Fatal(err)
			}
			id, _ := info.ID()
			ids = append(ids, id)
		}
		b.wantAt(hostPort(b.server, 80), 1, 1)
		b.crash()
		b.open()
	}
	last := ids[len(ids)-1]
	within(t, 10*time.Second, func() bool {
		left := slices.DeleteFunc(slices.Clone(ids), func(id ebpf.ProgramID) bool {
			p, err := ebpf.NewProgramFromID(id)
			if err == nil {
				_ = p.Close()
			}
			return err != nil
		})
		return len(ids) == 3 && slices.Equal(left, []ebpf.ProgramID{last})
	})
}
