package shaper

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// backlog returns the backlog of a bucket at now in bytes and in packets.
func (s *Shaper) backlog(p *Policy, i int, f *Flow, now leaky.Time) (bytes, packets uint64) {
	b, _ := s.lookupBucket(p, i, f)
	drained := drainTimes(b, now)
	return p.Shape(i).Bytes.Units(drained[0] - now), p.Shape(i).Packets.Units(drained[1] - now)
}

func TestReloadKeepsBacklog(t *testing.T) {
	bySource := Limit{
		Name: "source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
		Rate: 1e6, Packets: Frequency{N: 100, Per: time.Second}, MaxDelay: time.Hour,
	}
	with := func(change func(l *Limit)) Limit {
		l := bySource
		change(&l)
		return l
	}
	for _, tt := range []struct {
		name           string
		reloads        [][]Limit
		bytes, packets uint64
	}{
		{"unchanged", [][]Limit{{bySource}}, 15000, 10},
		{"slower", [][]Limit{{with(func(l *Limit) { l.Rate = 1000 })}}, 15000, 10},
		{"faster", [][]Limit{{with(func(l *Limit) { l.Rate = 1e10 })}}, 15000, 10},
		{"packets slower", [][]Limit{{with(func(l *Limit) { l.Packets.N = 3 })}}, 15000, 10},
		{"other period", [][]Limit{{with(func(l *Limit) { l.Packets = Frequency{100, time.Minute} })}}, 15000, 10},
		{"burst", [][]Limit{{with(func(l *Limit) { l.Burst = 3000 })}}, 15000, 10},
		{"max_delay", [][]Limit{{with(func(l *Limit) { l.MaxDelay = time.Millisecond })}}, 15000, 10},
		{"changed and reverted", [][]Limit{{with(func(l *Limit) { l.Rate = 8 })}, {bySource}}, 15000, 10},
		{"byte rate removed", [][]Limit{{with(func(l *Limit) { l.Rate = 0 })}}, 0, 10},
		{"another limit added", [][]Limit{{{Name: "new", Rate: 8}, bySource}}, 15000, 10},
		{"removed and back", [][]Limit{nil, {bySource}}, 15000, 10},
		{"removed and back faster", [][]Limit{nil, {with(func(l *Limit) { l.Rate = 1e9 })}}, 15000, 10},
		{"removed and back slower", [][]Limit{nil, nil, {with(func(l *Limit) { l.Rate = 8000 })}}, 15000, 10},
		{"renamed", [][]Limit{{with(func(l *Limit) { l.Name = "other" })}}, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := New(100)
			p := mustCompile(t, s, []Limit{bySource}, udpOnly)
			now := leaky.Second
			s.Swap(p, now)
			f := fromIPv4(1)
			for range 10 {
				r := p.Route(f)
				s.Decide(p, f, r, r.ToDownstream, 1500, 1, now)
			}
			for _, limits := range tt.reloads {
				p = mustCompile(t, s, limits, udpOnly)
				s.Swap(p, now)
				if s.Policy() != p {
					t.Fatal("the policy is not current")
				}
			}
			i := p.Len() - 1
			if p.Limit(0).Key == KeySource {
				i = 0
			}
			bytes, packets := s.backlog(p, i, f, now)
			if bytes < tt.bytes || bytes > tt.bytes+2 || packets != tt.packets {
				t.Errorf("%d bytes and %d packets, want %d and %d", bytes, packets, tt.bytes, tt.packets)
			}
		})
	}
}

// Reloads to any rate, at any time, grant no more than the envelope: the sum over the
// periods of each rate.
func TestReload_GrantsNoBurst(t *testing.T) {
	rnd := testutil.Rand(t)
	var refused, reloads int
	for range 30 {
		s := New(100)
		f := fromIPv4(1)
		var p *Policy
		var r Route
		now := leaky.Second
		const unit, maxDelay = 1000, 20 * time.Millisecond
		// Bytes allowed to leave so far, in addition to one unit.
		allowed, sent := 0.0, 0.0
		var rate uint64
		reload := func() {
			rate = 1e5 + rnd.Uint64N(uint64(1e5)<<rnd.IntN(10))
			p = mustCompile(t, s, []Limit{{Name: "l", Rate: rate, MaxDelay: maxDelay}}, udpOnly)
			s.Swap(p, now)
			r = p.Route(f)
			reloads++
		}
		reload()
		for range 3000 {
			step := leaky.Time(rnd.Uint64N(uint64(leaky.Second / 500)))
			now += step
			allowed += float64(rate) / 8 * float64(step) / float64(leaky.Second)
			if rnd.IntN(100) == 0 {
				reload()
			}
			if d := s.Decide(p, f, r, r.ToDownstream, unit, 1, now); d.Verdict == Refuse {
				refused++
				continue
			}
			sent += unit
			// The queue holds max_delay at the rate that was current when it filled.
			backlog, _ := s.backlog(p, 0, f, now)
			if left := sent - float64(backlog); left > allowed+unit+2 {
				t.Fatalf("%.0f bytes left, %.0f allowed", left, allowed)
			}
		}
	}
	if refused == 0 || reloads < 100 {
		t.Errorf("the test exercised nothing: refused %d, reloaded %d times", refused, reloads)
	}
}

func TestReloadRescalesNewConnections(t *testing.T) {
	s := New(10)
	load := func(n uint64) *Policy {
		p := mustCompile(t, s, []Limit{{Name: "l", NewConnections: Frequency{n, time.Second}, QueueTimeout: time.Second}}, udpOnly)
		s.Swap(p, leaky.Second)
		return p
	}
	p := load(10)
	k := p.Key(0, fromIPv4(1), Route{})
	k.Limit++
	var b leaky.Bucket
	b.Charge(p.NewConnections(0), 0, 5, leaky.Second)
	s.CheckIn(k, b, leaky.Second)
	p = load(100)
	got := s.CheckOut(k, leaky.Second)
	if want := leaky.Second + p.NewConnections(0).Packets.Cost(5); got.DrainedAt() != want {
		t.Errorf("5 connections drain after %v, want %v", (got.DrainedAt() - leaky.Second).Duration(), (want - leaky.Second).Duration())
	}
}

func TestReloadKeepsCounts(t *testing.T) {
	s := New(10)
	f := fromIPv4(1)
	for range 3 {
		p := mustCompile(t, s, []Limit{{Name: "l", Rate: 1e6 + rand.Uint64N(1e6)}}, udpOnly)
		s.Swap(p, leaky.Second)
		s.Decide(p, f, p.Route(f), 1, 10, 1, leaky.Second*leaky.Time(1+rand.Uint64N(1000)))
	}
	var bytes uint64
	st := s.Policy().State(0)
	for v := range NumVerdicts {
		for r := range NumReasons {
			bytes += st.Bytes[v][r].Load()
		}
	}
	if bytes != 30 {
		t.Errorf("%d bytes counted over three policies, want 30", bytes)
	}
}

// A reload that changes a rate blocks traffic for a small part of the time that it takes to
// walk all buckets, and so does each call of Migrate.
func TestSwap_MigratesBucketsInPieces(t *testing.T) {
	const keys = 100_000
	s := New(keys)
	load := func(rate uint64) (p *Policy, took time.Duration) {
		p = mustCompile(t, s, []Limit{{Name: "l", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: rate, MaxDelay: time.Hour}}, udpOnly)
		start := time.Now()
		s.Swap(p, leaky.Second)
		return p, time.Since(start)
	}
	rate := uint64(1e6)
	p, _ := load(rate)
	for i := range uint32(keys) {
		f := fromIPv4(i)
		r := p.Route(f)
		s.Decide(p, f, r, r.ToDownstream, 1000, 1, leaky.Second)
	}
	walk, swap := time.Hour, time.Hour
	var pieces []time.Duration // the fastest of the rounds, each
	for range 5 {
		start := time.Now()
		s.table.each(func(_ *Key, b *leaky.Bucket) { b.Rescale(p.Shape(0), p.Shape(0), leaky.Second) })
		walk = min(walk, time.Since(start))
		rate *= 2
		var took time.Duration
		p, took = load(rate)
		swap = min(swap, took)
		for i, more := 0, true; more; i++ {
			start := time.Now()
			more = s.Migrate()
			took := time.Since(start)
			if i == len(pieces) {
				pieces = append(pieces, took)
			}
			pieces[i] = min(pieces[i], took)
		}
		for _, i := range []uint32{0, keys / 2, keys - 1} {
			if bytes, _ := s.backlog(p, 0, fromIPv4(i), leaky.Second); bytes < 1000 || bytes > 1000+8 {
				t.Errorf("key %d has a backlog of %d bytes, want 1000", i, bytes)
			}
		}
	}
	piece := slices.Max(pieces)
	t.Logf("all buckets %v; Swap %v, Migrate %v", walk, swap, piece)
	if max(swap, piece) > walk/4 {
		t.Errorf("Swap took %v and Migrate %v, a walk over all buckets %v", swap, piece, walk)
	}
}
