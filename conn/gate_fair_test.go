package conn

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// hog keeps n connections of a source coming, that stay for d and come again at once.
func (r *gateRig) hog(source string, n int, d time.Duration) {
	var visit func()
	visit = func() {
		r.visit(source, func(v *visitor) {
			if v.in {
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

// calls has a source connect n times, one after the other. It returns the longest wait, and
// how many were refused.
func (r *gateRig) calls(source string, n int) (worst time.Duration, refused int) {
	for range n {
		begun, done := r.now, false
		r.visit(source, func(v *visitor) {
			worst = max(worst, (v.at - begun).Duration())
			if !v.in {
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

// One host with 200 connections, and the limits of configs/fragile-database.toml: it is
// held to its own 30, and the slots that it cannot use are there for the others.
func TestHogHoldsNoSlotItCannotUse(t *testing.T) {
	for _, maxWait := range []time.Duration{2 * time.Second, 30 * time.Second} {
		r := newGateRig(t,
			shaper.Limit{Name: "slots", Connections: 80, MaxWait: 5 * time.Second, MaxWaiting: 1000},
			shaper.Limit{
				Name: "per-host", Key: shaper.KeySource, Connections: 30, NewConnections: shaper.Frequency{N: 20, Per: time.Second},
				MaxWait: maxWait, MaxWaiting: 1000,
			})
		r.hog("10.0.0.1", 200, time.Minute)
		r.sleep(10 * time.Second)
		slots := r.shaper.Policy().State(r.shaper.Policy().Find("slots"))
		if n := slots.InFlight.Load(); n != 30 {
			t.Errorf("queue_timeout %v: %d slots are taken, want the 30 of which the hog has connections", maxWait, n)
		}
		if worst, refused := r.calls("10.0.0.2", 50); worst > 0 || refused > 0 {
			t.Errorf("queue_timeout %v: a polite host waited for up to %v, and was refused %d times", maxWait, worst, refused)
		}
	}
}

// Who waits for his own pace keeps nobody from a slot.
func TestPaceOfOneSourceTakesNoSlots(t *testing.T) {
	served := func(limits ...shaper.Limit) (n int) {
		r := newGateRig(t, append(limits, shaper.Limit{Name: "all", Connections: 10, MaxWait: 2 * time.Second, MaxWaiting: 1000})...)
		r.hog("10.0.0.1", 200, 10*time.Millisecond)
		var call func(source string)
		call = func(source string) {
			r.visit(source, func(v *visitor) {
				if v.in {
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
		Name: "each", Key: shaper.KeySource, NewConnections: shaper.Frequency{N: 20, Per: time.Second}, MaxWait: 2 * time.Second, MaxWaiting: 1000,
	}
	if without, with := served(), served(pace); with < without*99/100 {
		t.Errorf("with a pace for each source 20 polite ones have %d connections in 10 s, without it %d", with, without)
	}
}

// Caps that cross: each connection needs a slot of its source and one of its port. Nobody
// may hold the one while he waits for the other.
func TestCapsThatCross(t *testing.T) {
	r := newGateRig(t,
		shaper.Limit{Name: "source", Key: shaper.KeySource, Connections: 1, MaxWait: time.Minute, MaxWaiting: 100},
		shaper.Limit{Name: "port", Key: shaper.KeyPort, Connections: 1, MaxWait: time.Minute, MaxWaiting: 100})
	a := r.must("10.0.0.1") // has port 1
	b := r.visitPort("10.0.0.2", 1, nil)
	if c := r.visitPort("10.0.0.2", 2, nil); !c.in {
		t.Error("who waits for port 1 keeps his source from port 2")
	} else {
		c.finish()
	}
	r.consistent()
	a.finish()
	if !b.in {
		t.Error("the first waiter does not go on")
	}
	b.finish()
	r.idle()
}

// A source that waits at the gates of several ports has one turn at the gate for all.
func TestSourceHasOneTurnHoweverManyPorts(t *testing.T) {
	r := newGateRig(t,
		shaper.Limit{Name: "each", Key: shaper.KeySource | shaper.KeyPort, Connections: 1, MaxWait: time.Minute, MaxWaiting: 100},
		shaper.Limit{Name: "all", Connections: 4, MaxWait: time.Minute, MaxWaiting: 100})
	var in []*visitor
	for range 3 {
		for port := range uint16(4) {
			r.visitPort("10.0.0.1", 1+port, func(v *visitor) { in = append(in, v) })
		}
	}
	polite := r.visit("10.0.0.2", nil)
	for ends := range 4 {
		if polite.in && ends > 1 {
			break
		}
		if ends == 3 {
			t.Fatal("a source went once for each of its ports while another waited")
		}
		in[ends].finish()
		r.consistent()
	}
}

// several is a listener's downstreams, for those who come past the gates of r.
func (r *gateRig) several(config Listen, hosts ...string) *site {
	s := several(config, hosts...)
	s.proxy.gates = r.gates
	return s
}

// Sources take turns for a downstream that is full, and hold no slot meanwhile.
func TestSourcesTakeTurnsForADownstream(t *testing.T) {
	r := newGateRig(t, shaper.Limit{Name: "all", Connections: 30, MaxWait: time.Minute, MaxWaiting: 100})
	r.site = r.several(Listen{Downstream: []Downstream{{Connections: 1}}, Timeouts: Timeouts{Connect: time.Hour}}, "10.1.0.1")
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
		t.Errorf("%d slots are taken, want that of the one connection there is", n)
	}
	first.finish()
	for n := 1; n < 40; n++ {
		if last.flow.Source.String() == "10.0.0.1" {
			visit("10.0.0.1") // it always has one waiting
		}
		last.finish()
		r.consistent()
	}
	if served["10.0.0.1"] != 20 || served["10.0.0.2"] != 20 {
		t.Errorf("served: %v, want 20 of each", served)
	}
}

// Who can only go to one downstream of a transparent listener is not in the way of who goes
// to another, and is not looked at when that has room.
func TestFamiliesWaitApart(t *testing.T) {
	r := newGateRig(t)
	r.site = r.several(Listen{
		Transparent: true, Downstream: []Downstream{{Connections: 1}, {Connections: 1}}, Timeouts: Timeouts{Connect: time.Hour},
	}, "10.1.0.1", "2001:db8::1")
	r.must("10.0.0.1")
	six := r.must("2001:db8:1::1")
	for range 2 * maxAwaiting {
		r.visit("10.0.0.2", nil)
	}
	if n := r.site.waiting.waiting; n != maxAwaiting {
		t.Errorf("%d wait, want %d", n, maxAwaiting)
	}
	waits := r.visit("2001:db8:2::1", nil)
	if waits.why != shaper.None {
		t.Fatal("another source has no room to wait")
	}
	six.finish()
	if !waits.in {
		t.Error("a downstream has room, and somebody waits for it")
	}
}

// The pace that lets a connection through is charged only when all other gates do.
func TestRefusedConnectionSpendsNoPace(t *testing.T) {
	r := newGateRig(t,
		shaper.Limit{Name: "pace", Key: shaper.KeySource, NewConnections: shaper.Frequency{N: 1, Per: time.Second}, MaxWait: time.Minute, MaxWaiting: 10},
		shaper.Limit{Name: "slow", NewConnections: shaper.Frequency{N: 1, Per: time.Minute}, MaxWait: time.Minute, MaxWaiting: 10})
	r.must("10.0.0.1").finish()
	r.sleep(30 * time.Second)
	for i := range 100 {
		if _, full := r.gates.take(flowFrom("10.0.0.2", 1), "l", r.now); full == nil || full.Name != "slow" {
			t.Fatalf("take %d: refused by %+v, want the slow one", i, full)
		}
		r.visit("10.0.0.2", nil).leave()
	}
	r.sleep(30 * time.Second)
	got, full := r.gates.take(flowFrom("10.0.0.2", 1), "l", r.now)
	if full != nil {
		t.Fatalf("refused by %s: those before it have spent its pace", full.Name)
	}
	got.release(r.now)
	r.idle()
}

// A connection that has passed, and comes again as what it was to go to has failed, pays no
// pace a second time, and waits for none.
func TestPaceIsPaidOnce(t *testing.T) {
	r := newGateRig(t,
		shaper.Limit{Name: "cap", Connections: 1, MaxWait: time.Hour, MaxWaiting: 10},
		shaper.Limit{Name: "both", Connections: 2, NewConnections: shaper.Frequency{N: 1, Per: time.Minute}, MaxWait: time.Hour, MaxWaiting: 10})
	v := r.must("10.0.0.1")
	again := func() {
		v.in = false
		v.release(r.now)
		v.paid = true
		r.gates.enter(&v.entrant, r.now)
	}
	for range 3 {
		again()
		if !v.in {
			t.Fatal("it waits for its pace again")
		}
	}
	other := r.visit("10.0.0.2", nil)
	r.sleep(59 * time.Second)
	again() // behind the other one, which waits for its first turn
	r.sleep(2 * time.Second)
	if !other.in || v.in {
		t.Fatalf("after a minute the other one is in: %v, the first one again: %v", other.in, v.in)
	}
	other.finish()
	if !v.in {
		t.Error("it does not go on when the slot is free: it waits for a pace that it has paid")
	}
	passed := &r.gates.policy.State(r.gates.policy.Index(r.gates.list(&v.flow, v.route)[0].state)).Connections
	if n := passed[shaper.Pass][shaper.None].Load() + passed[shaper.Delay][shaper.ByConnections].Load() + passed[shaper.Delay][shaper.ByNew].Load(); n != 2 {
		t.Errorf("2 connections are counted as %d", n)
	}
	v.finish()
	r.idle()
}

// Whoever asks who is slowed is told of those who waited for a slot.
func TestWaitForASlotIsToldOfItsSource(t *testing.T) {
	r := newGateRig(t, shaper.Limit{Name: "all", Connections: 1, MaxWait: time.Minute, MaxWaiting: 10})
	first := r.must("10.0.0.1")
	second := r.visit("10.0.0.2", nil)
	r.sleep(3 * time.Second)
	first.finish()
	second.finish()
	var waited []string
	for _, who := range r.shaper.HeavySources(shaper.TraitDelay, 10, r.now) {
		if who.Weight[shaper.TraitDelay].Value > 0 {
			waited = append(waited, who.Key.String())
		}
	}
	if !slices.Equal(waited, []string{"10.0.0.2"}) {
		t.Errorf("%v have waited, want the second source alone", waited)
	}
	if second.waited != 3*leaky.Second {
		t.Errorf("the connection has waited for %v, want 3s", second.waited.Duration())
	}
}
