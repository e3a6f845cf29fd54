//go:build vmguest

package bpf

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// The former qdiscs are restored, whether the daemon ends, is killed, or is killed while it
// attaches.
func TestVMQueue_Restored(t *testing.T) {
	a := shaper.Attachment{Name: "here", Interfaces: []string{"restore"}, Mode: shaper.AttachShape, Queue: 5000, OnStop: shaper.StopKeep}
	apply := func(_ *testing.T, p *testPlane) { p.apply(nil, a) }
	detach := func(t *testing.T, p *testPlane) {
		p.crash()
		must(t, Detach(p.pins))
	}
	end := func(t *testing.T, p *testPlane) {
		a := a
		a.OnStop = shaper.StopOpen
		p.apply(nil, a)
		must(t, p.Close())
	}
	for _, c := range []struct {
		name        string
		queues      int
		lines       []string
		attach, end func(*testing.T, *testPlane)
	}{
		{"cake, the daemon ends", 1, []string{"qdisc replace root handle 7: cake bandwidth 77mbit diffserv4 nat overhead 7"}, apply, end},
		{"fq, it is killed", 1, []string{"qdisc replace root handle 7: fq limit 777 flow_limit 77 buckets 512 maxrate 100mbit"}, apply, detach},
		{"fq_codel, it is killed and started", 1, []string{"qdisc replace root handle 7: fq_codel limit 777 flows 77 target 7ms interval 70ms ecn ce_threshold 77us"}, apply, func(t *testing.T, p *testPlane) {
			p.crash()
			p.open()
			end(t, p)
		}},
		{"mq, it is killed as it attaches", 2, []string{"qdisc replace root handle 7: mq", "qdisc replace parent 7:1 handle 8: codel target 9ms", "qdisc replace parent 7:2 handle 9: tbf rate 20mbit burst 20k latency 70ms"}, func(t *testing.T, p *testPlane) {
			policy, err := p.shaper.Compile(nil, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
			must(t, err)
			c, err := p.Prepare([]shaper.Attachment{a}, nil, policy)
			must(t, err)
			for _, pt := range c.added {
				pt.release()
			}
			p.changeMu.Unlock()
		}, func(t *testing.T, p *testPlane) {
			p.Release()
			must(t, Detach(p.pins))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newDevice(t, "restore", c.queues)
			tc(t, l, c.lines...)
			before := qdiscsOf(t, l)
			p := openPlane(t)
			c.attach(t, p)
			must(t, queueFor(&a).Check(l))
			c.end(t, p)
			p.Plane = nil
			wantQdiscs(t, l, before)
			assertNoTrace(t, l, p.pins)
		})
	}
}

// A queue that another tool replaces is repaired, and nothing else changes. At the end the
// other tool's qdisc is restored.
func TestVMQueue_Repaired(t *testing.T) {
	l := newDevice(t, "repaired", 2)
	p := openPlane(t)
	a := shaper.Attachment{Name: "here", Interfaces: []string{"repaired"}, Mode: shaper.AttachShape, Queue: 5000}
	p.apply(nil, a)
	at := attach.Point{Ifindex: l.Attrs().Index}
	attached := p.points[at].limiter
	for _, lines := range [][]string{
		{"qdisc replace parent 5ad:2 handle 8: pfifo limit 77"},
		{"qdisc replace root handle 7: tbf rate 20mbit burst 20k latency 70ms"},
	} {
		tc(t, l, lines...)
		if err := queueFor(&a).Check(l); !errors.Is(err, attach.ErrQueueChanged) {
			t.Errorf("%v, want %v", err, attach.ErrQueueChanged)
		}
		within(t, 5*time.Second, func() bool { return queueFor(&a).Check(l) == nil })
	}
	p.mu.Lock()
	if p.points[at].limiter != attached {
		t.Error("the program was attached again")
	}
	p.mu.Unlock()
	must(t, p.Close())
	p.Plane = nil
	if root := qdiscsOf(t, l)[0]; root.Kind != "tbf" || root.Handle != 7<<16 {
		t.Errorf("%+v: want tbf", root)
	}
}

// After a change of mode or hook the queue exists exactly where it is needed.
func TestVMQueue_ModeAndHookChange(t *testing.T) {
	l := newDevice(t, "change", 2)
	tc(t, l, "qdisc replace root handle 7: fq_codel limit 777")
	before := qdiscsOf(t, l)
	p := openPlane(t)
	at := shaper.Attachment{Name: "here", Interfaces: []string{"change"}, Queue: 5000}
	there := at
	there.Name = "there"
	for _, c := range []struct {
		a    shaper.Attachment
		mode shaper.AttachMode
		hook shaper.Hook
	}{{at, shaper.AttachShape, shaper.HookAuto}, {at, shaper.AttachShape, shaper.HookClsact}, {there, shaper.AttachShape, shaper.HookClsact}, {at, shaper.AttachPolice, shaper.HookClsact}, {at, shaper.AttachShape, shaper.HookClsact}, {at, shaper.AttachPolice, shaper.HookAuto}} {
		a := c.a
		a.Mode, a.Hook = c.mode, c.hook
		p.apply(nil, a)
		p.mu.Lock()
		must(t, p.points[attach.Point{Ifindex: l.Attrs().Index}].limiter.Check())
		p.mu.Unlock()
		if a.Shapes() {
			must(t, queueFor(&a).Check(l))
		} else {
			all := qdiscsOf(t, l)
			if root := all[0]; root.Kind != "fq_codel" {
				t.Errorf("%+v: want the former qdisc", root)
			}
		}
	}
	must(t, p.Close())
	p.Plane = nil
	wantQdiscs(t, l, before)
	assertNoTrace(t, l, p.pins)
}

// After a change of mode or hook at ingress the redirect exists exactly if it is needed.
func TestVMRedirect_ModeAndHookChange(t *testing.T) {
	l := newDevice(t, "redirect", 2)
	p := openPlane(t)
	for _, c := range []struct {
		mode shaper.AttachMode
		hook shaper.Hook
	}{{shaper.AttachShape, shaper.HookAuto}, {shaper.AttachShape, shaper.HookClsact}, {shaper.AttachPolice, shaper.HookClsact}, {shaper.AttachShape, shaper.HookAuto}} {
		p.apply(nil, shaper.Attachment{Name: "here", Interfaces: []string{"redirect"}, Direction: shaper.Ingress, Mode: c.mode, Hook: c.hook, Queue: 5000})
		if err := attach.CheckRedirect(l); (err == nil) != (c.mode == shaper.AttachShape) {
			t.Errorf("%v by %v: %v", c.mode, c.hook, err)
		}
	}
	must(t, p.Close())
	p.Plane = nil
	if _, err := netlink.LinkByName(attach.IFBName(l.Attrs().Index)); !errors.As(err, new(netlink.LinkNotFoundError)) {
		t.Errorf("the IFB: %v", err)
	}
	assertNoTrace(t, l, p.pins)
	if present, err := attach.HasClsact(l); err != nil || present {
		t.Errorf("clsact is present: %v, %v", present, err)
	}
}

// Filters of a qdisc cannot be restored.
func TestVMCapture_FiltersUnsupported(t *testing.T) {
	p := openPlane(t)
	for _, handle := range []string{"", "handle 7: "} {
		l := newDevice(t, "filters", 1)
		tc(t, l, "qdisc replace root "+handle+"fq_codel", "filter add protocol all prio 1 u32 match u8 0 0 flowid :1")
		err := p.tryApply(nil, shaper.Attachment{Name: "here", Interfaces: []string{"filters"}, Mode: shaper.AttachShape, Queue: 5000})
		if err == nil || !strings.Contains(err.Error(), "filters has a qdisc fq_codel with filters, which") {
			t.Errorf("%v, want a refusal", err)
		}
		must(t, netlink.LinkDel(l))
	}
}
