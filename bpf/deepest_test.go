package bpf

import (
	"math/rand/v2"
	"testing"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// TestDeepest charges a bucket for all that its limit accepts, as late as the limit beside it
// lets it leave: it never owes more than what CPUs that insert it at once keep of each other's
// charges. That was as much as a newcomer may inherit, and large packets were cut to it.
func TestDeepest(t *testing.T) {
	place := shaper.Match{Attach: []string{"here"}}
	policy, err := shaper.New(1024).Compile([]shaper.Limit{
		{Name: "each", Match: place, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 80_000, MaxDelay: 100 * time.Millisecond},
		{Name: "total", Match: place, Rate: 8_000_000, MaxDelay: 3 * time.Second},
	}, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	for i := range policy.Len() {
		l, shape := policy.Limit(i), policy.Shape(i)
		m := newLimit(l, shape, policy.NewConnections(i), policy.Longest(i), 0, hashes{}).Meter[0]
		seed := rand.Uint64()
		random := rand.New(rand.NewPCG(seed, 0))
		var until, now, deepest leaky.Time
		for range 10_000 {
			now = now.Add(leaky.FromDuration(time.Duration(random.Int64N(int64(2 * time.Second)))))
			for range 4 {
				ready := max(now, until.Sub(shape.BytesBurst))
				if ready.Sub(now) > shape.MaxDelay {
					break // it is refused
				}
				depart := ready.Add(leaky.Time(random.Uint64N(uint64(now.Add(policy.Longest(i)).Sub(ready)) + 1)))
				until = max(until, depart).Add(shape.Bytes.Cost(1 + random.Uint64N(1<<16)))
				deepest = max(deepest, until.Sub(now))
			}
		}
		if deepest > m.deepest() || deepest < m.deepest()/4 {
			t.Errorf("limit %q, seed %d: %v is owed, and %v is thought the most", l.Name, seed, deepest.Duration(), m.deepest().Duration())
		}
		if deepest <= m.inheritable() {
			t.Errorf("limit %q, seed %d: no more than the %v that are inherited is owed", l.Name, seed, m.inheritable().Duration())
		}
	}
}
