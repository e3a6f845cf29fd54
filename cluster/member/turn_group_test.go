package member

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// poolPlane has one pool, of which it uses all slots that it may, and more would be used.
type poolPlane struct {
	slotsPlane
	pool     shaper.SlotPool
	waiting  int
	inFlight int
	served   int
}

func (p *poolPlane) slots() int {
	parts, hot := p.given[shaper.Key{Limit: 2}]
	if !hot {
		parts = p.lease.SlotsCold
	}
	return p.pool.Slots(parts)
}

func (p *poolPlane) Demands(list []shaper.Demand) []shaper.Demand {
	p.mu.Lock()
	defer p.mu.Unlock()
	slots := p.slots()
	d := shaper.Demand{
		Key: shaper.Key{Limit: 2}, Slots: true, Waiting: p.waiting,
		Held: p.pool.Parts(p.inFlight), Want: p.pool.Parts(p.inFlight + p.waiting),
		Fit: p.pool.Parts(slots), Next: p.pool.Parts(slots + 1),
	}
	return append(list, d)
}

// churn ends some connections, and lets those that wait in.
func (p *poolPlane) churn(rnd *rand.Rand) (inFlight int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range p.inFlight {
		if rnd.IntN(20) == 0 {
			p.inFlight--
			p.served++
		}
	}
	if p.waiting > 0 {
		p.inFlight = max(p.inFlight, p.slots())
	}
	return p.inFlight
}

// Hosts that want the same slots have them in turns, however many sources wait at each.
func TestTurn_Group(t *testing.T) {
	for _, tt := range []struct {
		most    int
		waiting []int // at each host
		least   int   // connections that each serves in a minute
		use     int   // per cent of the time that slots are used
	}{
		{1, []int{15, 15}, 30, 40},
		{1, []int{16, 15}, 30, 40},
		{1, []int{20, 3}, 30, 40},
		{1, []int{15, 14, 13}, 15, 40},
		{1, []int{30, 3, 1}, 10, 40},
		{1, []int{3, 3, 3, 3}, 10, 40},
		{1, []int{16, 15, 14, 13}, 10, 40},
		{2, []int{16, 15, 14}, 15, 40},
		{3, []int{40, 2, 15, 13}, 15, 40},
		{1, []int{3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3}, 0, 10},
	} {
		t.Run(fmt.Sprintf("%d of %v", tt.most, tt.waiting), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rnd := testutil.Rand(t)
				var planes []*poolPlane
				n := len(tt.waiting)
				ctx, cancel := context.WithCancel(t.Context())
				members := startThese(ctx, n, n, func(o *Options, f *fakePlane) {
					p := &poolPlane{slotsPlane: slotsPlane{fakePlane: f, given: map[shaper.Key]uint32{}}, pool: shaper.SlotPool{Most: tt.most, Hosts: n}, waiting: tt.waiting[len(planes)]}
					planes = append(planes, p)
					o.Names, o.Planes = dbNames{}, []Plane{p}
				})
				used, steps := 0, 0
				run := func(d time.Duration) {
					for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
						sum := 0
						for _, p := range planes {
							sum += p.churn(rnd)
						}
						if steps, used = steps+1, used+sum; sum > tt.most {
							t.Fatalf("%d in flight, more than %d", sum, tt.most)
						}
					}
				}
				run(10 * time.Second)
				used, steps = 0, 0
				for _, p := range planes {
					p.served = 0
				}
				run(time.Minute)
				var served []int
				for i, p := range planes {
					served = append(served, p.served)
					if p.served < tt.least {
						t.Errorf("host %d served %d connections in a minute", i, p.served)
					}
				}
				use := 100 * used / (steps * tt.most)
				t.Logf("served %v, used %d %%", served, use)
				if use < tt.use {
					t.Errorf("slots were used %d %% of the time", use)
				}
				cancel()
				for _, m := range members {
					m.Wait()
				}
			})
		})
	}
}
