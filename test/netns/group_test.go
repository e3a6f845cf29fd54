package netns

import (
	"context"
	"testing"
	"time"
)

// TestGroup_Static has three gateways without a ledger: each has a third.
func TestGroup_Static(t *testing.T) {
	g := newGroup(t)
	g.start(g.all()...)
	g.load.setHot(0, 1, 2)
	g.run(fault{name: "all hot", after: 1500 * time.Millisecond, least: 0.5})
	g.load.setHot(1)
	g.run(fault{name: "one hot", after: 1500 * time.Millisecond, least: 0.25})
}

// TestGroup_Redis has gateways with a Redis, to which everything happens that may happen to one.
func TestGroup_Redis(t *testing.T) {
	g := newGroup(t)
	r := g.useRedis()
	stranger := g.gateways[2]
	stranger.setPassword(t, "wrong")
	g.start(g.all()...)
	g.load.setHot(0, 1, 2)
	g.run(fault{name: "start", after: 3 * time.Second, least: 0.1})
	alone := g.run(fault{name: "a gateway has a wrong password", after: 1500 * time.Millisecond})
	if share := alone.by[2]; share > 0 {
		t.Errorf("the gateway with a wrong password, which has never joined, passed %.1f %% of the rate", 100*share)
	}
	stranger.daemon.awaitLog("wrong user or password")
	g.run(fault{name: "its file corrected", inject: func() { stranger.setPassword(t, redisPassword) }, after: 1500 * time.Millisecond})
	defer g.moveHotSpot()()
	g.run(fault{name: "none", after: 4 * time.Second, follow: true})
	g.run(r.killed())
	g.run(r.flushed())
	g.run(r.stopped(1500 * time.Millisecond))
	g.run(g.evicted(r))
	g.run(g.cutOff("replies to one lost", 1500*time.Millisecond, false, true, r, g.gateways[1]))
	g.run(g.failedOver(r))
}

// TestGroup_Embedded has gateways of which one serves the ledger. Each is restarted under load, and killed.
func TestGroup_Embedded(t *testing.T) {
	g := newGroup(t)
	g.useEmbedded(1)
	g.start(g.all()...)
	g.load.setHot(0, 1, 2)
	g.run(fault{name: "start", after: 3 * time.Second}) // until the ledger knows that nobody else has a share
	for _, gw := range g.gateways {
		g.run(g.drained(gw))
	}
	defer g.moveHotSpot()()
	g.run(fault{name: "none", after: 4 * time.Second, follow: true})
	g.run(g.crashed("a gateway killed", 500*time.Millisecond, g.gateways[1]))
	g.run(g.crashed("the gateway with the ledger killed", 500*time.Millisecond, g.gateways[0]))
	g.run(g.crashed("all killed", 500*time.Millisecond, g.all()...))
}

// moveHotSpot moves the hot spot until the returned function is called.
func (g *group) moveHotSpot() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.load.move(ctx, 2*time.Second)
	}()
	stop = func() { cancel(); <-done }
	g.t.Cleanup(stop)
	return stop
}
