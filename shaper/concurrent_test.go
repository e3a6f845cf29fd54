package shaper

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// inParallel runs f n times concurrently, after all goroutines are ready.
func inParallel(n int, f func(g int)) {
	var ready, done sync.WaitGroup
	ready.Add(n)
	for g := range n {
		done.Go(func() {
			ready.Done()
			ready.Wait()
			f(g)
		})
	}
	done.Wait()
}

const (
	goroutines = 4
	each       = 50000 // decisions of a goroutine
)

// With a constant clock the order of decisions does not matter: concurrent ones
// admit exactly what sequential ones do.
func TestConcurrentEqualsSequential(t *testing.T) {
	limits := []Limit{
		{Name: "source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 8e8, MaxDelay: 300 * time.Millisecond},
		{Name: "port", Key: KeyPort, Packets: Frequency{100_000, time.Second}, MaxDelay: 1250 * time.Millisecond},
		{Name: "all", Rate: 8e9, MaxDelay: 100 * time.Millisecond},
	}
	var admitted [2]int64
	for i, workers := range []int{1, goroutines} {
		s := New(1000)
		p := mustCompile(t, s, limits[:1], udpOnly) // a single bucket
		f := fromIPv4(1)
		r := p.Route(f)
		var n atomic.Int64
		inParallel(workers, func(int) {
			for range each * goroutines / workers {
				if s.Decide(p, f, r, r.ToDownstream, 1000, 1, leaky.Second).Verdict != Refuse {
					n.Add(1)
				}
			}
		})
		admitted[i] = n.Load()
	}
	// 300 ms at 1e8 bytes/s, and one more unit: the queue test excludes the unit itself.
	if want := int64(30_001); admitted != [2]int64{want, want} {
		t.Errorf("admitted %v, want %d each", admitted, want)
	}

	// The limit of a source admits 30,001, that of the port 125,001 packets, and that of
	// all 100,001: the last one refuses.
	s := New(1000)
	p := mustCompile(t, s, limits, udpOnly)
	var sum atomic.Int64
	inParallel(goroutines, func(g int) {
		f := fromIPv4(uint32(g))
		r := p.Route(f)
		for range each {
			if s.Decide(p, f, r, r.ToDownstream, 1000, 1, leaky.Second).Verdict != Refuse {
				sum.Add(1)
			}
		}
	})
	if want := int64(100_001); sum.Load() != want {
		t.Errorf("%d goroutines: %d units admitted, want %d", goroutines, sum.Load(), want)
	}
}

// With an advancing clock the admitted units stay within the envelope of each bucket,
// and use all of it.
func TestConcurrentEnvelope(t *testing.T) {
	const unit = 500
	for _, tt := range []struct {
		name    string
		sources int // 1: all use one bucket
		limits  []Limit
		rate    float64 // bytes/s of all sources together
		depth   float64 // bytes in their queues
	}{
		{"one bucket", 1, []Limit{{Name: "all", Rate: 8e8, MaxDelay: time.Millisecond}}, 1e8, 1e5},
		{"a source each", 16, []Limit{{Name: "source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 8e6, MaxDelay: time.Millisecond}}, 16e6, 16e3},
		{"sources under one limit", 16, []Limit{
			{Name: "source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 8e7, MaxDelay: 10 * time.Millisecond},
			{Name: "port", Key: KeyPort, Packets: Frequency{1e6, time.Second}, MaxDelay: time.Second},
			{Name: "all", Rate: 2.4e8, MaxDelay: time.Millisecond},
		}, 3e7, 3e4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := New(1000)
			p := mustCompile(t, s, tt.limits, udpOnly)
			var clock, bytes, refused, delayed atomic.Uint64
			const step = uint64(leaky.Second) / 1_000_000 // a decision a microsecond: 5e8 bytes/s are offered
			start := uint64(leaky.Second)
			clock.Store(start)
			inParallel(goroutines, func(int) {
				for range each {
					now := leaky.Time(clock.Add(step))
					f := fromIPv4(uint32(uint64(now) / step % uint64(tt.sources)))
					r := p.Route(f)
					switch s.Decide(p, f, r, r.ToDownstream, unit, 1, now).Verdict {
					case Refuse:
						refused.Add(1)
						continue
					case Delay:
						delayed.Add(1)
					}
					bytes.Add(unit)
				}
			})
			line := tt.rate * float64(clock.Load()-start) / float64(leaky.Second)
			got := float64(bytes.Load())
			if bound := line + tt.depth + float64(unit*tt.sources); got > bound {
				t.Errorf("%.0f bytes admitted, want at most %.0f", got, bound)
			}
			if least := line * 0.95; got < least {
				t.Errorf("%.0f bytes admitted, want at least %.0f", got, least)
			}
			if refused.Load() == 0 || delayed.Load() == 0 {
				t.Errorf("the test exercised nothing: refused %d, delayed %d", refused.Load(), delayed.Load())
			}
			var counted uint64
			for v := range Refuse {
				for r := range NumReasons {
					counted += p.State(0).Bytes[v][r].Load()
				}
			}
			if counted != bytes.Load() {
				t.Errorf("%d bytes counted, %d admitted", counted, bytes.Load())
			}
		})
	}
}

// All methods run concurrently, to check for races and the invariants of the table.
func TestConcurrentReloads(t *testing.T) {
	rnd := testutil.Rand(t)
	s := New(64)
	compile := func(rate uint64) *Policy {
		p, err := s.Compile([]Limit{
			{Name: "source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: rate, MaxDelay: time.Millisecond},
			{Name: "all", Rate: 100 * rate, MaxDelay: time.Millisecond},
		}, udpOnly, nil, nil, rate%2 == 0)
		if err != nil {
			t.Error(err)
		}
		return p
	}
	s.Swap(compile(8e6), 0)
	var clock atomic.Uint64
	seeds := [goroutines]uint64{rnd.Uint64(), rnd.Uint64(), rnd.Uint64(), rnd.Uint64()}
	inParallel(goroutines, func(g int) {
		rnd := rand.New(rand.NewPCG(seeds[g], 0))
		for n := range each / 4 {
			now := leaky.Time(clock.Add(uint64(leaky.Second) / 100_000))
			p := s.Policy()
			f := fromIPv4(rnd.Uint32N(300))
			r := p.Route(f)
			switch {
			case n%500 == 0:
				s.Swap(compile(8e6+rnd.Uint64N(1e6)), now)
			case n%10 == 0:
				k := p.Key(0, f, r)
				b := s.CheckOut(k, now)
				b.Offer(p.Shape(0), 1000, 1, now)
				s.CheckIn(k, b, now)
			case n%100 == 1:
				s.TableUsage()
			default:
				s.Decide(p, f, r, r.ToDownstream, 1000, 1, now)
			}
		}
	})
	if err := s.table.check(); err != nil {
		t.Error(err)
	}
}
