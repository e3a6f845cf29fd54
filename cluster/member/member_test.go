package member

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// memoryStore is a ledger in this process.
type memoryStore struct {
	mu     sync.Mutex
	ledger cluster.Ledger
	clock  func() cluster.Time
	away   bool // it does not answer
	hangs  bool // it does not answer queries
	calls  int

	spoil func(*cluster.Reply) // changes replies, unless nil
}

func (s *memoryStore) Call(ctx context.Context, q *cluster.Request) (*cluster.Reply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	if s.away {
		s.mu.Unlock()
		<-ctx.Done()
		s.mu.Lock()
		return nil, ctx.Err()
	}
	if err := q.Validate(); err != nil {
		return nil, err
	}
	r := s.ledger.Call(s.clock(), q)
	if s.spoil != nil {
		s.spoil(r)
	}
	return r, nil
}

func (s *memoryStore) Snapshot(ctx context.Context, keys ...string) (cluster.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away || s.hangs {
		s.mu.Unlock()
		<-ctx.Done()
		s.mu.Lock()
		return cluster.Snapshot{}, ctx.Err()
	}
	return s.ledger.Snapshot(s.clock(), keys...), nil
}

func (s *memoryStore) Forget(_ context.Context, host string) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ledger.Forget(s.clock(), host), nil
}

func (s *memoryStore) Server() string { return "memory" }

func (s *memoryStore) Close() {}

func (s *memoryStore) setAway(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = away
}

// fakePlane has one bucket, "db", of which it uses all that it may if busy.
type fakePlane struct {
	mu    sync.Mutex
	now   func() leaky.Time
	busy  bool
	lease shaper.Lease
	parts uint32
	hot   bool
	at    leaky.Time
	sets  int

	drained leaky.Time // until then something is yet to leave that was admitted before
}

func (p *fakePlane) SetShares(s shaper.Shares) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sets++
	p.lease = s.Lease
	p.hot = p.hot && !s.Reset && len(s.Cold) == 0
	for _, g := range s.Given {
		p.parts, p.hot = g.Parts, true
	}
}

func (p *fakePlane) use() uint32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.partsNow()
}

func (p *fakePlane) partsNow() uint32 {
	parts := p.lease.Cold
	if p.hot {
		parts = p.parts
	}
	return p.lease.Parts(parts, p.now())
}

func (p *fakePlane) Demands(list []shaper.Demand) []shaper.Demand {
	p.mu.Lock()
	defer p.mu.Unlock()
	span := p.now() - p.at
	p.at = p.now()
	if p.now() < p.drained {
		return append(list, shaper.Demand{Key: shaper.Key{Limit: 2}, Unsettled: true})
	}
	if !p.busy {
		return list
	}
	return append(list, shaper.Demand{Key: shaper.Key{Limit: 2}, Used: span / shaper.Whole * leaky.Time(p.partsNow()), Waiting: 1})
}

type oneName struct{}

func (oneName) Name(shaper.Key, bool) string { return "db" }
func (oneName) Key(name string) (shaper.Key, int, bool) {
	return shaper.Key{Limit: 2}, 0, name == "db"
}
func (oneName) Always() []string       { return []string{"db"} }
func (oneName) Policy() *shaper.Policy { return nil }

func startMembers(ctx context.Context, n int) (*memoryStore, []*fakePlane, []*Member) {
	return startSome(ctx, n, n)
}

// startSome starts n of some hosts.
func startSome(ctx context.Context, n, hosts int) (*memoryStore, []*fakePlane, []*Member) {
	var store *memoryStore
	var planes []*fakePlane
	members := startThese(ctx, n, hosts, func(o *Options, p *fakePlane) {
		store, planes = o.Store.(*memoryStore), append(planes, p)
	})
	return store, planes, members
}

// startThese starts n of some hosts, with one ledger. change is called with the options of each, and its plane.
func startThese(ctx context.Context, n, hosts int, change func(*Options, *fakePlane)) (members []*Member) {
	start := time.Now()
	clock := func() cluster.Time { return cluster.FromDuration(time.Since(start)) + cluster.Second }
	now := func() leaky.Time { return leaky.FromDuration(time.Since(start)) }
	store := &memoryStore{ledger: cluster.Ledger{Run: "a"}, clock: clock}
	for i := range n {
		p := &fakePlane{now: now}
		o := Options{
			Host: cluster.HostOptions{
				Params: cluster.Params{Hosts: hosts, Lease: cluster.Second, Step: cluster.Second / 2}, Name: string(rune('a' + i)), Start: 1,
			},
			Interval: 100 * time.Millisecond, Store: store, Planes: []Plane{p}, Names: oneName{}, Clock: clock, Now: now,
			Log: slog.New(slog.DiscardHandler),
		}
		change(&o, p)
		members = append(members, Start(ctx, o))
	}
	return members
}

func TestMember_GetsTheWholeAndFallsBackToItsFloor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		store, planes, members := startMembers(ctx, 3)
		if use := planes[0].use(); use != 0 {
			t.Errorf("a member that has just started uses %d parts", use)
		}
		time.Sleep(3 * time.Second)
		planes[1].setBusy(true)
		members[1].Short()
		time.Sleep(500 * time.Millisecond)
		if use := planes[1].use(); use < shaper.Whole*9/10 {
			t.Errorf("the only member with traffic uses %d of %d parts", use, shaper.Whole)
		}
		before := store.count()
		time.Sleep(10 * time.Second)
		if calls := store.count() - before; calls > 3*10*15+10*15 {
			t.Errorf("%d calls in 10 s", calls)
		}
		store.setAway(true)
		for range 60 { // the lease ends, by itself
			time.Sleep(100 * time.Millisecond)
			if sum := planes[0].use() + planes[1].use() + planes[2].use(); sum > shaper.Whole {
				t.Fatalf("members use %d parts while the store is away", sum)
			}
		}
		if use := planes[1].use(); use != shaper.Whole/3 {
			t.Errorf("without a store a member uses %d parts, not its floor", use)
		}
		if s, _ := members[1].Status(ctx); s.Joined || s.LastError == "" || s.Counters.TimedOut == 0 {
			t.Errorf("status without a store: %+v", s)
		}
		store.setAway(false)
		time.Sleep(3 * time.Second)
		if use := planes[1].use(); use < shaper.Whole*9/10 {
			t.Errorf("after the store is back it uses %d parts", use)
		}
		cancel()
		for _, m := range members {
			m.Wait()
		}
	})
}

// TestMember_TakesNoInvalidReply has a store whose answers are wrong for a while, each in a way that would make a host's
// own calls invalid for ever.
func TestMember_TakesNoInvalidReply(t *testing.T) {
	for name, spoil := range map[string]func(*cluster.Reply){
		"negative epoch": func(r *cluster.Reply) { r.Epoch = -1 },
		"last epoch":     func(r *cluster.Reply) { r.Epoch = 1 << 52 },
		"event": func(r *cluster.Reply) {
			r.Version++
			r.Events = append(r.Events, cluster.Event{Version: r.Version, Key: "a b"})
		},
		"last version": func(r *cluster.Reply) {
			r.Version, r.Events = 1<<53, []cluster.Event{{Version: 1 << 53, Key: "db"}}
		},
		"last start": func(r *cluster.Reply) { r.Refused, r.Latest = cluster.RefusedOld, 1<<52 },
		"gone":       func(r *cluster.Reply) { r.Gone = append(r.Gone, cluster.Gone{Host: "a b"}) },
		"live":       func(r *cluster.Reply) { r.Live = -2 },
		"parts": func(r *cluster.Reply) {
			r.Grants = append(r.Grants, cluster.Grant{Key: "db", Parts: 2 * cluster.Whole})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				store, planes, members := startMembers(ctx, 2)
				planes[0].setBusy(true)
				set := func(spoil func(*cluster.Reply)) {
					store.mu.Lock()
					defer store.mu.Unlock()
					store.spoil = spoil
				}
				time.Sleep(3 * time.Second)
				set(spoil)
				time.Sleep(10 * time.Second)
				s, _ := members[0].Status(ctx)
				if use := planes[0].use(); s.Joined || use != shaper.Whole/2 || !strings.Contains(s.LastError, "the ledger's answer is not valid: ") {
					t.Errorf("it uses %d parts, joined %v, after %q", use, s.Joined, s.LastError)
				}
				set(nil)
				time.Sleep(5 * time.Second)
				if s, _ := members[0].Status(ctx); !s.Joined || planes[0].use() < shaper.Whole*9/10 {
					t.Errorf("when the store is good again it uses %d parts, after %q", planes[0].use(), s.LastError)
				}
				cancel()
				for _, m := range members {
					m.Wait()
				}
			})
		})
	}
}

func TestMember_LeavesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		_, planes, members := startMembers(ctx, 2)
		planes[0].setBusy(true)
		planes[1].setBusy(true)
		time.Sleep(3 * time.Second)
		if use := planes[0].use(); use > shaper.Whole*6/10 {
			t.Fatalf("one of two busy members uses %d parts", use)
		}
		if err := members[1].Leave(ctx, func() error { return nil }); err != nil {
			t.Fatal(err)
		}
		if use := planes[1].use(); use != 0 {
			t.Errorf("a member that has left uses %d parts", use)
		}
		time.Sleep(time.Second)
		if use := planes[0].use(); use < shaper.Whole*9/10 {
			t.Errorf("the one that remains uses %d parts", use)
		}
		cancel()
		for _, m := range members {
			m.Wait()
		}
	})
}

// A member that leaves tells the ledger when what its planes have queued has left: until then others do not use
// its part.
func TestMember_LeavesWhenNothingIsQueued(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		store, planes, members := startMembers(ctx, 2)
		planes[0].setBusy(true)
		time.Sleep(3 * time.Second)
		planes[1].mu.Lock()
		planes[1].drained = planes[1].now() + 3*leaky.Second/2
		planes[1].mu.Unlock()
		left := make(chan error)
		var asked atomic.Bool
		go func() { left <- members[1].Leave(ctx, func() error { asked.Store(true); return nil }) }()
		time.Sleep(1400 * time.Millisecond)
		if use := planes[1].use(); use != 0 || asked.Load() {
			t.Errorf("a member that leaves admits %d parts, ready was called: %v", use, asked.Load())
		}
		if shot, _ := store.Snapshot(ctx); len(shot.Gone) != 0 {
			t.Error("it has told the ledger while something was yet to leave")
		}
		time.Sleep(200 * time.Millisecond)
		if shot, _ := store.Snapshot(ctx); len(shot.Gone) != 1 {
			t.Error("it has not told the ledger when all had left")
		}
		if err := <-left; err != nil {
			t.Error(err)
		}
		cancel()
		for _, m := range members {
			m.Wait()
		}
	})
}

func (p *fakePlane) setBusy(busy bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy = busy
}

func (s *memoryStore) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

// The first call of a process voids what the one before had, so it waits until all that was admitted then has left.
func TestMember_NewProcessWhilePacketsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var planes []*fakePlane
		var options []Options
		members := startThese(ctx, 1, 2, func(o *Options, p *fakePlane) { planes, options = append(planes, p), append(options, *o) })
		plane := &fakePlane{now: planes[0].now}
		o := options[0]
		o.Host.Name, o.Planes = "b", []Plane{plane}
		firstCtx, end := context.WithCancel(ctx)
		first := Start(firstCtx, o)
		time.Sleep(3 * time.Second)
		plane.setBusy(true)
		first.Short()
		time.Sleep(2 * time.Second)
		had := plane.use()
		planes[0].setBusy(true)
		end()
		first.Wait()
		until := plane.now() + 4*leaky.Second/5 // when the last of these packets leaves
		plane.mu.Lock()
		plane.busy, plane.drained = false, until
		plane.mu.Unlock()
		o.Host.Start = 2
		second := Start(ctx, o)
		most := uint32(0)
		for plane.now() < until {
			most = max(most, planes[0].use()+had)
			time.Sleep(10 * time.Millisecond)
		}
		if most > shaper.Whole+2 {
			t.Errorf("together %.3f while packets of before leave", float64(most)/shaper.Whole)
		}
		time.Sleep(3 * time.Second)
		if use := plane.use(); use == 0 {
			t.Errorf("the new process uses %d parts", use)
		}
		cancel()
		members[0].Wait()
		second.Wait()
	})
}

// A stall between two readings of clocks makes a lease shorter, and what follows later.
func TestMember_StallBetweenClocks(t *testing.T) {
	t.Parallel()
	clock := 100 * cluster.Second
	m := &Member{Options: Options{
		Now: func() leaky.Time { // it stands still for 1.5 s after the reading
			now := leaky.FromDuration(clock.Duration())
			clock += 1500 * cluster.Millisecond
			return now
		},
		Clock: func() cluster.Time { return clock },
	}}
	l := cluster.Lease{End: clock + cluster.Second, AloneAt: clock + 3*cluster.Second}
	end, alone := leaky.FromDuration(l.End.Duration()), leaky.FromDuration(l.AloneAt.Duration())
	if p := m.planeLease(l); p.End > end || p.AloneAt < alone {
		t.Errorf("the lease ends at %v, and the host is alone at %v; want at most %v, and at least %v", p.End, p.AloneAt, end, alone)
	}
}
