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

	"shaperd/shaper"
)

// TestCommitUnsaved puts a policy in force that the registry has no room for: it is in
// force, and the fault is shown.
func TestCommitUnsaved(t *testing.T) {
	p := openPlane(t)
	here := Attachment{Name: "here", Interfaces: []string{"elsewhere0"}, Mode: Police}
	a, b := shaper.Limit{Name: "a", Packets: perSecond(1)}, shaper.Limit{Name: "b", Packets: perSecond(1)}
	p.apply(attached(a), here)
	text, err := json.Marshal(p.kernel.registry)
	if err != nil {
		t.Fatal(err)
	}
	filler, err := json.Marshal(&knownLimit{Number: 99})
	if err != nil {
		t.Fatal(err)
	}
	room := int(registrySpec.ValueSize) - len(text) - len(filler) - 40 // less than a limit takes
	p.kernel.Limits[strings.Repeat("x", room)] = &knownLimit{Number: 99}
	p.apply(attached(a, b), here)
	if p.policy.Len() != 2 || p.faults["registry"] == "" {
		t.Errorf("%d limits are in force, and the registry's fault is %q", p.policy.Len(), p.faults["registry"])
	}
}

func TestPolice(t *testing.T) {
	for _, c := range []struct {
		hook    Hook
		ingress bool
	}{{Auto, false}, {Auto, true}, {TCX, false}, {TCX, true}, {Clsact, false}, {Clsact, true}, {XDP, true}} {
		t.Run(c.hook.String()+" "+way(c.ingress), func(t *testing.T) {
			w := newWire(t, "police")
			p := openPlane(t)
			if c.hook == TCX && !hasTCX(t) {
				err := p.tryApply(nil, Attachment{Name: "here", Interfaces: []string{"police0"}, Mode: Police, Hook: TCX})
				if !errors.Is(err, ebpf.ErrNotSupported) {
					t.Fatalf("%v, want that it is not supported", err)
				}
				return
			}
			a := Attachment{Name: "here", Interfaces: []string{"police0"}, Ingress: c.ingress, Mode: Police, Hook: c.hook}
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

// A table that is too small is said to be so, soon.
func TestNoRoomForBuckets(t *testing.T) {
	w := newWire(t, "full")
	p := &testPlane{t: t, keys: 4, pins: filepath.Join(pins, "NoRoomForBuckets")}
	p.open()
	t.Cleanup(func() { _ = p.Close() })
	p.apply([]shaper.Limit{tenAnHour("here")}, Attachment{Name: "here", Interfaces: []string{"full0"}, Mode: Police})
	for source := range byte(40) {
		w.send(1+source, 20)
	}
	within(t, 15*time.Second, func() bool { return strings.Contains(p.logged.String(), `raise \"buckets\"`) })
	if s, err := p.Status(); err != nil || s.Buckets.EvictedIndebted == 0 {
		t.Errorf("%+v, %v", s, err)
	}
}

// A changed rate keeps the backlog in packets.
func TestReloadKeepsBacklog(t *testing.T) {
	w := newWire(t, "reload")
	p := openPlane(t)
	a := Attachment{Name: "here", Interfaces: []string{"reload1"}, Ingress: true, Mode: Police}
	l := tenAnHour("here")
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 5, 5)
	l.Packets.N = 20 // nine in hand at the old rate are nine in hand at the new one
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 20, 5)
	l.Name = "another" // is a limit of its own
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 20, 10)
	l.Name = "ten"
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 20, 0)
}
