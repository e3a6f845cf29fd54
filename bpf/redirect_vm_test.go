//go:build vmguest

package bpf

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// shapeIngress returns an attachment that shapes at ingress of the far end of a wire.
func shapeIngress(w *wire) shaper.Attachment {
	return shaper.Attachment{Name: "here", Interfaces: []string{w.to.Attrs().Name}, Direction: shaper.Ingress, Mode: shaper.AttachShape, Queue: 5000}
}

// TestVMShapeIngress_HostFilters drops packets at ingress by the host's filters, which continue to do so when
// the rest is redirected; and accepts them by another filter, which is then reported to keep them
// from the limits.
func TestVMShapeIngress_HostFilters(t *testing.T) {
	w := newWire(t, "fil")
	drop := func(source int) string {
		return fmt.Sprintf("filter add ingress protocol ip u32 match ip src 10.0.0.%d/32 action drop", source)
	}
	tc(t, w.to, "qdisc add clsact", drop(7))
	p := openPlane(t)
	w.want(p, 7, 20, 0)
	w.want(p, 8, 20, 20)
	p.apply([]shaper.Limit{tenAnHour("here")}, shapeIngress(w))
	w.want(p, 7, 20, 0)
	w.want(p, 8, 20, 10)
	tc(t, w.to, drop(9))
	w.want(p, 9, 20, 0)
	p.checkInterfaces(true)
	if s := p.point(); s.Err != "" || s.Uncovered != "" || !strings.Contains(strings.Join(s.PrecedingPrograms, " "), "filter u32") {
		t.Errorf("%+v: want it enforced, after the filters", s)
	}

	tc(t, w.to, "filter add ingress pref 5 protocol ip u32 match u8 0 0 action pass")
	p.checkInterfaces(true)
	w.want(p, 10, 100, 100)
	p.checkInterfaces(true)
	if s := p.point(); !strings.Contains(s.Uncovered, "other programs run before it: the filter u32 with preference 5,") {
		t.Errorf("%+v: want it to name the filter that keeps packets from it", s)
	}
	tc(t, w.to, "filter del ingress pref 5")
	for source := range byte(10) {
		w.want(p, 20+source, 20, 10)
	}
	p.checkInterfaces(true)
	if s := p.point(); s.Err != "" || s.Uncovered != "" {
		t.Errorf("%+v: want it enforced", s)
	}
}

// TestVMShapeIngress_Conflicts shapes at ingress where packets would then miss the programs of other tools, or
// be kept from the redirect: both are refused.
func TestVMShapeIngress_Conflicts(t *testing.T) {
	w := newWire(t, "ref")
	p := openPlane(t)
	at := w.to.Attrs().Name
	nft := func(commands ...string) {
		t.Helper()
		for _, c := range commands {
			if out, err := exec.Command("nft", c).CombinedOutput(); err != nil {
				t.Fatalf("nft %s: %v\n%s", c, err, out)
			}
		}
	}
	type obstacle struct {
		name     string
		add, end func()
	}
	inTable := func(table, name, object string) obstacle {
		return obstacle{
			name: name + " of nf_tables",
			add:  func() { nft("add table "+table, fmt.Sprintf(object, at)) },
			end:  func() { nft("delete table " + table) },
		}
	}
	obstacles := []obstacle{
		inTable("netdev a", "the chain of_netdev", "add chain netdev a of_netdev { type filter hook ingress device %s priority 0; policy drop; }"),
		inTable("inet b", "the chain of_inet", "add chain inet b of_inet { type filter hook ingress device %s priority 0; policy drop; }"),
		inTable("inet c", "the flowtable fast", "add flowtable inet c fast { hook ingress priority 0; devices = { %s }; }"),
	}
	limits := []shaper.Limit{tenAnHour("here")}
	refused := func(names ...string) {
		t.Helper()
		err := p.tryApply(limits, shapeIngress(w))
		if err == nil || !strings.Contains(err.Error(), strings.Join(names, ", ")) || !strings.Contains(err.Error(), `mode = "police"`) {
			t.Errorf("%v: want it refused for %v", err, names)
		}
	}
	var names []string
	for _, o := range obstacles {
		o.add()
		names = append(names, o.name)
	}
	w.want(p, 1, 20, 0)
	refused(names...)
	w.want(p, 1, 20, 0)
	for _, o := range obstacles {
		o.end()
	}
	if hasTCX(t) {
		other := attachOther(t, w.to, ebpf.AttachTCXIngress)
		refused("the tcx program passes_all")
		must(t, other.Close())
		obstacles = append(obstacles, obstacle{
			"the tcx program passes_all",
			func() { other = attachOther(t, w.to, ebpf.AttachTCXIngress) },
			func() { must(t, other.Close()) },
		})
	}
	p.apply(limits, shapeIngress(w))
	w.want(p, 2, 20, 10)
	for _, o := range obstacles {
		o.add()
		p.checkInterfaces(true)
		p.checkInterfaces(true)
		if s := p.point(); !strings.Contains(s.Err, o.name) {
			t.Errorf("%+v: want it down for %s", s, o.name)
		}
		if n := strings.Count(p.logged.String(), "has "+o.name); n != 1 {
			t.Errorf("%d log records name %s, want one", n, o.name)
		}
		o.end()
		p.checkInterfaces(true)
		if s := p.point(); s.Err != "" {
			t.Errorf("%+v: want it up", s)
		}
	}
}

// TestVMShape_SocketPriority sends packets of each priority above the rate. Linux before 6.7 has a
// band in sch_fq for TC_PRIO_CONTROL that ignores departure times.
func TestVMShape_SocketPriority(t *testing.T) {
	w := newWire(t, "prio")
	p := openPlane(t)
	p.apply(attachHere(shaper.Limit{Name: "l", Key: shaper.KeySource, Packets: perSecond(100), MaxDelay: time.Second}),
		shaper.Attachment{Name: "here", Interfaces: []string{"prio0"}, Mode: shaper.AttachShape, Queue: 5000})
	// Packets queued at the first reading were seen before.
	for range 100 {
		if _, err := unix.Write(w.out, datagram(99)); err != nil {
			t.Fatal(err)
		}
	}
	p.checkInterfaces(true)
	w.want(p, 99, 0, 100)
	p.checkInterfaces(true)
	if s := p.point(); s.Err != "" || s.Uncovered != "" {
		t.Errorf("%+v: want it enforced", s)
	}
	for i, priority := range []int{0, 1, 6, 7, 15, 0x10007} {
		must(t, unix.SetsockoptInt(w.out, unix.SOL_SOCKET, unix.SO_PRIORITY, priority))
		began := time.Now()
		w.want(p, byte(1+i), 41, 41)
		if took := time.Since(began); took < 400*time.Millisecond {
			t.Errorf("priority %d: 41 packets at 100 a second took %v", priority, took)
		}
	}
}
