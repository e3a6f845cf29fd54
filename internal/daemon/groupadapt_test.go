package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/member"
	"shaperd.dev/shaperd/conn/adaptive"
	"shaperd.dev/shaperd/internal/sharing"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// partedStore is the way of one host to the ledger.
type partedStore struct {
	*ledgerInMemory
	away atomic.Bool // nothing gets through
	mute atomic.Bool // calls do not
}

var errParted = errors.New("parted")

func (s *partedStore) Call(ctx context.Context, q *cluster.Request) (*cluster.Reply, error) {
	if s.away.Load() || s.mute.Load() {
		return nil, errParted
	}
	return s.ledgerInMemory.Call(ctx, q)
}

func (s *partedStore) Snapshot(ctx context.Context, keys ...string) (cluster.Snapshot, error) {
	if s.away.Load() {
		return cluster.Snapshot{}, errParted
	}
	return s.ledgerInMemory.Snapshot(ctx, keys...)
}

// idlePlane has an adaptive limit, and nothing in flight.
type idlePlane struct {
	state *shaper.LimitState
	clock *pacer.Clock
}

func (p *idlePlane) AdaptiveReports() map[*shaper.LimitState]adaptive.Report {
	return map[*shaper.LimitState]adaptive.Report{p.state: new(adaptive.Load).Report(p.clock.Now())}
}

func (p *idlePlane) FollowAdaptive() {}

// adaptHost is a host of a group with an adaptive limit.
type adaptHost struct {
	store partedStore
	state *shaper.LimitState
}

// joinAdapting starts a host that has found a maximum before, or not if that is 0.
func joinAdapting(t *testing.T, ledger *ledgerInMemory, name string, found int, away bool) *adaptHost {
	h := newServer(t, fmt.Sprintf(`
[[listen]]
name       = "db"
address    = ["tcp://127.0.0.1:5432"]
downstream = ["127.0.0.1:5433"]
[[limit]]
name            = "bears"
match           = { listen = ["db"] }
max_connections = 1000
adapt           = "on"
min_connections = 2
shared          = true
[shared]
hosts = 3
name  = %q
store = "redis://10.0.0.9:6379"
`, name))
	l, _ := h.current()
	g := &adaptHost{store: partedStore{ledgerInMemory: ledger}, state: h.shaper.Policy().State(0)}
	g.store.away.Store(away)
	h.group.clock = pacer.NewClock()
	h.group.proxy = &idlePlane{g.state, h.group.clock}
	if found > 0 {
		g.state.Adaptive.Store(&shaper.AdaptiveStatus{Limit: found, Most: found, Current: found})
	}
	info := sharing.NewInfo("1.0", l.Config)
	h.group.info.Store(info)
	c := l.Config.Shared
	ctx, cancel := context.WithCancel(t.Context())
	m := member.Start(ctx, member.Options{
		Host:     cluster.HostOptions{Params: sharing.Params(&c), Name: name, Start: int64(ledger.now()), Info: info.Text(nil)},
		Interval: c.Interval, Store: &g.store, Planes: []member.Plane{h.plane, &busyPlane{}}, Names: sharedNames{h.shaper, sharing.Params(&c)},
		Clock: ledger.now, Now: func() leaky.Time { return leaky.FromDuration(time.Since(ledger.start)) }, Log: h.server.log,
	})
	done := make(chan struct{})
	go func() { defer close(done); h.group.adapt(ctx, m, c) }()
	t.Cleanup(func() { cancel(); m.Wait(); <-done })
	return g
}

func (g *adaptHost) limit() (n int, leader string) {
	if a := g.state.Adaptive.Load(); a != nil {
		return a.Limit, a.Leader
	}
	return 0, ""
}

// The host that leads was cut off, and the others have found less meanwhile. When it is back, nobody takes over what it knew.
func TestGroupAdapt_LeaderBack(t *testing.T) {
	t.Parallel()
	ledger := newLedger()
	a, b, c := joinAdapting(t, ledger, "a", 500, true), joinAdapting(t, ledger, "b", 20, false), joinAdapting(t, ledger, "c", 20, false)
	time.Sleep(3 * time.Second)
	if n, leader := b.limit(); n > 40 || leader != "b" {
		t.Fatalf("%d of %q before", n, leader)
	}
	if _, leader := a.limit(); leader != "" {
		t.Errorf("%q leads, says one that is cut off", leader)
	}
	a.store.away.Store(false)
	for range 200 {
		time.Sleep(10 * time.Millisecond)
		for _, h := range []*adaptHost{b, c} {
			if n, _ := h.limit(); n > 40 {
				t.Fatalf("one had %d for a moment", n)
			}
		}
	}
	if n, leader := a.limit(); n > 40 || leader != "a" {
		t.Errorf("%d of %q after", n, leader)
	}
}

// A host whose calls do not get through does not lead, though it reads what others say.
func TestGroupAdapt_MuteLeader(t *testing.T) {
	t.Parallel()
	ledger := newLedger()
	b := joinAdapting(t, ledger, "b", 20, false)
	a := joinAdapting(t, ledger, "a", 500, true)
	a.store.mute.Store(true)
	a.store.away.Store(false)
	time.Sleep(3 * time.Second)
	na, leaderA := a.limit()
	nb, leaderB := b.limit()
	if leaderA != "b" || leaderB != "b" || na != nb {
		t.Errorf("%d of %q, %d of %q", na, leaderA, nb, leaderB)
	}
}

// The ledger loses its state, and the first host is started again: it takes over what the others know.
func TestGroupAdapt_LedgerAndLeaderRestart(t *testing.T) {
	t.Parallel()
	for _, delay := range []time.Duration{0, 300 * time.Millisecond, time.Second} {
		t.Run(delay.String(), func(t *testing.T) {
			t.Parallel()
			ledger := newLedger()
			b, c := joinAdapting(t, ledger, "b", 200, false), joinAdapting(t, ledger, "c", 200, false)
			time.Sleep(time.Second)
			b.store.away.Store(true)
			c.store.away.Store(true)
			time.Sleep(2 * time.Second) // the machine with the ledger boots
			ledger.mu.Lock()
			ledger.ledger = cluster.Ledger{Run: "other"}
			ledger.mu.Unlock()
			a := joinAdapting(t, ledger, "a", 0, false)
			time.Sleep(delay)
			b.store.away.Store(false)
			c.store.away.Store(false)
			time.Sleep(3 * time.Second)
			for _, h := range []*adaptHost{a, b, c} {
				if n, leader := h.limit(); n < 100 || leader != "a" {
					t.Errorf("%d of %q, and 200 was found", n, leader)
				}
			}
		})
	}
}
