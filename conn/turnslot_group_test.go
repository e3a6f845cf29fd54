package conn

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/member"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// join makes r a member of the group of s.
func (r *proxyRig) join(s *lenders, name string) {
	ctx, cancel := context.WithCancel(context.Background())
	m := member.Start(ctx, member.Options{
		Host: cluster.HostOptions{
			Params: cluster.Params{Hosts: 2, Lease: cluster.Second, Step: cluster.Second / 2}, Name: name, Start: int64(s.clock()),
		},
		Interval: 50 * time.Millisecond, Store: s, Planes: []member.Plane{r.proxy},
		Names: onePool{shaper.Key{Limit: r.shaper.Policy().State(0).ID}},
		Clock: s.clock, Now: r.proxy.clock.Boot, Log: slog.New(slog.DiscardHandler),
	})
	r.proxy.home.loop.call(func(leaky.Time) { r.proxy.home.admission.sharing.onShort = m.Short })
	r.t.Cleanup(func() { cancel(); m.Wait() })
}

// The turns at two proxies are together no more than the limit has, the slots go where questions wait, and those who stay
// silent have none.
func TestTurnSlot_Group(t *testing.T) {
	t.Parallel()
	const slots = 8
	sv := newTurnServer(t, func() time.Duration { return 5*time.Millisecond + rand.N(10*time.Millisecond) })
	begun := time.Now()
	s := &lenders{T: t, ledger: cluster.Ledger{Run: "a"}, clock: func() cluster.Time { return cluster.FromDuration(time.Since(begun)) + cluster.Second }}
	limit := turnLimit(slots, 2*time.Millisecond)
	limit.Shared = true
	var proxies []*proxyRig
	for _, name := range []string{"a", "b"} {
		r := start(t, shaper.TCP, sv.addr, limit)
		r.join(s, name)
		proxies = append(proxies, r)
	}
	for i := range 4 {
		r := proxies[i%2]
		// It asks without a pause, and the other one has as many connections that do not ask.
		for range 40 {
			dial(t, proxies[(i+1)%2].addr())
		}
		end := r.askOnOpen(t, 40)
		testutil.WaitFor(t, "most slots to be where questions wait", func() bool { return r.inTurn() >= slots-2 })
		end()
	}
	limit.TurnGap = 200 * time.Millisecond // so that none pauses for as long
	for _, r := range proxies {
		r.apply(limit)
	}
	// As many as can have slots here never pause, and do not know that others wait elsewhere.
	ends := []func(){proxies[0].askOnOpen(t, slots-2)}
	testutil.WaitFor(t, "most slots to be at one", func() bool { return proxies[0].inTurn() >= slots-2 })
	ends = append(ends, proxies[1].askOnOpen(t, slots))
	testutil.WaitFor(t, "both to have slots beyond their own", func() bool { return proxies[0].inTurn() > slots/4 && proxies[1].inTurn() > slots/4 })
	for _, end := range ends {
		end()
	}
	if n := sv.most.Load(); n > slots || n < slots/2 {
		t.Errorf("%d questions at once, of %d", n, slots)
	}
	for _, r := range proxies {
		r.freed()
	}
}
