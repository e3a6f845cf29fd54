package member

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/shaper"
)

// slotsPlane is a fakePlane that has one pool, "#db", in addition.
type slotsPlane struct {
	*fakePlane
	demand shaper.Demand
	given  map[shaper.Key]uint32
}

func (p *slotsPlane) SetShares(s shaper.Shares) {
	p.fakePlane.SetShares(shaper.Shares{Lease: s.Lease, Given: s.Given, Cold: s.Cold, Reset: s.Reset})
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.Reset {
		clear(p.given)
	}
	for _, g := range s.Slots {
		p.given[g.Key] = g.Parts
	}
	for _, k := range s.ColdSlots {
		delete(p.given, k)
	}
}

// Demands reports the pool if it is hot, or there is a demand.
func (p *slotsPlane) Demands(list []shaper.Demand) []shaper.Demand {
	list = p.fakePlane.Demands(list)
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.demand
	d.Key, d.Slots = shaper.Key{Limit: 2}, true
	if _, hot := p.given[d.Key]; hot || d.Want > 0 {
		list = append(list, d)
	}
	return list
}

func (p *slotsPlane) set(d shaper.Demand) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.demand = d
}

// parts returns what the plane has of the pool, and whether that is hot.
func (p *slotsPlane) parts() (parts uint32, hot bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if parts, hot = p.given[shaper.Key{Limit: 2}]; !hot {
		parts = p.lease.SlotsCold
	}
	return parts, hot
}

type dbNames struct{ oneName }

func (dbNames) Name(_ shaper.Key, slots bool) string {
	if slots {
		return "#db"
	}
	return "db"
}

func (dbNames) Key(name string) (shaper.Key, int, bool) {
	return shaper.Key{Limit: 2}, 0, name == "db" || name == "#db"
}

// countingStore counts what is told about pools.
type countingStore struct {
	*memoryStore
	told int
	has  int64 // what was told last of what is used of the pool
	all  int64 // that, when it was first told that this is all; -1 before
}

func (s *countingStore) Call(ctx context.Context, q *cluster.Request) (*cluster.Reply, error) {
	s.mu.Lock()
	for _, it := range q.Items {
		if cluster.IsSlots(it.Key) {
			s.told++
			s.has = it.Has
		}
	}
	if q.Epoch != 0 && q.Told && s.all < 0 {
		s.all = s.has
	}
	s.mu.Unlock()
	return s.memoryStore.Call(ctx, q)
}

func (s *countingStore) last() (told int, has int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.told, s.has
}

func startWithSlots(ctx context.Context, n int) ([]*countingStore, []*slotsPlane, []*Member) {
	var stores []*countingStore
	var planes []*slotsPlane
	members := startThese(ctx, n, n, func(o *Options, p *fakePlane) {
		stores = append(stores, &countingStore{memoryStore: o.Store.(*memoryStore), all: -1})
		planes = append(planes, &slotsPlane{fakePlane: p, given: map[shaper.Key]uint32{}})
		o.Store, o.Names, o.Planes = stores[len(stores)-1], dbNames{}, []Plane{planes[len(planes)-1]}
	})
	return stores, planes, members
}

const tenth = shaper.Whole / 10

// A member gets the slots that its plane wants, and leaves others theirs. The ledger is told what changes, and no
// more.
func TestMember_Slots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		stores, planes, members := startWithSlots(ctx, 2)
		if parts, hot := planes[0].parts(); parts != 0 || hot {
			t.Errorf("%d parts at the start", parts)
		}
		time.Sleep(3 * time.Second)
		if parts, hot := planes[0].parts(); parts != shaper.Whole/2 || hot {
			t.Errorf("%d parts of a cold pool, hot %t", parts, hot)
		}
		planes[0].set(shaper.Demand{Held: shaper.Whole / 2, Want: 8 * tenth, Waiting: 3})
		members[0].Short()
		time.Sleep(500 * time.Millisecond)
		if parts, _ := planes[0].parts(); parts < 8*tenth {
			t.Errorf("%d parts, want 8 tenths", parts)
		}
		if parts, hot := planes[1].parts(); parts != 0 || !hot {
			t.Errorf("the other has %d parts, hot %t", parts, hot)
		}
		planes[0].set(shaper.Demand{Held: 8 * tenth, Want: 8 * tenth, Spare: tenth})
		time.Sleep(time.Second)
		if parts, _ := planes[0].parts(); parts < 9*tenth-1 {
			t.Errorf("%d parts, want 9 tenths: nobody else needs what is spare", parts)
		}
		before, _ := stores[0].last()
		time.Sleep(5 * time.Second)
		if told, _ := stores[0].last(); told > before {
			t.Errorf("the ledger was told %d times of what had not changed", told-before)
		}
		planes[1].set(shaper.Demand{Want: shaper.Whole, Waiting: 1})
		members[1].Short()
		time.Sleep(500 * time.Millisecond)
		if parts, _ := planes[0].parts(); parts > shaper.Whole/2 {
			t.Errorf("%d parts, want half, as the other waits", parts)
		}
		if _, has := stores[0].last(); has != 8*tenth {
			t.Errorf("it told that it has %d parts, want the 8 tenths in use", has)
		}
		if parts, _ := planes[1].parts(); parts > shaper.Whole-8*tenth {
			t.Errorf("the other has %d parts, while 8 tenths are in use", parts)
		}
		planes[0].set(shaper.Demand{Held: 3 * tenth, Want: 3 * tenth})
		time.Sleep(500 * time.Millisecond)
		if parts, _ := planes[1].parts(); parts < 7*tenth-1 {
			t.Errorf("the other has %d parts, want what the first has given back", parts)
		}
		cancel()
		for _, m := range members {
			m.Wait()
		}
	})
}

// Another member of the same daemon begins: what its connections in flight use is told before it says that the ledger
// knows all.
func TestMember_StartsWithSlotsInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		stores, planes, members := startWithSlots(ctx, 2)
		for _, p := range planes {
			p.set(shaper.Demand{Held: 6 * tenth, Want: 6 * tenth})
		}
		time.Sleep(3 * time.Second)
		for i, s := range stores {
			s.mu.Lock()
			if s.all != 6*tenth {
				t.Errorf("host %d said that %d parts are all it uses, want 6 tenths", i, s.all)
			}
			s.mu.Unlock()
		}
		cancel()
		for _, m := range members {
			m.Wait()
		}
	})
}

// goneNames are dbNames until the policy has them no more.
type goneNames struct {
	dbNames
	gone *atomic.Bool
}

func (n goneNames) Name(k shaper.Key, slots bool) string {
	if n.gone.Load() {
		return ""
	}
	return n.dbNames.Name(k, slots)
}

func (n goneNames) Key(name string) (shaper.Key, int, bool) {
	k, plane, ok := n.dbNames.Key(name)
	return k, plane, ok && !n.gone.Load()
}

// What is in use of a pool is told for as long as a plane reports it, also if the policy has no name for it any more:
// the planes know its name, or the policy has changed since they were asked.
func TestMember_SlotsWithoutName(t *testing.T) {
	for _, name := range []string{"", "db"} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var gone atomic.Bool
			var store *countingStore
			var plane *slotsPlane
			members := startThese(ctx, 1, 2, func(o *Options, p *fakePlane) {
				store = &countingStore{memoryStore: o.Store.(*memoryStore), all: -1}
				plane = &slotsPlane{fakePlane: p, given: map[shaper.Key]uint32{}}
				o.Store, o.Names, o.Planes = store, goneNames{gone: &gone}, []Plane{plane}
			})
			plane.set(shaper.Demand{Held: 6 * tenth, Want: 6 * tenth})
			time.Sleep(3 * time.Second)
			gone.Store(true)
			plane.set(shaper.Demand{Held: 6 * tenth, Want: 6 * tenth, Name: name})
			time.Sleep(3 * time.Second)
			if _, has := store.last(); has != 6*tenth {
				t.Errorf("name %q: it told that it has %d parts, want the 6 tenths in use", name, has)
			}
			plane.set(shaper.Demand{})
			time.Sleep(3 * time.Second)
			if _, has := store.last(); has != 0 {
				t.Errorf("name %q: it told that it has %d parts of a pool that is not in use", name, has)
			}
			cancel()
			members[0].Wait()
		})
	}
}

// A member whose host still uses something does not leave, but its planes let nothing pass any more.
func TestMember_LeavesOnlyWhenReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		store, planes, members := startMembers(ctx, 2)
		planes[1].setBusy(true)
		time.Sleep(3 * time.Second)
		use, errInUse := uint32(1), errors.New("in use")
		err := members[1].Leave(ctx, func() error { use = planes[1].use(); return errInUse })
		if !errors.Is(err, errInUse) || use != 0 {
			t.Errorf("%v, and its plane could use %d parts when it was asked", err, use)
		}
		time.Sleep(time.Second)
		if shot, _ := store.Snapshot(ctx); len(shot.Gone) != 0 {
			t.Errorf("gone: %v", shot.Gone)
		}
		cancel()
		for _, m := range members {
			m.Wait()
		}
	})
}

// TestSlotDemands_FullOfOthers has more connections in flight than its floor, while the host asks for as many buckets as
// it may.
func TestSlotDemands_FullOfOthers(t *testing.T) {
	p := cluster.Params{Hosts: 2, Lease: cluster.Second, Step: cluster.Second / 2}
	host := cluster.NewHost(cluster.HostOptions{Params: p, Name: "a", Start: 1}, 0)
	for i := range 20_000 {
		host.Want(fmt.Sprint("flood/", i), cluster.Whole, 1)
	}
	s, pool := newSlotDemands(host), shaper.SlotPool{Most: 8, Hosts: 2}
	s.begin()
	for name, inFlight := range map[string]int{"#many": 6, "#few": 2} {
		s.add(cluster.Second, name, shaper.Demand{Slots: true, Held: pool.Parts(inFlight), Want: pool.Parts(7), Waiting: 1})
	}
	s.urgent(cluster.Second, cluster.Second/10)
	s.endWindow(cluster.Second)
	if s.pools["#many"].told == 0 {
		t.Error("slots in use are not told")
	}
	if s.pools["#few"].told != 0 || s.pools["#few"].asked {
		t.Error("what there was no room for is taken for told")
	}
}
