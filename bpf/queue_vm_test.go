//go:build vmguest

package bpf

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"shaperd/shaper"
)

// What stood at an interface is back, whether the daemon ends, is killed, or is killed
// while it attaches.
func TestVMQueueIsRestored(t *testing.T) {
	a := Attachment{Name: "here", Interfaces: []string{"restore"}, Mode: Shape, Queue: 5000, Keep: true}
	apply := func(_ *testing.T, p *testPlane) { p.apply(nil, a) }
	detach := func(t *testing.T, p *testPlane) {
		p.crash()
		must(t, Detach(p.pins))
	}
	end := func(t *testing.T, p *testPlane) {
		a := a
		a.Keep = false
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
			c, err := p.Prepare([]Attachment{a}, nil, policy)
			must(t, err)
			for _, pt := range c.added {
				pt.letGo()
			}
			p.changing.Unlock()
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
			must(t, checkQueue(l, a.queue()))
			c.end(t, p)
			p.Plane = nil
			wantQdiscs(t, l, before)
			assertNothing(t, l, p.pins)
		})
	}
}

// A queue that somebody replaces is mended, and nothing else is touched. What they put
// there is what comes back.
func TestVMQueueIsMended(t *testing.T) {
	l := newDevice(t, "mended", 2)
	p := openPlane(t)
	a := Attachment{Name: "here", Interfaces: []string{"mended"}, Mode: Shape, Queue: 5000}
	p.apply(nil, a)
	at := side{ifindex: l.Attrs().Index}
	attached := p.points[at].hook
	for _, lines := range [][]string{
		{"qdisc replace parent 5ad:2 handle 8: pfifo limit 77"},
		{"qdisc replace root handle 7: tbf rate 20mbit burst 20k latency 70ms"},
	} {
		tc(t, l, lines...)
		if err := checkQueue(l, a.queue()); !errors.Is(err, errQueue) {
			t.Errorf("%v, want %v", err, errQueue)
		}
		within(t, 5*time.Second, func() bool { return checkQueue(l, a.queue()) == nil })
	}
	p.mu.Lock()
	if p.points[at].hook != attached {
		t.Error("it has been attached again")
	}
	p.mu.Unlock()
	must(t, p.Close())
	p.Plane = nil
	if root := rootOf(qdiscsOf(t, l)); root.Kind != "tbf" || root.Handle != 7<<16 {
		t.Errorf("%+v: want tbf", root)
	}
}

// Another mode or hook leaves the queue where it is needed.
func TestVMQueueOutlivesChange(t *testing.T) {
	l := newDevice(t, "change", 2)
	tc(t, l, "qdisc replace root handle 7: fq_codel limit 777")
	before := qdiscsOf(t, l)
	p := openPlane(t)
	at := Attachment{Name: "here", Interfaces: []string{"change"}, Queue: 5000}
	there := at
	there.Name = "there"
	for _, c := range []struct {
		a    Attachment
		mode Mode
		hook Hook
	}{{at, Shape, Auto}, {at, Shape, Clsact}, {there, Shape, Clsact}, {at, Police, Clsact}, {at, Shape, Clsact}, {at, Police, Auto}} {
		a := c.a
		a.Mode, a.Hook = c.mode, c.hook
		p.apply(nil, a)
		p.mu.Lock()
		must(t, p.points[side{ifindex: l.Attrs().Index}].hook.check())
		p.mu.Unlock()
		if a.Mode == Shape {
			must(t, checkQueue(l, a.queue()))
		} else {
			all := qdiscsOf(t, l)
			if root := rootOf(all); root.Kind != "fq_codel" {
				t.Errorf("%+v: want what stood there", root)
			}
		}
	}
	must(t, p.Close())
	p.Plane = nil
	wantQdiscs(t, l, before)
	assertNothing(t, l, p.pins)
}

// The same at ingress: the detour is there while it is needed.
func TestVMDetourOutlivesChange(t *testing.T) {
	l := newDevice(t, "detour", 2)
	p := openPlane(t)
	for _, c := range []struct {
		mode Mode
		hook Hook
	}{{Shape, Auto}, {Shape, Clsact}, {Police, Clsact}, {Shape, Auto}} {
		p.apply(nil, Attachment{Name: "here", Interfaces: []string{"detour"}, Ingress: true, Mode: c.mode, Hook: c.hook, Queue: 5000})
		if err := checkDetour(l); (err == nil) != (c.mode == Shape) {
			t.Errorf("%v by %v: %v", c.mode, c.hook, err)
		}
	}
	must(t, p.Close())
	p.Plane = nil
	if _, err := netlink.LinkByName(ifbName(l.Attrs().Index)); !errors.As(err, new(netlink.LinkNotFoundError)) {
		t.Errorf("the device of the detour: %v", err)
	}
	assertNothing(t, l, p.pins)
	if present, err := clsactOf(l); err != nil || present != nil {
		t.Errorf("%+v, %v: want no clsact", present, err)
	}
}

// Filters of a discipline cannot be put back.
func TestVMFiltersAreRefused(t *testing.T) {
	p := openPlane(t)
	for _, handle := range []string{"", "handle 7: "} {
		l := newDevice(t, "filters", 1)
		tc(t, l, "qdisc replace root "+handle+"fq_codel", "filter add protocol all prio 1 u32 match u8 0 0 flowid :1")
		err := p.tryApply(nil, Attachment{Name: "here", Interfaces: []string{"filters"}, Mode: Shape, Queue: 5000})
		if err == nil || !strings.Contains(err.Error(), "filters has a qdisc fq_codel with filters of its own, which") {
			t.Errorf("%v, want a refusal", err)
		}
		must(t, netlink.LinkDel(l))
	}
}
