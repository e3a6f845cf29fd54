package bpf

import (
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// newDevice creates a veth with the given number of transmit queues. Its peer is called name + "1".
func newDevice(t *testing.T, name string, queues int) netlink.Link {
	t.Helper()
	veth := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: name + "1"}
	veth.Name, veth.NumTxQueues, veth.NumRxQueues = name, queues, queues
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(veth) })
	l, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// tc runs tc commands on a device.
func tc(t *testing.T, l netlink.Link, lines ...string) {
	t.Helper()
	for _, line := range lines {
		object, rest, _ := strings.Cut(line, " ")
		verb, rest, _ := strings.Cut(rest, " ")
		args := append([]string{object, verb, "dev", l.Attrs().Name}, strings.Fields(rest)...)
		if out, err := exec.Command("tc", args...).CombinedOutput(); err != nil {
			t.Fatalf("tc %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

func qdiscsOf(t *testing.T, l netlink.Link) []attach.Qdisc {
	t.Helper()
	all, err := attach.Qdiscs(l)
	if err != nil {
		t.Fatal(err)
	}
	// The kernel returns the root first, and the rest in no order.
	slices.SortFunc(all[min(1, len(all)):], func(a, b attach.Qdisc) int { return int(a.Parent) - int(b.Parent) })
	return all
}

// wantQdiscs asserts that a device has the given qdiscs, byte for byte.
func wantQdiscs(t *testing.T, l netlink.Link, want []attach.Qdisc) {
	t.Helper()
	if diff := cmp.Diff(want, qdiscsOf(t, l), cmpopts.IgnoreUnexported(attach.Qdisc{})); diff != "" {
		t.Errorf("qdiscs (-want +got):\n%s", diff)
	}
}

// addFakeQueue adds a qdisc with the queue's handle, for kernels without sch_fq.
func addFakeQueue(t *testing.T, l netlink.Link) {
	t.Helper()
	kind := "pfifo"
	if l.Attrs().NumTxQueues > 1 {
		kind = "mq"
	}
	tc(t, l, "qdisc replace root handle 5ad: "+kind)
}

func TestRestoreQueue(t *testing.T) {
	for _, c := range []struct {
		name   string
		queues int
		lines  []string
	}{
		{"none", 1, nil},
		{"noqueue", 1, []string{"qdisc replace root handle 7: noqueue"}},
		{"pfifo", 1, []string{"qdisc replace root handle 7: pfifo limit 77"}},
		{"bfifo", 1, []string{"qdisc replace root handle 7: bfifo limit 77777"}},
		{"tbf", 1, []string{"qdisc replace root handle 7: tbf rate 20mbit burst 20k latency 70ms peakrate 30mbit mtu 2000"}},
		{"with clsact", 1, []string{"qdisc replace root handle 7: pfifo limit 77", "qdisc add clsact"}},
		{"none of two queues", 2, nil},
		{"mq", 2, []string{"qdisc replace root handle 7: mq"}},
		{"mq with others", 2, []string{"qdisc replace root handle 7: mq", "qdisc replace parent 7:1 handle 8: pfifo limit 77", "qdisc replace parent 7:2 tbf rate 20mbit burst 20k latency 70ms"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newDevice(t, "former", c.queues)
			tc(t, l, c.lines...)
			before := qdiscsOf(t, l)
			was, err := attach.Capture(l)
			if err != nil {
				t.Fatal(err)
			}
			addFakeQueue(t, l)
			if err := attach.RestoreQueue(l, was); err != nil {
				t.Fatal(err)
			}
			wantQdiscs(t, l, before)
			tc(t, l, "qdisc replace root handle 9: pfifo")
			after := qdiscsOf(t, l)
			if err := attach.RestoreQueue(l, was); err != nil {
				t.Fatal(err)
			}
			wantQdiscs(t, l, after) // it belongs to another tool
		})
	}
}

// Qdiscs that could not be restored are refused, and stay.
func TestCapture_Unsupported(t *testing.T) {
	for _, c := range []struct {
		name, what string
		lines      []string
	}{
		{"htb", "htb", []string{"qdisc replace root handle 7: htb default 1", "class add parent 7: classid 7:1 htb rate 1mbit"}},
		{"below tbf", "htb", []string{"qdisc replace root handle 7: tbf rate 20mbit burst 20k latency 70ms", "qdisc replace parent 7:1 handle 8: htb"}},
		{"size table", "pfifo with a size table", []string{"qdisc replace root handle 7: stab linklayer atm overhead 10 pfifo"}},
		{"below mq", "htb", []string{"qdisc replace root handle 7: mq", "qdisc replace parent 7:2 handle 8: htb"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			queues := 1
			if c.name == "below mq" {
				queues = 2
			}
			l := newDevice(t, "refused", queues)
			tc(t, l, c.lines...)
			before := qdiscsOf(t, l)
			p := openPlane(t)
			err := p.tryApply(nil, shaper.Attachment{Name: "here", Interfaces: []string{"refused"}, Mode: shaper.AttachShape, Queue: 5000})
			want := `attach "here" to refused, egress: refused has a qdisc ` + c.what + `, which mode = "shape" would replace and could not restore: ` +
				`write mode = "police", attach to another interface, or remove it with "tc qdisc del dev refused root"`
			if err == nil || err.Error() != want {
				t.Errorf("got  %v\nwant %s", err, want)
			}
			wantQdiscs(t, l, before)
			p.Release()
			p.Plane = nil
			assertNoTrace(t, l, p.pins)
		})
	}
}

// A daemon is killed at each step of setting up a queue. The next one, or "shaperd detach",
// restores the former qdiscs.
func TestQueueSetup_Killed(t *testing.T) {
	for _, c := range []struct {
		name   string
		making func(t *testing.T, l netlink.Link, p *testPlane)
	}{
		{"before it exists", func(*testing.T, netlink.Link, *testPlane) {}},
		{"before the program is attached", func(t *testing.T, l netlink.Link, _ *testPlane) { addFakeQueue(t, l) }},
		{"at an IFB", func(t *testing.T, l netlink.Link, p *testPlane) {
			err := p.kernel.recordQueue(attach.Point{Ifindex: l.Attrs().Index, Ingress: true}, nil)
			ifb, ifbErr := attach.SetUpIFB(l)
			if err := errors.Join(err, ifbErr); err != nil {
				t.Fatal(err)
			}
			if err := attach.AddRedirect(l, ifb); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		for _, detach := range []bool{false, true} {
			t.Run(c.name+map[bool]string{false: ", started", true: ", detached"}[detach], func(t *testing.T) {
				l := newDevice(t, "killed", 2)
				tc(t, l, "qdisc replace root handle 7: mq", "qdisc replace parent 7:2 handle 8: pfifo limit 77")
				before := qdiscsOf(t, l)
				p := openPlane(t)
				was, err := attach.Capture(l)
				at := savedPoint{Attachment: "here", Ifindex: l.Attrs().Index, Mode: shaper.AttachShape}
				err = errors.Join(err, p.kernel.recordPoint(l, at), p.kernel.recordQueue(attach.Point{Ifindex: l.Attrs().Index}, was))
				if err != nil {
					t.Fatal(err)
				}
				c.making(t, l, p)
				p.Release()
				if detach {
					p.Plane = nil
					if err := Detach(p.pins); err != nil {
						t.Fatal(err)
					}
				} else {
					p.open()
					p.apply(nil)
					if err := p.Close(); err != nil {
						t.Fatal(err)
					}
					p.Plane = nil
				}
				wantQdiscs(t, l, before)
				if _, err := netlink.LinkByName(attach.IFBName(l.Attrs().Index)); !errors.As(err, new(netlink.LinkNotFoundError)) {
					t.Errorf("the IFB: %v", err)
				}
				assertNoTrace(t, l, p.pins)
			})
		}
	}
}

// The former qdiscs are restored when the kernel has no sch_fq, and when the daemon ends.
func TestShape_NoFQ(t *testing.T) {
	no := ProbeShape()
	l := newDevice(t, "nofq", 2)
	tc(t, l, "qdisc replace root handle 7: mq", "qdisc replace parent 7:2 handle 8: pfifo limit 77")
	before := qdiscsOf(t, l)
	p := openPlane(t)
	for _, ingress := range []bool{false, true} {
		a := shaper.Attachment{Name: "here", Interfaces: []string{"nofq"}, Direction: direction(ingress), Mode: shaper.AttachShape, Queue: 5000}
		if err := p.tryApply(nil, a); !errors.Is(err, no) {
			t.Errorf("%v, want %v", err, no)
		}
		p.apply(nil)
		wantQdiscs(t, l, before)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	p.Plane = nil
	assertNoTrace(t, l, p.pins)
}

// The qdisc clsact is removed unless it existed before, or another tool uses it.
func TestClsact_RemovedWhenUnused(t *testing.T) {
	t.Parallel()
	const theirs = "filter add ingress protocol all prio 1 u32 match u8 0 0"
	for _, c := range []struct {
		name          string
		before, while []string
		stays         bool
		filters       int
	}{
		{"ours", nil, nil, false, 0},
		{"foreign", []string{"qdisc add clsact"}, nil, true, 0},
		{"foreign, with a filter", []string{"qdisc add clsact", theirs}, nil, true, 1},
		{"ours, with a foreign filter", nil, []string{theirs}, true, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newDevice(t, "clsact", 1)
			tc(t, l, c.before...)
			p := openPlane(t)
			a := shaper.Attachment{Name: "here", Interfaces: []string{"clsact"}, Mode: shaper.AttachPolice, Hook: shaper.HookClsact, OnStop: shaper.StopKeep}
			p.apply(nil, a)
			tc(t, l, c.while...)
			p.crash()
			p.open()
			p.apply(nil, a)
			a.OnStop = shaper.StopOpen
			p.apply(nil, a)
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			p.Plane = nil
			present, err := attach.HasClsact(l)
			if err != nil || present != c.stays {
				t.Errorf("clsact is present: %v, %v; want %v", present, err, c.stays)
			}
			filters, err := netlink.FilterList(l, netlink.HANDLE_MIN_INGRESS)
			if c.stays && (err != nil || len(filters) != c.filters) {
				t.Errorf("filters %v, %v: want %d", filters, err, c.filters)
			}
		})
	}
}

// The qdisc ingress would run egress filters at ingress.
func TestClsact_IngressQdiscPresent(t *testing.T) {
	l := newDevice(t, "only", 1)
	tc(t, l, "qdisc add ingress")
	p := openPlane(t)
	a := shaper.Attachment{Name: "here", Interfaces: []string{"only"}, Mode: shaper.AttachPolice, Hook: shaper.HookClsact}
	err := p.tryApply(nil, a)
	want := `attach "here" to only, egress: add qdisc clsact: the qdisc ingress occupies its place: remove it with "tc qdisc del dev only ingress"`
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	a.Direction = shaper.Ingress
	p.apply(nil, a)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p.Plane = nil
	if present, err := attach.HasClsact(l); err != nil || !present {
		t.Errorf("the qdisc ingress is present: %v, %v", present, err)
	}
	assertNoTrace(t, l, p.pins)
}
