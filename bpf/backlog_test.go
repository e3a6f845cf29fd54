package bpf

import (
	"math/rand/v2"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// TestMaxBacklog_CoversAcceptedCharges charges a bucket with all packets that its limit accepts, which
// the other limit delays as far as it can: its backlog never exceeds the maximum to which CPUs that
// insert it at the same time trim each other's charges. That used to be the inheritable backlog,
// to which large packets were cut.
func TestMaxBacklog_CoversAcceptedCharges(t *testing.T) {
	match := shaper.Match{Attach: []string{"here"}}
	policy, err := shaper.New(1024).Compile([]shaper.Limit{
		{Name: "each", Match: match, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 80_000, MaxDelay: 100 * time.Millisecond},
		{Name: "total", Match: match, Rate: 8_000_000, MaxDelay: 3 * time.Second},
	}, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	for i := range policy.Len() {
		l, shape := policy.Limit(i), policy.Shape(i)
		m := encodeLimit(policy, i, 0, hashes{}).Meter[0]
		seed := rand.Uint64()
		random := rand.New(rand.NewPCG(seed, 0))
		var until, now, deepest leaky.Time
		for range 10_000 {
			now = now.Add(leaky.FromDuration(time.Duration(random.Int64N(int64(2 * time.Second)))))
			for range 4 {
				ready := max(now, until.Sub(shape.BytesBurst))
				if ready.Sub(now) > shape.MaxDelay {
					break // refused
				}
				depart := ready.Add(leaky.Time(random.Uint64N(uint64(now.Add(policy.MaxTotalDelay(i)).Sub(ready)) + 1)))
				until = max(until, depart).Add(shape.Bytes.Cost(1 + random.Uint64N(1<<16)))
				deepest = max(deepest, until.Sub(now))
			}
		}
		if deepest > m.maxBacklog() || deepest < m.maxBacklog()/4 {
			t.Errorf("limit %q, seed %d: a backlog of %v, with a maximum of %v", l.Name, seed, deepest.Duration(), m.maxBacklog().Duration())
		}
		if deepest <= m.inheritable() {
			t.Errorf("limit %q, seed %d: the backlog does not exceed the inheritable %v", l.Name, seed, m.inheritable().Duration())
		}
	}
}

// maxBacklog returns the maximum backlog of a key under m.
func (m *kernelMeter) maxBacklog() leaky.Time {
	return m.inheritable() << (m.BacklogBounds & (1<<backlogShiftBits - 1))
}
