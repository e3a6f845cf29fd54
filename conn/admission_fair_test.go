package conn

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/topk"
)

// keepOpen keeps n connections of a source open: each lasts for d and is followed by the next one.
func (r *admissionRig) keepOpen(source string, n int, d time.Duration) {
	var visit func()
	visit = func() {
		r.visit(source, func(v *visitor) {
			if v.granted {
				r.after(d, func() { v.finish(); visit() })
				return
			}
			r.after(10*time.Millisecond, visit)
		})
	}
	for range n {
		visit()
	}
}

// calls connects n times for a source, one after the other. It returns the longest wait and the number
// of refusals.
func (r *admissionRig) calls(source string, n int) (worst time.Duration, refused int) {
	for range n {
		begun, done := r.now, false
		r.visit(source, func(v *visitor) {
			worst = max(worst, (v.at - begun).Duration())
			if !v.granted {
				refused++
				done = true
				return
			}
			r.after(10*time.Millisecond, func() { v.finish(); done = true })
		})
		for !done {
			r.step(leaky.Forever)
		}
		r.sleep(50 * time.Millisecond)
	}
	return worst, refused
}

// One host has 200 connections under the limits of configs/fragile-database.toml: it gets no more than
// its own 30, and the slots that it cannot use are free for others.
func TestHogHoldsNoSlotItCannotUse(t *testing.T) {
	for _, queueTimeout := range []time.Duration{2 * time.Second, 30 * time.Second} {
		r := newAdmissionRig(t,
			shaper.Limit{Name: "slots", MaxConnections: 80, QueueTimeout: 5 * time.Second, MaxQueue: 1000},
			shaper.Limit{
				Name: "per-host", Key: shaper.KeySource, MaxConnections: 30, NewConnections: shaper.Frequency{N: 20, Per: time.Second},
				QueueTimeout: queueTimeout, MaxQueue: 1000,
			})
		r.keepOpen("10.0.0.1", 200, time.Minute)
		r.sleep(10 * time.Second)
		slots := r.shaper.Policy().State(r.shaper.Policy().Find("slots"))
		if n := slots.InFlight.Load(); n != 30 {
			t.Errorf("queue_timeout %v: %d slots are taken, want the 30 that the hog can use", queueTimeout, n)
		}
		if worst, refused := r.calls("10.0.0.2", 50); worst > 0 || refused > 0 {
			t.Errorf("queue_timeout %v: a polite host waited for up to %v, and was refused %d times", queueTimeout, worst, refused)
		}
	}
}

// A connection that waits for its own rate occupies no slot.
func TestWaitingForRateHoldsNoSlot(t *testing.T) {
	served := func(limits ...shaper.Limit) (n int) {
		r := newAdmissionRig(t, append(limits, shaper.Limit{Name: "all", MaxConnections: 10, QueueTimeout: 2 * time.Second, MaxQueue: 1000})...)
		r.keepOpen("10.0.0.1", 200, 10*time.Millisecond)
		var call func(source string)
		call = func(source string) {
			r.visit(source, func(v *visitor) {
				if v.granted {
					n++
					r.after(10*time.Millisecond, func() { v.finish() })
				}
				r.after(60*time.Millisecond, func() { call(source) })
			})
		}
		for i := range 20 {
			call(fmt.Sprintf("10.0.1.%d", i))
		}
		r.sleep(10 * time.Second)
		return n
	}
	pace := shaper.Limit{
		Name: "each", Key: shaper.KeySource, NewConnections: shaper.Frequency{N: 20, Per: time.Second}, QueueTimeout: 2 * time.Second, MaxQueue: 1000,
	}
	if without, with := served(), served(pace); with < without*99/100 {
		t.Errorf("20 polite sources made %d connections in 10 s with a rate for each source, %d without", with, without)
	}
}

// With crossing caps each connection needs a slot of its source and one of its port. None may hold one
// of them while it waits for the other.
func TestCrossingCapsDoNotDeadlock(t *testing.T) {
	r := newAdmissionRig(t,
		shaper.Limit{Name: "source", Key: shaper.KeySource, MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 100},
		shaper.Limit{Name: "port", Key: shaper.KeyPort, MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 100})
	a := r.must("10.0.0.1") // holds the slot of port 1
	b := r.visitPort("10.0.0.2", 1, nil)
	if c := r.visitPort("10.0.0.2", 2, nil); !c.granted {
		t.Error("a waiter for port 1 keeps its source from port 2")
	} else {
		c.finish()
	}
	r.consistent()
	a.finish()
	if !b.granted {
		t.Error("the first waiter was not admitted")
	}
	b.finish()
	r.idle()
}

// A source that waits at the gates of several ports gets one share of the gate for all ports.
func TestSourceWithManyPortsGetsOneShare(t *testing.T) {
	r := newAdmissionRig(t,
		shaper.Limit{Name: "each", Key: shaper.KeySource | shaper.KeyPort, MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 100},
		shaper.Limit{Name: "all", MaxConnections: 4, QueueTimeout: time.Minute, MaxQueue: 100})
	var in []*visitor
	for range 3 {
		for port := range uint16(4) {
			r.visitPort("10.0.0.1", 1+port, func(v *visitor) { in = append(in, v) })
		}
	}
	polite := r.visit("10.0.0.2", nil)
	for ends := range 4 {
		if polite.granted && ends > 1 {
			break
		}
		if ends == 3 {
			t.Fatal("a source was served once for each of its ports while another waited")
		}
		in[ends].finish()
		r.consistent()
	}
}

// newMultiListener is a listener with downstreams that connections go to after the gates of r.
func (r *admissionRig) newMultiListener(config shaper.Listener, hosts ...string) *listener {
	ln := newDownstreams(config, hosts...)
	ln.proxy.admission = r.admission
	return ln
}

// Sources take turns at a full downstream, and hold no slot while they wait.
func TestSourcesTakeTurnsForADownstream(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "all", MaxConnections: 30, QueueTimeout: time.Minute, MaxQueue: 100})
	r.listener = r.newMultiListener(shaper.Listener{Downstream: []shaper.Downstream{{MaxConnections: 1}}, MaxQueue: 1000, ConnectTimeout: time.Hour}, "10.1.0.1")
	served := map[string]int{}
	var last *visitor
	visit := func(source string) {
		r.visit(source, func(v *visitor) {
			served[source]++
			last = v
		})
	}
	first := r.must("10.0.0.3")
	for range 50 {
		visit("10.0.0.2")
	}
	visit("10.0.0.1")
	if n := r.shaper.Policy().State(0).InFlight.Load(); n != 1 {
		t.Errorf("%d slots are taken, want one for the one connection", n)
	}
	first.finish()
	for n := 1; n < 40; n++ {
		if last.flow.Source.String() == "10.0.0.1" {
			visit("10.0.0.1") // always has one waiting
		}
		last.finish()
		r.consistent()
	}
	if served["10.0.0.1"] != 20 || served["10.0.0.2"] != 20 {
		t.Errorf("served: %v, want 20 of each", served)
	}
}

// A client that can only go to one downstream of a transparent listener does not delay clients of
// another downstream, and is not tried when that has room.
func TestIPv4AndIPv6WaitSeparately(t *testing.T) {
	r := newAdmissionRig(t)
	r.listener = r.newMultiListener(shaper.Listener{
		Transparent: true, Downstream: []shaper.Downstream{{MaxConnections: 1}, {MaxConnections: 1}}, ConnectTimeout: time.Hour, MaxQueue: 1000,
	}, "10.1.0.1", "2001:db8::1")
	r.must("10.0.0.1")
	six := r.must("2001:db8:1::1")
	const most = 1000
	for range 2 * most {
		r.visit("10.0.0.2", nil)
	}
	if n := r.listener.poolQuota.waiting; n != most {
		t.Errorf("%d wait, want %d", n, most)
	}
	waits := r.visit("2001:db8:2::1", nil)
	if waits.refusedFor != shaper.None {
		t.Fatal("another source has no room to wait")
	}
	six.finish()
	if !waits.granted {
		t.Error("a connection waits for a downstream that has room")
	}
}

// The rate of new connections is charged only if all other gates are open.
func TestRefusedConnectionIsNotCharged(t *testing.T) {
	r := newAdmissionRig(t,
		shaper.Limit{Name: "pace", Key: shaper.KeySource, NewConnections: shaper.Frequency{N: 1, Per: time.Second}, QueueTimeout: time.Minute, MaxQueue: 10},
		shaper.Limit{Name: "slow", NewConnections: shaper.Frequency{N: 1, Per: time.Minute}, QueueTimeout: time.Minute, MaxQueue: 10})
	r.must("10.0.0.1").finish()
	r.sleep(30 * time.Second)
	for i := range 100 {
		if _, full := r.admission.tryAcquire(flowFrom("10.0.0.2", 1), "l", false, r.now); full == nil || full.Name != "slow" {
			t.Fatalf("take %d: refused by %+v, want the slow one", i, full)
		}
		r.visit("10.0.0.2", nil).leave()
	}
	r.sleep(30 * time.Second)
	got, full := r.admission.tryAcquire(flowFrom("10.0.0.2", 1), "l", false, r.now)
	if full != nil {
		t.Fatalf("refused by %s: earlier ones were charged to its rate", full.Name)
	}
	got.release(r.now)
	r.idle()
}

// A connection that was admitted, and waits again because its downstream failed, is not charged a
// second time and does not wait for the rate.
func TestReadmissionIsNotCharged(t *testing.T) {
	r := newAdmissionRig(t,
		shaper.Limit{Name: "cap", MaxConnections: 1, QueueTimeout: time.Hour, MaxQueue: 10},
		shaper.Limit{Name: "both", MaxConnections: 2, NewConnections: shaper.Frequency{N: 1, Per: time.Minute}, QueueTimeout: time.Hour, MaxQueue: 10})
	v := r.must("10.0.0.1")
	again := func() {
		v.granted = false
		v.release(r.now)
		v.paid = true
		r.admission.acquire(&v.waiter, r.now)
	}
	for range 3 {
		again()
		if !v.granted {
			t.Fatal("it waits for its rate again")
		}
	}
	other := r.visit("10.0.0.2", nil)
	r.sleep(59 * time.Second)
	again() // behind the other one, which has not been served yet
	r.sleep(2 * time.Second)
	if !other.granted || v.granted {
		t.Fatalf("after a minute: other admitted %v, first readmitted %v", other.granted, v.granted)
	}
	other.finish()
	if !v.granted {
		t.Error("not admitted when the slot is free: it waits for a rate that it was charged to")
	}
	passed := &r.admission.policy.State(r.admission.policy.IndexOf(r.admission.gatesFor(&v.flow, v.route, false)[0].state)).Connections
	if n := passed[shaper.Pass][shaper.None].Load() + passed[shaper.Delay][shaper.ByConnections].Load() + passed[shaper.Delay][shaper.ByNewConnections].Load(); n != 2 {
		t.Errorf("2 connections are counted as %d", n)
	}
	v.finish()
	r.idle()
}

// The rankings include time spent waiting for a slot.
func TestAdmissionWaitIsRecorded(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "all", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10})
	first := r.must("10.0.0.1")
	second := r.visit("10.0.0.2", nil)
	r.sleep(3 * time.Second)
	first.finish()
	second.finish()
	var waited []string
	for _, server := range r.shaper.TopSources(topk.ByDelay, 10, r.now) {
		if server.Weight[topk.ByDelay].Value > 0 {
			waited = append(waited, server.Key.String())
		}
	}
	if !slices.Equal(waited, []string{"10.0.0.2"}) {
		t.Errorf("%v have waited, want the second source alone", waited)
	}
	if second.waited != 3*leaky.Second {
		t.Errorf("the connection has waited for %v, want 3s", second.waited.Duration())
	}
}
