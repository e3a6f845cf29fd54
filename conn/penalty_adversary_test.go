package conn

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

// A crowd that fills the queue of the limit must not have a source blocked that would only wait a little.
func TestPenalty_CrowdFillsQueue(t *testing.T) {
	limit := penalizing(nil)
	limit.MaxQueue, limit.QueueTimeout = 100, 10*time.Second
	run := func(crowd bool) bool { // one connection, and another that waits until it is done
		r := newAdmissionRig(t, limit)
		if crowd {
			for i := range 100 { // each holds a slot, and has one that waits
				for range 2 {
					r.visit(fmt.Sprintf("2001:db8:0:%x::1", i+1), nil)
				}
			}
		}
		for range 10 {
			a := r.visit("192.0.2.1", nil)
			b := r.visit("192.0.2.1", nil)
			if a.granted {
				a.finish()
			}
			r.sleep(10 * time.Millisecond)
			if b.granted {
				b.finish()
			}
		}
		return r.admitted("192.0.2.1")
	}
	if !run(false) {
		t.Fatal("victim alone is blocked")
	}
	if !run(true) {
		t.Error("a crowd of 100 others has had a source blocked that alone is never refused")
	}
}

// Others who fill a limit of all must not have a source blocked.
func TestPenalty_LimitOfAllIsFull(t *testing.T) {
	limit := penalizing(nil)
	limit.MaxConnections = 5
	all := shaper.Limit{Name: "all", MaxConnections: 10, MaxQueue: 1000, QueueTimeout: 30 * time.Second}
	run := func(crowd bool) (bool, int) {
		r := newAdmissionRig(t, limit, all)
		var evil []*visitor
		if crowd {
			for i := range 10 {
				evil = append(evil, r.visit(fmt.Sprintf("10.0.0.%d", i+1), nil))
			}
		}
		var list []*visitor
		refused := 0
		for range 20 { // one each second, that lasts a second
			v := r.visit("192.0.2.1", func(*visitor) {})
			list = append(list, v)
			r.sleep(time.Second)
			if v.granted {
				v.finish()
			}
		}
		for _, e := range evil {
			e.finish()
		}
		r.sleep(time.Second)
		for _, v := range list {
			if v.refusedFor != shaper.None {
				refused++
			}
			if r.in[v] {
				v.finish()
			}
		}
		return r.admitted("192.0.2.1"), refused
	}
	if ok, n := run(false); !ok || n > 0 {
		t.Fatal("victim alone is blocked")
	}
	if ok, n := run(true); !ok {
		t.Errorf("others who filled a limit of all have had a source blocked; %d refused", n)
	}
}

// Connections of a prefix that wait are refused when it is blocked, whatever its length.
func TestPenalty_WaitingOfPrefix(t *testing.T) {
	for _, bits := range []int{48, 56, 64, 96, 128} {
		limit := penalizing(nil)
		limit.IPv6Prefix = bits
		limit.MaxQueue, limit.QueueTimeout = 12, time.Minute
		r := newAdmissionRig(t, limit)
		r.visit("2001:db8::1", nil)
		var waiting []*visitor
		for range 12 {
			waiting = append(waiting, r.visit("2001:db8::1", nil))
		}
		for range 10 {
			r.visit("2001:db8::1", nil)
		}
		n := 0
		for _, v := range waiting {
			if v.queue != nil {
				n++
			}
		}
		if n > 0 {
			t.Errorf("/%d: %d wait", bits, n)
		}
	}
}

// A flow that waits with an unproven source is refused when that is blocked.
func TestPenalty_UnverifiedWaits(t *testing.T) {
	limit := penalizing(nil)
	udp := shaper.Limit{Name: "udp", Match: shaper.Match{Protocol: shaper.UDP}, MaxConnections: 1, MaxQueue: 10, QueueTimeout: time.Hour}
	r := newAdmissionRig(t, limit, udp)
	flow := func(source string) *visitor {
		v := &visitor{rig: r}
		v.flow = *flowFrom(source, 1)
		v.flow.Protocol = shaper.UDP
		v.listen, v.unverified, v.owner = "l", true, v
		r.admission.acquire(&v.waiter, r.now)
		return v
	}
	first := flow("10.0.0.9")
	w := flow("10.0.0.1")
	if w.queue == nil {
		t.Fatal("does not wait")
	}
	r.refuse("10.0.0.1", 10)
	first.finish()
	r.sleep(time.Second)
	if w.granted {
		t.Error("a waiting flow of a blocked source was admitted")
	}
}

// A source that the limit excepts, or does not match, is not blocked by the limit's penalty because of a neighbor.
func TestPenalty_LimitExcepts(t *testing.T) {
	limit := penalizing(nil)
	limit.IPv4Prefix = 24
	limit.Except.Source = []netip.Prefix{netip.MustParsePrefix("192.0.2.7/32")}
	r := newAdmissionRig(t, limit)
	r.refuse("192.0.2.66", 10)
	if !r.admitted("192.0.2.7") {
		t.Error("a source that the limit excepts is blocked")
	}
	limit = penalizing(nil)
	limit.IPv4Prefix = 24
	limit.Match.Source = []netip.Prefix{netip.MustParsePrefix("192.0.2.64/26")}
	r = newAdmissionRig(t, limit)
	r.refuse("192.0.2.66", 10)
	if !r.admitted("192.0.2.7") {
		t.Error("a source that the limit does not match is blocked")
	}
}

// While the file of quotas fails, or is slow, sources that have used nothing must not be blocked.
func TestPenalty_QuotaFileFails(t *testing.T) {
	t.Parallel()
	limit := penalizing(nil)
	limit.MaxConnections, limit.MaxQueue, limit.QueueTimeout = 50, 10, 30*time.Millisecond
	limit.Quota = quota.Quota{Amount: 1000, Unit: quota.Connections, Period: aDay}
	r := startQuotas(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo), limit)
	r.file.fail(errors.New("no space left"))
	for range 11 {
		_ = send("127.0.0.1", r.addr(), 1) // it is refused, perhaps before it knows that it is connected
	}
	if all := r.proxy.Penalties(); len(all) != 0 {
		t.Errorf("blocked as the disk is full: %+v", all)
	}
}
