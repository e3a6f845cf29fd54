package conn

import (
	"fmt"
	"testing"
	"time"

	"shaperd/shaper"
)

func TestSlotsFollowANewPolicy(t *testing.T) {
	one := shaper.Limit{Name: "one", Connections: 5, MaxWait: time.Millisecond, MaxWaiting: 1}
	two := shaper.Limit{Name: "two", Key: shaper.KeySource, Connections: 1, MaxWait: time.Millisecond, MaxWaiting: 1}
	r := newGateRig(t, one)
	a, b := r.must("10.0.0.1"), r.must("10.0.0.1")
	r.swap(two)
	if n := r.shaper.Policy().State(0).InFlight.Load(); n != 2 {
		t.Errorf("%d in flight under the new limit, want 2", n)
	}
	third := r.visit("10.0.0.1", nil)
	r.sleep(time.Second)
	if third.why != shaper.WaitTimeout {
		t.Errorf("a third connection got a slot of one, or was refused for %v", third.why)
	}
	r.must("10.0.0.2").finish()
	a.finish()
	b.finish()
	r.idle()
}

// Waiters whose limit goes by another name or key after a reload wait on, under
// the new one.
func TestReloadLetsNobodySlipThrough(t *testing.T) {
	for name, next := range map[string]shaper.Limit{
		"renamed":   {Name: "other", Connections: 2},
		"other key": {Name: "cap", Key: shaper.KeySource, Connections: 2},
		"the same":  {Name: "cap", Connections: 2},
		"lower":     {Name: "cap", Connections: 1},
	} {
		t.Run(name, func(t *testing.T) {
			next.MaxWait, next.MaxWaiting = 10*time.Second, 100
			r := newGateRig(t, shaper.Limit{Name: "cap", Connections: 2, MaxWait: 10 * time.Second, MaxWaiting: 100})
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
			r.sleep(125 * time.Millisecond) // six have been in, two are
			r.swap(next)
			r.sleep(time.Minute)
			if most > 2 || got != 60 {
				t.Errorf("%d at once, %d got in", most, got)
			}
			r.idle()
		})
	}
}

func TestReloadKeepsTheDebtOfNewConnections(t *testing.T) {
	limit := func(n uint64) shaper.Limit {
		return shaper.Limit{Name: "l", NewConnections: shaper.Frequency{N: n, Per: time.Second}, MaxWait: time.Hour, MaxWaiting: 100}
	}
	r := newGateRig(t, limit(1000))
	r.must("10.0.0.1").finish()
	r.swap(limit(1))
	start := r.now
	v := r.visit("10.0.0.1", func(v *visitor) { v.finish() })
	r.sleep(time.Hour)
	if d := (v.at - start).Duration(); d < 900*time.Millisecond || d > time.Second {
		t.Errorf("waited %v, want the second that one connection costs now", d)
	}
}

// A reload takes no time by the number of gates: each follows when the connections do that hold
// it, or when somebody comes to it.
func TestReloadVisitsNoGate(t *testing.T) {
	limit := func(most int, pace uint64) shaper.Limit {
		return shaper.Limit{
			Name: "l", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Connections: most,
			NewConnections: shaper.Frequency{N: pace, Per: time.Second}, MaxWait: time.Hour, MaxWaiting: 100,
		}
	}
	r := newGateRig(t, limit(1, 1))
	const sources = 100
	for i := range sources {
		r.must(fmt.Sprintf("10.0.0.%d", i))
	}
	p := policy(t, r.shaper, limit(2, 10))
	r.gates.swap(p, func() { r.shaper.Swap(p, r.now) }, r.now)
	for _, gt := range r.gates.byKey {
		if gt.policy == p {
			t.Fatal("a reload that changes a limit visits gates")
		}
	}
	start := r.now
	r.sleep(50 * time.Millisecond)
	second := r.visit("10.0.0.7", nil) // before the first one has been brought up
	r.sleep(time.Second)
	if d := (second.at - start).Duration(); !second.in || d < 99*time.Millisecond || d > 101*time.Millisecond {
		t.Errorf("the second connection is in: %v, after %v, want the 100 ms that the first one costs now", second.in, d)
	}
	for v := range r.in {
		v.move(&v.flow, p.Route(&v.flow), r.now)
	}
	for _, gt := range r.gates.byKey {
		if gt.policy != p || gt.rule.Connections != 2 {
			t.Errorf("gate %v does not follow", gt.key)
		}
	}
	for v := range r.in {
		v.finish()
	}
	r.idle()
}
