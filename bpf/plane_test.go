package bpf

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/shaper"
)

// TestCommit_RegistryFull commits a policy that does not fit into the registry: it becomes active,
// and the fault is reported.
func TestCommit_RegistryFull(t *testing.T) {
	p := openPlane(t)
	here := shaper.Attachment{Name: "here", Interfaces: []string{"elsewhere0"}, Mode: shaper.AttachPolice}
	a, b := shaper.Limit{Name: "a", Packets: perSecond(1)}, shaper.Limit{Name: "b", Packets: perSecond(1)}
	p.apply(attachHere(a), here)
	text, err := json.Marshal(p.kernel.registry)
	if err != nil {
		t.Fatal(err)
	}
	filler, err := json.Marshal(&knownLimit{Number: 99})
	if err != nil {
		t.Fatal(err)
	}
	room := int(registrySpec.ValueSize) - len(text) - len(filler) - 40 // less than the size of a limit
	p.kernel.Limits[strings.Repeat("x", room)] = &knownLimit{Number: 99}
	p.apply(attachHere(a, b), here)
	if p.policy.Len() != 2 || p.faults["registry"] == "" {
		t.Errorf("%d limits are active, and the registry's fault is %q", p.policy.Len(), p.faults["registry"])
	}
}

func TestPlane_Police(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		hook    shaper.Hook
		ingress bool
	}{{shaper.HookAuto, false}, {shaper.HookAuto, true}, {shaper.HookTCX, false}, {shaper.HookTCX, true}, {shaper.HookClsact, false}, {shaper.HookClsact, true}, {shaper.HookXDP, true}} {
		t.Run(c.hook.String()+" "+direction(c.ingress).String(), func(t *testing.T) {
			w := newWire(t, "police")
			p := openPlane(t)
			if c.hook == shaper.HookTCX && !hasTCX(t) {
				err := p.tryApply(nil, shaper.Attachment{Name: "here", Interfaces: []string{"police0"}, Mode: shaper.AttachPolice, Hook: shaper.HookTCX})
				if !errors.Is(err, ebpf.ErrNotSupported) {
					t.Fatalf("%v, want ErrNotSupported", err)
				}
				return
			}
			a := shaper.Attachment{Name: "here", Interfaces: []string{"police0"}, Direction: direction(c.ingress), Mode: shaper.AttachPolice, Hook: c.hook}
			if c.ingress {
				a.Interfaces = []string{"police1"}
			}
			w.want(p, 1, 50, 50)
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 50, 10)
			w.want(p, 2, 50, 10)
			w.want(p, 1, 50, 0)
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			p.Plane = nil
			w.want(p, 1, 50, 50)
			if left, err := os.ReadDir(p.pins); err == nil && len(left) > 0 {
				t.Errorf("pins are left: %v", left)
			}
		})
	}
}

// A table that is too small is soon reported.
func TestPlane_ReportsFullTable(t *testing.T) {
	t.Parallel()
	w := newWire(t, "full")
	p := &testPlane{t: t, keys: 4, pins: filepath.Join(pins, "NoRoomForBuckets")}
	p.open()
	t.Cleanup(func() { _ = p.Close() })
	p.apply([]shaper.Limit{tenAnHour("here")}, shaper.Attachment{Name: "here", Interfaces: []string{"full0"}, Mode: shaper.AttachPolice})
	for source := range byte(40) {
		w.send(1+source, 20)
	}
	within(t, 15*time.Second, func() bool { return strings.Contains(p.logged.String(), `raise \"max_buckets\"`) })
	if s, err := p.Status(); err != nil || s.Buckets.EvictedBacklogged == 0 {
		t.Errorf("%+v, %v", s, err)
	}
}

// A changed rate keeps the backlog in packets.
func TestCommit_RateChangeKeepsBacklog(t *testing.T) {
	w := newWire(t, "reload")
	p := openPlane(t)
	a := shaper.Attachment{Name: "here", Interfaces: []string{"reload1"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice}
	l := tenAnHour("here")
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 5, 5)
	l.Packets.N = 20 // the backlog in packets, and so the unused burst, stays
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 20, 5)
	l.Name = "another" // is another limit
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 20, 10)
	l.Name = "ten"
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 20, 0)
}
