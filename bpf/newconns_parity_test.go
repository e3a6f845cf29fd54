package bpf

import (
	"fmt"
	"math"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// TestNewConnectionsParity sends SYNs at random times: the programs and package leaky must
// agree on each, to the tick.
func TestNewConnectionsParity(t *testing.T) {
	t.Parallel()
	rnd := testutil.Rand(t)
	b := newTCP(t, shaper.AttachShape)
	var delays, refusals int
	for round := range 30 {
		b.clearMaps()
		var limits []shaper.Limit
		for i := range 1 + rnd.IntN(5) {
			l := shaper.Limit{
				Name: fmt.Sprint("l", i), Key: []shaper.Fields{0, shaper.KeySource, shaper.KeyPort, shaper.KeySource | shaper.KeyAttach, shaper.KeyDestination | shaper.KeyPort}[rnd.IntN(5)],
				IPv4Prefix: 1 + rnd.IntN(32), IPv6Prefix: 64,
				NewConnections: shaper.Frequency{N: 1 + rnd.Uint64N(1000), Per: time.Duration(1 + rnd.Int64N(int64(10*time.Second)))},
				QueueTimeout:   time.Duration(rnd.Int64N(int64(time.Second))) * time.Duration(rnd.IntN(2)),
				Match:          shaper.Match{Attach: []string{"here"}},

				BurstConnections: rnd.Uint64N(30) * rnd.Uint64N(2),
			}
			if rnd.IntN(3) == 0 {
				l.Algorithm, l.BurstConnections = shaper.FixedWindow, 0
			}
			limits = append(limits, l)
		}
		b.setLimits(limits...)
		s := shaper.New(1)
		p, err := s.Compile(limits, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		buckets := map[shaper.Key]*leaky.Bucket{}
		mean := float64(limits[0].NewConnections.Per) / float64(limits[0].NewConnections.N)
		for i := range 500 {
			b.now += uint64(rnd.ExpFloat64() * mean * math.Exp(rnd.NormFloat64()))
			now := leaky.Time(b.now) * leaky.FromDuration(1)
			d := dial(fmt.Sprintf("10.0.%d.%d:%d", rnd.IntN(2), rnd.IntN(3), 20000+i))
			f := shaper.Flow{Source: d.ends[client].Addr(), Destination: testServer.Addr(), Port: testServer.Port(), Origin: p.AttachmentIndex("here"), Protocol: shaper.TCP}
			r := p.Route(&f)
			want := shaper.Decision{Depart: now, Limit: -1}
			var charged []int
			bucket := func(i int) *leaky.Bucket {
				key := p.Key(i, &f, r)
				if buckets[key] == nil {
					buckets[key] = &leaky.Bucket{}
				}
				return buckets[key]
			}
			for i := range p.Len() {
				depart, ok := bucket(i).Offer(p.NewConnections(i), 0, 1, now)
				if !ok {
					want = shaper.Decision{Verdict: shaper.Refuse, Reason: shaper.ByNewConnections, Depart: depart, Limit: i}
					for _, i := range charged {
						refundConn(bucket(i), p.NewConnections(i))
					}
					break
				}
				charged = append(charged, i)
				if depart > want.Depart {
					want = shaper.Decision{Verdict: shaper.Delay, Reason: shaper.ByNewConnections, Depart: depart, Limit: i}
				}
			}
			action, got, stamp := b.send(d.nextSegment(client, syn, 0))
			wantAction, wantStamp := uint32(passed), uint64(want.Depart.Duration())
			switch want.Verdict {
			case shaper.Delay:
				delays++
			case shaper.Refuse:
				wantAction, wantStamp = answered, 0
				refusals++
			}
			if action != wantAction || stamp != wantStamp || got.Verdict != uint32(want.Verdict) || got.Reason != uint32(want.Reason) ||
				leaky.Time(got.Depart) != want.Depart || got.Limit != uint32(want.Limit) {
				t.Fatalf("round %d, SYN %d at %d: action %d, %+v, stamp %d; want %+v, stamp %d\n%+v", round, i, now, int32(action), got, stamp, want, wantStamp, limits)
			}
		}
	}
	t.Logf("%d delayed, %d refused", delays, refusals)
	if delays < 500 || refusals < 500 {
		t.Error("too few cases of some kind")
	}
}

// refundConn takes back the charge of a new connection. Only charges may have followed it.
func refundConn(b *leaky.Bucket, s *leaky.Shape) {
	bytes, packets := b.DrainTimes(0)
	_, cost := s.Cost(0, 1)
	b.SetDrainTimes(bytes, packets.Sub(cost), 0)
}

// TestNewConnections_AlgorithmChanged reloads between windows and leaky buckets: what has come in this window counts.
func TestNewConnections_AlgorithmChanged(t *testing.T) {
	t.Parallel()
	limit := func(a shaper.Algorithm, n, burst uint64) *shaper.Policy {
		p, err := shaper.New(16).Compile([]shaper.Limit{{
			Name: "l", Match: shaper.Match{Attach: []string{"here"}}, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
			NewConnections: shaper.Frequency{N: n, Per: 500 * time.Hour}, Algorithm: a, BurstConnections: burst,
		}}, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	b := newTCPVariant(t, shaper.AttachPolice, nil, testIdleTimeout)
	b.now = 0 // the kernel's clock
	port := 20000
	expect := func(n int) {
		t.Helper()
		for i := range n + 1 {
			port++
			if got := b.open(dial(fmt.Sprint("10.0.0.1:", port))); (got == passed) != (i < n) {
				t.Fatalf("SYN %d of %d: action %d", i, n, int32(got))
			}
		}
	}
	b.installPolicyNow(t, limit(shaper.FixedWindow, 20, 0))
	for range 7 {
		port++
		b.open(dial(fmt.Sprint("10.0.0.1:", port)))
	}
	b.installPolicyNow(t, limit(shaper.LeakyBucket, 20, 20))
	b.installPolicyNow(t, limit(shaper.FixedWindow, 10, 0))
	expect(3)
	b.installPolicyNow(t, limit(shaper.LeakyBucket, 10, 12))
	expect(2)
}
