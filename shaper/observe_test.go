package shaper

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
)

// A limit that observes a stream has the verdicts of one that enforces: it refuses nothing,
// delays the bytes beyond the rate and passes the rest. When it is enforced its backlog is
// at most one unit.
func TestObserve_EqualsEnforcing(t *testing.T) {
	const unit = 64 << 10
	for _, tt := range []struct {
		name    string
		offered uint64 // bytes/s, to a limit of 10 MB/s
		burst   uint64
		delayed [2]float64 // part of the bytes
	}{
		{"half the rate", 5e6, 0, [2]float64{0, 0}},
		{"twice the rate", 20e6, 0, [2]float64{0.99, 1}},
		{"twice the rate, with a burst", 20e6, 1 << 20, [2]float64{0.9, 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := New(10)
			limit := Limit{Name: "l", Rate: 80e6, Burst: tt.burst, MaxDelay: 200 * time.Millisecond, Observe: true}
			p := mustCompile(t, s, []Limit{limit}, []Listener{{Name: "l", Addresses: []Address{{Protocol: TCP}}}})
			s.Swap(p, 0)
			f := &Flow{Source: ipv4Addr(1), Port: 80, Protocol: TCP, Connection: 1}
			r := p.Route(f)
			every := leaky.NewRate(tt.offered, time.Second).Cost(unit)
			now := leaky.Second
			for ; now < 4*leaky.Second; now += every {
				if d := s.Observe(p, f, r, 1, unit, now); d.Verdict == Refuse {
					t.Fatalf("%v after %v", d, (now - leaky.Second).Duration())
				}
			}
			bytes := &p.State(0).Bytes
			delayed, passed := float64(bytes[Delay][ByRate].Load()), float64(bytes[Pass][None].Load())
			if part := delayed / (delayed + passed); part < tt.delayed[0] || part > tt.delayed[1] {
				t.Errorf("%.1f %% of the bytes would be delayed, want %.0f to %.0f %%", 100*part, 100*tt.delayed[0], 100*tt.delayed[1])
			}
			limit.Observe = false
			p = mustCompile(t, s, []Limit{limit}, []Listener{{Name: "l", Addresses: []Address{{Protocol: TCP}}}})
			now -= every
			s.Swap(p, now)
			b := s.CheckOut(p.Key(0, f, p.Route(f)), now)
			if wait := b.Depart(p.Shape(0), now) - now; wait > 0 {
				t.Errorf("enforced, the next byte waits %v for bytes that have left", wait.Duration())
			}
			if tt.burst > 0 && b.Drained(now) {
				t.Error("enforced, it has a full burst again")
			}
		})
	}
}

// Observed datagrams have left: when their limit is enforced nothing waits for them.
func TestSwap_ObservedDatagramsLeaveNoBacklog(t *testing.T) {
	s := New(10)
	limit := Limit{Name: "l", Rate: 8e3, MaxDelay: 5 * time.Second, Observe: true}
	p := mustCompile(t, s, []Limit{limit}, udpOnly)
	s.Swap(p, 0)
	f := fromIPv4(1)
	refused := 0
	for range 20 {
		if s.Decide(p, f, p.Route(f), 1, 1000, 1, leaky.Second).Verdict == Refuse {
			refused++
		}
	}
	if refused == 0 {
		t.Error("no datagram would have been refused")
	}
	limit.Observe = false
	p = mustCompile(t, s, []Limit{limit}, udpOnly)
	s.Swap(p, leaky.Second)
	if d := s.Decide(p, f, p.Route(f), 1, 1000, 1, leaky.Second); d.Verdict != Pass {
		t.Errorf("the first datagram: %v, want Pass", d)
	}
}
