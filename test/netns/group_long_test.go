package netns

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// TestLongGroupOutages has longer faults than the other tests of groups.
func TestLongGroupOutages(t *testing.T) {
	g := newGroup(t)
	r := g.useRedis()
	g.start(g.all()...)
	stop := g.moveHotSpot()
	defer stop()
	g.run(fault{name: "start", after: 3 * time.Second})
	g.run(fault{name: "none", after: 20 * time.Second, follow: true})
	g.run(r.stopped(8 * time.Second))
	g.run(r.paused(5 * time.Second))
	g.run(fault{name: "redis gone for 12 s", inject: r.kill, mend: r.start, lasts: 12 * time.Second, after: 4 * time.Second})
	for _, gw := range g.gateways {
		g.run(g.cutOff(gw.name+" cut off", 8*time.Second, true, true, r, gw))
		g.run(g.cutOff("calls of "+gw.name+" lost", 8*time.Second, true, false, r, gw))
		g.run(g.cutOff("replies to "+gw.name+" lost", 8*time.Second, false, true, r, gw))
	}
	g.run(g.cutOff("all cut off", 8*time.Second, true, true, r, g.all()...))
	g.run(g.crashed("a gateway killed", 6*time.Second, g.gateways[0]))
	g.run(g.crashed("all killed", time.Second, g.all()...))
	for _, gw := range g.gateways {
		g.run(g.drained(gw))
	}
	g.run(g.failedOver(r))
}

// TestLongGroupSentinel has a Sentinel replace a Redis that dies, by a replica that has missed its last
// writes.
func TestLongGroupSentinel(t *testing.T) {
	for _, failover := range []string{"fast", "strict"} {
		t.Run(failover, func(t *testing.T) {
			g := newGroup(t)
			r := g.useRedis()
			s := g.addHost("sentinel", groupStores[1].Next()).sentinel(t, groupStores[1].Next(), r)
			g.setStore(fmt.Sprintf("redis+sentinel://%v/primary", s))
			for _, gw := range g.gateways {
				gw.shared += fmt.Sprintf("failover = %q\n", failover)
			}
			g.start(g.all()...)
			defer g.moveHotSpot()()
			g.run(fault{name: "start", after: 4 * time.Second})
			replica := g.replicate(r)
			g.run(fault{name: "none", after: 12 * time.Second, follow: true}) // until the Sentinel knows the replica
			g.run(fault{
				name: "primary killed, 1 s of writes lost", lasts: time.Second, after: 12 * time.Second,
				inject: func() { replica.loseWrites(r) },
				mend: func() {
					r.kill()
					must(t, replica.host.Apply(lab.Cut{}))
				},
			})
			if role := replica.do("ROLE"); !strings.HasPrefix(role, "master") {
				t.Errorf("the replica was not promoted: %s", role)
			}
		})
	}
}

// TestLongGroupSoak has random faults, for -soak.
func TestLongGroupSoak(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for name, use := range map[string]func(*group) []func() fault{
		"redis": (*group).soakRedis, "embedded": (*group).soakEmbedded,
	} {
		t.Run(name, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			g := newGroup(t)
			faults := use(g)
			g.start(g.all()...)
			stop := g.moveHotSpot()
			defer stop()
			g.run(fault{name: "start", after: 3 * time.Second})
			mayFail := false // clients may notice late what the fault before has ended
			for end := time.Now().Add(*soak); time.Now().Before(end); {
				f := faults[random.IntN(len(faults))]()
				f.lasts = f.lasts/4 + time.Duration(random.Int64N(int64(f.lasts)*2+1))
				f.after = time.Duration(random.Int64N(int64(f.after) * 2))
				f.least = math.SmallestNonzeroFloat64 // the next one may come before all is as it was
				mayFail, f.mayFail = f.mayFail, f.mayFail || mayFail
				g.run(f)
			}
			passed, took := 0.0, 0.0
			for _, o := range g.results {
				passed, took = passed+o.use*o.took.Seconds(), took+o.took.Seconds()
			}
			t.Logf("%d faults in %.0f s, %.1f %% of the rate arrived", len(g.results)-1, took, 100*passed/took)
			if passed < 0.3*took {
				t.Error("little arrived")
			}
		})
	}
}

// soakRedis makes the group use a Redis, and returns what may happen.
func (g *group) soakRedis() []func() fault {
	r := g.useRedis()
	return append(g.soakGateways([]netip.Addr{r.at.Addr()}),
		r.killed, r.flushed,
		func() fault { return g.evicted(r) },
		func() fault { return r.stopped(1500 * time.Millisecond) },
		func() fault { return r.paused(1500 * time.Millisecond) },
	)
}

// soakEmbedded makes the group serve its ledger, and returns what may happen.
func (g *group) soakEmbedded() []func() fault {
	g.useEmbedded(1)
	var gateways []netip.Addr
	for _, gw := range g.gateways {
		gateways = append(gateways, gw.addr)
	}
	return g.soakGateways(gateways)
}

// soakGateways returns what may happen to gateways and to their connections to a store.
func (g *group) soakGateways(store []netip.Addr) (list []func() fault) {
	for _, gw := range g.gateways {
		list = append(list,
			func() fault { return g.crashed(gw.name+" killed", 2*time.Second, gw) },
			func() fault { return g.separated(gw.name+" cut off", 3*time.Second, true, true, store, gw) },
			func() fault { return g.separated("calls of "+gw.name+" lost", 3*time.Second, true, false, store, gw) },
			func() fault { return g.separated("replies to "+gw.name+" lost", 3*time.Second, false, true, store, gw) },
			func() fault { return g.drained(gw) },
		)
	}
	return append(list,
		func() fault { return g.crashed("all killed", time.Second, g.all()...) },
		func() fault { return g.separated("all cut off", 4*time.Second, true, true, store, g.all()...) },
		func() fault { return fault{name: "none", after: 3 * time.Second} },
	)
}
