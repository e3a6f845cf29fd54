package conn

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/member"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// shareNames names the pools of a policy.
type shareNames struct{ policy func() *shaper.Policy }

func (n shareNames) Name(k shaper.Key, slots bool) string {
	name := n.policy().ShareName(k)
	if slots && name != "" {
		name = cluster.SlotsPrefix + name
	}
	return name
}

func (n shareNames) Key(name string) (shaper.Key, int, bool) {
	k, _, err := n.policy().ParseShareName(strings.TrimPrefix(name, cluster.SlotsPrefix))
	return k, 0, err == nil
}

func (shareNames) Always() []string       { return nil }
func (shareNames) Policy() *shaper.Policy { return nil }

func listenerPolicy(t testing.TB, s *shaper.Shaper, limit shaper.Limit, listeners ...string) *shaper.Policy {
	t.Helper()
	limit.IPv4Prefix, limit.IPv6Prefix = 32, 64
	limit.Match.Listen = listeners
	var all []shaper.Listener
	for _, name := range listeners {
		all = append(all, shaper.Listener{Name: name, Addresses: []shaper.Address{{Protocol: shaper.TCP}}})
	}
	p, err := s.Compile([]shaper.Limit{limit}, all, nil, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Connections of a listener that is gone keep their slots, and the other host gets only the rest.
//
// The key of the limit is "listener". Host a is reloaded without "web", and b, which is not yet, has all clients.
func TestLending_RemovedListener(t *testing.T) {
	for _, tt := range []struct {
		name   string
		at     int // connections in flight at a
		before int // connections that come to b before the reload
	}{
		{"the pool is hot", 6, 8},
		{"it becomes hot later", 3, 0},
		{"it becomes hot later, and all own slots are used", 4, 0},
	} {
		t.Run(tt.name, func(t *testing.T) { removeListener(t, tt.at, tt.before) })
	}
}

func removeListener(t *testing.T, at, before int) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		s := &lenders{
			T: t, ledger: cluster.Ledger{Run: "a"}, rnd: testutil.Rand(t), hosts: make([]*lender, 2),
			clock: func() cluster.Time { return cluster.FromDuration(time.Since(start)) + cluster.Second },
			limit: shaper.Limit{Name: "cap", Key: shaper.KeyListen, Shared: true, MaxConnections: 8, QueueTimeout: time.Hour, MaxQueue: 1000},
		}
		for i := range s.hosts {
			now := time.Now()
			l := &lender{rig: newAdmissionRig(s, s.limit), start: now, rnd: s.rnd}
			p := listenerPolicy(t, l.rig.shaper, s.limit, "web", "api")
			swapPolicy(p, func() { l.rig.shaper.Swap(p, l.rig.now) }, l.rig.now, l.rig.admission)
			l.rig.admission.sharing.reload(l.rig.now)
			ctx, cancel := context.WithCancel(context.Background())
			l.member = member.Start(ctx, member.Options{
				Host:     cluster.HostOptions{Params: cluster.Params{Hosts: 2, Lease: cluster.Second, Step: cluster.Second / 2}, Name: string(rune('a' + i)), Start: int64(s.clock())},
				Interval: 100 * time.Millisecond, Store: s, Planes: []member.Plane{l}, Names: shareNames{l.rig.shaper.Policy},
				Clock: s.clock, Now: func() leaky.Time { return leaky.Second + leaky.FromDuration(time.Since(now)) }, Log: slog.New(slog.DiscardHandler),
			})
			l.rig.admission.sharing.onShort = l.member.Short
			l.stop = func() { cancel(); l.member.Wait() }
			s.hosts[i] = l
			defer l.stop()
		}
		enter := func(l *lender, n int) {
			l.do(func() {
				for i := range n {
					v := &visitor{rig: l.rig}
					v.owner, v.listen, v.flow = v, "web", *flowFrom(fmt.Sprint("10.0.0.", i), 1)
					l.rig.admission.acquire(&v.waiter, l.rig.now)
				}
			})
		}
		pass := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
				for _, l := range s.hosts {
					l.do(func() {})
				}
			}
		}
		pass(5 * time.Second)
		a, b := s.hosts[0], s.hosts[1]
		enter(a, at)
		pass(5 * time.Second)
		enter(b, before)
		pass(5 * time.Second)
		a.do(func() {
			r := a.rig
			p := listenerPolicy(t, r.shaper, s.limit, "api")
			swapPolicy(p, func() { r.shaper.Swap(p, r.now) }, r.now, r.admission)
			r.admission.sharing.reload(r.now)
			for v := range r.in { // as session.updateSlots of a removed listener
				v.flow.Origin = p.ListenerIndex(v.listen)
				v.waiter.slots.update(&v.flow, p.Route(&v.flow), true, r.now)
			}
			r.admission.run(r.now)
		})
		a.member.SetInfo(1, "x")
		enter(b, 8-before)
		pass(10 * time.Second)
		if n, m := a.inFlight(), b.inFlight(); n != at || n+m != 8 {
			t.Errorf("%d in flight at a and %d at b, want %d and %d", n, m, at, 8-at)
		}
		a.do(func() {
			for v := range a.rig.in {
				v.finish()
			}
		})
		pass(5 * time.Second)
		if n := b.inFlight(); n != 6 {
			t.Errorf("%d in flight at b, want 6: those of a have ended, and 2 slots are always its own", n)
		}
	})
}
