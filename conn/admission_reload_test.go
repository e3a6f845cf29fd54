package conn

import (
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper"
)

func TestSlotsFollowANewPolicy(t *testing.T) {
	one := shaper.Limit{Name: "one", MaxConnections: 5, QueueTimeout: time.Millisecond, MaxQueue: 1}
	two := shaper.Limit{Name: "two", Key: shaper.KeySource, MaxConnections: 1, QueueTimeout: time.Millisecond, MaxQueue: 1}
	r := newAdmissionRig(t, one)
	a, b := r.must("10.0.0.1"), r.must("10.0.0.1")
	r.swap(two)
	if n := r.shaper.Policy().State(0).InFlight.Load(); n != 2 {
		t.Errorf("%d in flight under the new limit, want 2", n)
	}
	third := r.visit("10.0.0.1", nil)
	r.sleep(time.Second)
	if third.refusedFor != shaper.WaitTimeout {
		t.Errorf("a third connection got a slot of one, or was refused for %v", third.refusedFor)
	}
	r.must("10.0.0.2").finish()
	a.finish()
	b.finish()
	r.idle()
}

// Waiters whose limit has another name or key after a reload continue to wait, under the new limit.
func TestReload_WaitersObeyNewLimits(t *testing.T) {
	for name, next := range map[string]shaper.Limit{
		"renamed":   {Name: "other", MaxConnections: 2},
		"other key": {Name: "cap", Key: shaper.KeySource, MaxConnections: 2},
		"the same":  {Name: "cap", MaxConnections: 2},
		"lower":     {Name: "cap", MaxConnections: 1},
	} {
		t.Run(name, func(t *testing.T) {
			next.QueueTimeout, next.MaxQueue = 10*time.Second, 100
			r := newAdmissionRig(t, shaper.Limit{Name: "cap", MaxConnections: 2, QueueTimeout: 10 * time.Second, MaxQueue: 100})
			var inFlight, most, got int
			for range 60 {
				r.visit("10.0.0.1", func(v *visitor) {
					if v.policy != r.shaper.Policy() {
						t.Error("the slots are of an older policy")
					}
					got++
					inFlight++
					most = max(most, inFlight)
					r.after(50*time.Millisecond, func() {
						inFlight--
						v.finish()
					})
				})
			}
			r.sleep(125 * time.Millisecond) // six were admitted, two are in flight
			r.swap(next)
			r.sleep(time.Minute)
			if most > 2 || got != 60 {
				t.Errorf("%d at once, %d were admitted", most, got)
			}
			r.idle()
		})
	}
}

func TestReload_KeepsNewConnectionBacklog(t *testing.T) {
	limit := func(n uint64) shaper.Limit {
		return shaper.Limit{Name: "l", NewConnections: shaper.Frequency{N: n, Per: time.Second}, QueueTimeout: time.Hour, MaxQueue: 100}
	}
	r := newAdmissionRig(t, limit(1000))
	r.must("10.0.0.1").finish()
	r.swap(limit(1))
	start := r.now
	v := r.visit("10.0.0.1", func(v *visitor) { v.finish() })
	r.sleep(time.Hour)
	if d := (v.at - start).Duration(); d < 900*time.Millisecond || d > time.Second {
		t.Errorf("waited %v, want the second that one connection costs now", d)
	}
}

// The cost of a reload does not depend on the number of gates: each is updated with the connections
// that hold it, or when a connection arrives at it.
func TestReload_UpdatesGatesLazily(t *testing.T) {
	limit := func(most int, pace uint64) shaper.Limit {
		return shaper.Limit{
			Name: "l", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, MaxConnections: most,
			NewConnections: shaper.Frequency{N: pace, Per: time.Second}, QueueTimeout: time.Hour, MaxQueue: 100,
		}
	}
	r := newAdmissionRig(t, limit(1, 1))
	const sources = 100
	for i := range sources {
		r.must(fmt.Sprintf("10.0.0.%d", i))
	}
	p := policy(t, r.shaper, limit(2, 10))
	swapPolicy(p, func() { r.shaper.Swap(p, r.now) }, r.now, r.admission)
	for _, gt := range r.admission.byKey {
		if gt.policy == p {
			t.Fatal("a reload that changes a limit visits gates")
		}
	}
	start := r.now
	r.sleep(50 * time.Millisecond)
	second := r.visit("10.0.0.7", nil) // before the first one was updated
	r.sleep(time.Second)
	if d := (second.at - start).Duration(); !second.granted || d < 99*time.Millisecond || d > 101*time.Millisecond {
		t.Errorf("second connection admitted: %v, after %v, want the 100 ms that the first one costs now", second.granted, d)
	}
	for v := range r.in {
		v.retake(&v.flow, p.Route(&v.flow), r.now)
	}
	for _, gt := range r.admission.byKey {
		if gt.policy != p || gt.limit.MaxConnections != 2 {
			t.Errorf("gate %v was not updated", gt.key)
		}
	}
	for v := range r.in {
		v.finish()
	}
	r.idle()
}
