package conn

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

type gateRig struct {
	t      *testing.T
	shaper *shaper.Shaper
	clock  *leaky.Clock
	gates  *gates
}

func newGateRig(t *testing.T, limits ...shaper.Limit) *gateRig {
	s := shaper.New(1000)
	r := &gateRig{t: t, shaper: s, clock: leaky.NewClock()}
	r.gates = newGates(s, r.clock, nil)
	r.swap(limits...)
	return r
}

func (r *gateRig) swap(limits ...shaper.Limit) {
	p := policy(r.t, r.shaper, limits...)
	r.gates.swap(p, func() { r.shaper.Swap(p, r.clock.Now()) })
}

func (r *gateRig) acquire(ctx context.Context, f *shaper.Flow) (*slots, *refusal) {
	copied := *f // each connection has its own
	return r.gates.acquire(&copied, "l", func() (<-chan struct{}, func()) { return ctx.Done(), func() {} })
}

func (r *gateRig) must(f *shaper.Flow) *slots {
	r.t.Helper()
	s, refused := r.acquire(context.Background(), f)
	if refused != nil {
		r.t.Fatalf("refused: %+v", refused)
	}
	return s
}

// idle checks that nothing is left behind.
func (r *gateRig) idle() {
	r.t.Helper()
	r.gates.mu.Lock()
	defer r.gates.mu.Unlock()
	if n := len(r.gates.byKey); n != 0 {
		r.t.Errorf("%d gates are left", n)
	}
	for state, room := range r.gates.rooms {
		if room.waiting != 0 || len(room.longest) != 0 || state.InFlight.Load() != 0 || state.Waiting.Load() != 0 {
			r.t.Errorf("%s: %d waiting, %d in flight", state.Name, room.waiting, state.InFlight.Load())
		}
	}
}

func TestGateNeverExceedsItsCapNorLosesAWakeUp(t *testing.T) {
	rnd := newRand(t)
	operations := 1_000_000
	if testing.Short() || raceEnabled {
		operations = 50_000
	}
	synctest.Test(t, func(t *testing.T) {
		limits := func(cap int) []shaper.Limit {
			return []shaper.Limit{
				{Name: "per-source", Key: shaper.KeySource, Connections: 1 + cap/2, MaxWait: 10 * time.Millisecond, MaxWaiting: 60},
				{Name: "all", Connections: cap, MaxWait: 6 * time.Millisecond, MaxWaiting: 20},
			}
		}
		const first = 10
		r := newGateRig(t, limits(first)...)
		var cap, inFlight, most, got, refused atomic.Int64
		var resize sync.RWMutex // the cap holds still while it is compared
		cap.Store(first)
		var reasons [shaper.Reasons]atomic.Int64
		work := func(rnd *rand.Rand, f *shaper.Flow, n int) {
			for range n {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rnd.IntN(30_000))*time.Microsecond)
				slots, why := r.acquire(ctx, f)
				if why != nil {
					refused.Add(1)
					reasons[why.reason].Add(1)
				} else {
					got.Add(1)
					now := inFlight.Add(1)
					most.Store(max(most.Load(), now))
					time.Sleep(time.Duration(rnd.IntN(2000)) * time.Microsecond)
					inFlight.Add(-1)
					slots.release()
				}
				cancel()
				time.Sleep(time.Duration(rnd.IntN(5000)) * time.Microsecond)
			}
		}
		const workers = 100
		var wg sync.WaitGroup
		for i := range workers {
			rnd := rand.New(rand.NewPCG(rnd.Uint64(), 0))
			f := flowFrom(fmt.Sprintf("10.0.0.%d", i%7), 1)
			wg.Go(func() { work(rnd, f, operations/workers) })
		}
		done := make(chan struct{})
		go func() { wg.Wait(); close(done) }()
		caps := rand.New(rand.NewPCG(rnd.Uint64(), 1))
		checks := 0
		for running := true; running; checks++ {
			select {
			case <-done:
				running = false
			case <-time.After(time.Duration(1+caps.IntN(50)) * time.Millisecond):
			}
			resize.Lock()
			synctest.Wait() // everybody sleeps or waits: what is open now stays open
			r.gates.mu.Lock()
			for _, gt := range r.gates.byKey {
				if len(gt.turns) > 0 && gt.blocked(r.clock.Now()) == shaper.None {
					t.Fatalf("%s: a slot is free and %d sources wait for it", gt.state.Name, len(gt.turns))
				}
				if gt.state.Name == "all" && int64(gt.inFlight) < inFlight.Load() {
					t.Fatalf("%d in flight, counted %d", inFlight.Load(), gt.inFlight)
				}
			}
			r.gates.mu.Unlock()
			if n := most.Swap(inFlight.Load()); n > cap.Load() {
				t.Fatalf("%d in flight, cap %d", n, cap.Load())
			}
			if caps.IntN(4) == 0 {
				next := int64(2 + caps.IntN(15))
				r.swap(limits(int(next))...)
				// What is in flight stays, so the old cap binds until it has drained.
				cap.Store(max(next, inFlight.Load()))
			}
			resize.Unlock()
		}
		r.idle()
		if int(got.Load()+refused.Load()) != operations/workers*workers {
			t.Errorf("%d got a slot, %d were refused, of %d", got.Load(), refused.Load(), operations)
		}
		for _, reason := range []shaper.Reason{shaper.ClientGone, shaper.WaitTimeout, shaper.WaitingFull} {
			if reasons[reason].Load() == 0 {
				t.Errorf("nobody was refused for %v", reason)
			}
		}
		t.Logf("%d operations, %d got a slot, %d client gone, %d timeout, %d full, %d checks", operations, got.Load(),
			reasons[shaper.ClientGone].Load(), reasons[shaper.WaitTimeout].Load(), reasons[shaper.WaitingFull].Load(), checks)
	})
}

func TestPoliteSourceDoesNotWaitBehindAHog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newGateRig(t, shaper.Limit{Name: "all", Connections: 10, MaxWait: 10 * time.Second, MaxWaiting: 1000})
		const service = 100 * time.Millisecond
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						s := r.must(flowFrom("10.0.0.1", 1))
						time.Sleep(service)
						s.release()
					}
				}
			})
		}
		time.Sleep(time.Second)
		var worst time.Duration
		for range 20 {
			start := time.Now()
			s := r.must(flowFrom("10.0.0.2", 1))
			worst = max(worst, time.Since(start))
			time.Sleep(service)
			s.release()
		}
		close(stop)
		wg.Wait()
		if worst > 2*service || worst == 0 {
			t.Errorf("the polite source waited up to %v, want some, at most %v", worst, 2*service)
		}
		r.idle()
	})
}

func TestFullRoomIsSharedBySources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newGateRig(t, shaper.Limit{Name: "all", Connections: 1, MaxWait: time.Minute, MaxWaiting: 10})
		first := r.must(flowFrom("10.0.0.1", 1))
		var wg sync.WaitGroup
		var hogGot, hogFull atomic.Int64
		for range 20 {
			wg.Go(func() {
				s, why := r.acquire(context.Background(), flowFrom("10.0.0.1", 1))
				if why != nil {
					if why.reason == shaper.WaitingFull {
						hogFull.Add(1)
					}
					return
				}
				hogGot.Add(1)
				s.release()
			})
		}
		synctest.Wait()
		if hogFull.Load() != 10 {
			t.Errorf("%d of 20 were refused, want 10", hogFull.Load())
		}
		politeGot := make(chan bool)
		go func() {
			s, why := r.acquire(context.Background(), flowFrom("10.0.0.2", 1))
			if why == nil {
				s.release()
			}
			politeGot <- why == nil
		}()
		synctest.Wait()
		if hogFull.Load() != 11 {
			t.Errorf("the polite source took no place from the hog")
		}
		first.release()
		if !<-politeGot {
			t.Error("the polite source was refused")
		}
		wg.Wait()
		if hogGot.Load() != 9 {
			t.Errorf("%d of the hog's got a slot, want 9", hogGot.Load())
		}
		r.idle()
	})
}

func TestNewConnectionsAreSpaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newGateRig(t, shaper.Limit{
			Name: "all", NewConnections: shaper.Frequency{N: 50, Per: time.Second}, MaxWait: 10 * time.Second, MaxWaiting: 1000,
		})
		var mu sync.Mutex
		var at []time.Duration
		start := time.Now()
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				s := r.must(flowFrom(fmt.Sprintf("10.0.0.%d", i), 1))
				mu.Lock()
				at = append(at, time.Since(start))
				mu.Unlock()
				s.release()
			})
		}
		wg.Wait()
		for i := range at {
			if want := time.Duration(i) * 20 * time.Millisecond; at[i] < want || at[i] > want+time.Millisecond {
				t.Fatalf("connection %d after %v, want %v", i, at[i], want)
			}
		}
		time.Sleep(time.Hour)
		before := time.Now()
		r.must(flowFrom("10.0.0.1", 1)).release()
		r.must(flowFrom("10.0.0.1", 1)).release()
		if d := time.Since(before); d < 20*time.Millisecond {
			t.Errorf("after an hour's rest two came %v apart", d)
		}
		r.idle()
	})
}

func TestObservedGateOnlyCounts(t *testing.T) {
	r := newGateRig(t, shaper.Limit{Name: "all", Connections: 1, MaxWait: time.Second, MaxWaiting: 10, Observe: true})
	f := flowFrom("10.0.0.1", 1)
	a, b := r.must(f), r.must(f)
	state := r.shaper.Policy().State(0)
	if state.InFlight.Load() != 2 || state.Connections[shaper.Delay][shaper.ByConnections].Load() != 1 {
		t.Errorf("in flight %d, would have waited %d", state.InFlight.Load(), state.Connections[shaper.Delay][shaper.ByConnections].Load())
	}
	a.release()
	b.release()
	r.idle()
}

func TestWithoutWaitAFullGateRefuses(t *testing.T) {
	r := newGateRig(t, shaper.Limit{Name: "all", Connections: 1, MaxWait: time.Second, MaxWaiting: 10})
	f := flowFrom("10.0.0.1", 1)
	a := r.must(f)
	if _, why := r.gates.acquire(f, "l", nil); why == nil || why.reason != shaper.ByConnections {
		t.Errorf("refusal %+v, want for connections", why)
	}
	a.release()
	r.idle()
}

func TestSlotsFollowANewPolicy(t *testing.T) {
	one := shaper.Limit{Name: "one", Connections: 5, MaxWait: time.Millisecond, MaxWaiting: 1}
	two := shaper.Limit{Name: "two", Key: shaper.KeySource, Connections: 1, MaxWait: time.Millisecond, MaxWaiting: 1}
	r := newGateRig(t, one)
	f := flowFrom("10.0.0.1", 1)
	a, b := r.must(f), r.must(f)
	r.swap(two)
	p := r.shaper.Policy()
	a.move(p, f, p.Route(f))
	b.move(p, f, p.Route(f))
	if n := p.State(0).InFlight.Load(); n != 2 {
		t.Errorf("%d in flight under the new limit, want 2", n)
	}
	if _, why := r.acquire(context.Background(), f); why == nil {
		t.Error("a third connection got a slot of one")
	}
	r.must(flowFrom("10.0.0.2", 1)).release()
	a.release()
	b.release()
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
			synctest.Test(t, func(t *testing.T) {
				next.MaxWait, next.MaxWaiting = 10*time.Second, 100
				r := newGateRig(t, shaper.Limit{Name: "cap", Connections: 2, MaxWait: 10 * time.Second, MaxWaiting: 100})
				var inFlight, most, got atomic.Int64
				var wg sync.WaitGroup
				for range 60 {
					wg.Go(func() {
						s := r.must(flowFrom("10.0.0.1", 1))
						// What is in flight has its slots moved, as the loop does it.
						if p := r.shaper.Policy(); s.policy != p {
							t.Error("the slots are of an older policy")
						}
						got.Add(1)
						most.Store(max(most.Load(), inFlight.Add(1)))
						time.Sleep(50 * time.Millisecond)
						inFlight.Add(-1)
						s.release()
					})
				}
				time.Sleep(125 * time.Millisecond) // six have been in, two are
				r.swap(next)
				wg.Wait()
				// Two of the old limit and, as nothing moved them here, two of the new one.
				if most.Load() > 4 || got.Load() != 60 {
					t.Errorf("%d at once, %d got in", most.Load(), got.Load())
				}
				r.idle()
			})
		})
	}
}

func TestReloadKeepsTheDebtOfNewConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := func(n uint64) shaper.Limit {
			return shaper.Limit{Name: "l", NewConnections: shaper.Frequency{N: n, Per: time.Second}, MaxWait: time.Hour, MaxWaiting: 100}
		}
		r := newGateRig(t, limit(1000))
		r.must(flowFrom("10.0.0.1", 1)).release()
		r.swap(limit(1))
		start := time.Now()
		r.must(flowFrom("10.0.0.1", 1)).release()
		if d := time.Since(start); d < 900*time.Millisecond || d > time.Second {
			t.Errorf("waited %v, want the second that one connection costs now", d)
		}
	})
}
