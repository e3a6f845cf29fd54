package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// The faults of a Redis. They leave it running, with the same address.

func (r *redis) killed() fault {
	return fault{name: "redis killed, back empty", inject: r.kill, mend: r.start, lasts: 500 * time.Millisecond, after: 2 * time.Second}
}

func (r *redis) flushed() fault {
	return fault{name: "FLUSHALL", inject: func() { r.do("FLUSHALL") }, after: 1500 * time.Millisecond}
}

func (r *redis) stopped(lasts time.Duration) fault {
	return fault{
		name: fmt.Sprintf("redis stopped for %v", lasts), lasts: lasts, after: 2 * time.Second,
		inject: func() { must(r.t, r.Signal(unix.SIGSTOP)) }, mend: func() { must(r.t, r.Signal(unix.SIGCONT)) },
	}
}

func (r *redis) paused(lasts time.Duration) fault {
	return fault{
		name: fmt.Sprintf("CLIENT PAUSE %v", lasts), lasts: lasts, after: 2 * time.Second,
		inject: func() { r.do("CLIENT", "PAUSE", fmt.Sprint(lasts.Milliseconds()), "ALL") }, mend: func() {},
	}
}

// evicted makes a Redis evict keys of the group: others write, with a maximum of memory.
func (g *group) evicted(r *redis) fault {
	const fill = `for i = 1, 40 do redis.call('SET', KEYS[1] .. i, string.rep('x', 100000)) end`
	return fault{name: "keys evicted", after: 2500 * time.Millisecond, inject: func() {
		before := g.gateways[0].losses()
		r.do("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
		r.do("CONFIG", "SET", "maxmemory", fmt.Sprint(r.field("used_memory")+1<<20))
		for i := 0; g.gateways[0].losses() == before && i < 1000; i++ {
			r.do("EVAL", fill, "1", fmt.Sprint("junk", i, "-"))
		}
		r.do("CONFIG", "SET", "maxmemory", "0")
		if g.gateways[0].losses() == before {
			g.t.Error("redis evicted no key of the group")
		}
	}}
}

// losses returns how often the gateway has noticed that the ledger has started over.
func (gw *gateway) losses() int { return strings.Count(gw.daemon.Log.String(), "has started over") }

// cutOff cuts gateways off from a Redis: their calls, the replies, or both.
func (g *group) cutOff(name string, lasts time.Duration, calls, replies bool, r *redis, gateways ...*gateway) fault {
	return g.separated(name, lasts, calls, replies, []netip.Addr{r.at.Addr()}, gateways...)
}

// separated drops packets that gateways send to some addresses, that they get from there, or both.
func (g *group) separated(name string, lasts time.Duration, sent, received bool, peers []netip.Addr, gateways ...*gateway) fault {
	apply := func(c lab.Cut) {
		for _, gw := range gateways {
			must(g.t, gw.Apply(c))
		}
	}
	var c lab.Cut
	if sent {
		c.To = peers
	}
	if received {
		c.From = peers
	}
	return fault{name: name, inject: func() { apply(c) }, mend: func() { apply(lab.Cut{}) }, lasts: lasts, after: 2 * time.Second}
}

// replicate adds a replica of a Redis, on a host of its own.
func (g *group) replicate(primary *redis) *redis {
	g.t.Helper()
	replica := g.addStore(1).redis(g.t, netip.AddrPortFrom(groupStores[1], primary.at.Port()), "--replicaof", primary.at.Addr().String(), fmt.Sprint(primary.at.Port()))
	waitFor(g.t, patience, func() error {
		if replica.do("DBSIZE") == "0" {
			return errors.New("the replica has nothing yet")
		}
		return nil
	})
	return replica
}

// loseWrites cuts a replica off from its primary.
func (r *redis) loseWrites(primary *redis) {
	must(r.t, r.host.Apply(lab.Cut{From: []netip.Addr{primary.at.Addr()}, To: []netip.Addr{primary.at.Addr()}}))
}

// failedOver promotes a replica that has missed the last writes, and gives it the address of its primary.
func (g *group) failedOver(primary *redis) fault {
	replica := g.replicate(primary)
	return fault{
		name: "replica promoted, 1 s of writes lost", lasts: time.Second, after: 2 * time.Second,
		inject: func() { replica.loseWrites(primary) },
		mend: func() {
			primary.kill()
			must(g.t, replica.host.Apply(lab.Cut{}))
			replica.do("REPLICAOF", "NO", "ONE")
			must(g.t, primary.host.Run("ip", "address", "del", primary.at.Addr().String()+"/16", "dev", lab.StarLink))
			must(g.t, replica.host.AddAddress(lab.StarLink, 16, primary.at.Addr()))
			for _, gw := range g.gateways {
				must(g.t, gw.Run("ip", "neigh", "flush", "dev", lab.StarLink))
			}
		},
	}
}

// drained ends a daemon under load, in the ordinary way, and starts another one.
func (g *group) drained(gw *gateway) fault {
	return fault{name: gw.name + " drained and restarted", inject: func() { g.drain(gw); g.start(gw) }, after: 1500 * time.Millisecond, least: 0.4}
}

// crashed kills daemons, and starts others after a while.
func (g *group) crashed(name string, lasts time.Duration, gateways ...*gateway) fault {
	return fault{
		name: name, lasts: lasts, after: 2 * time.Second, mayFail: true,
		inject: func() {
			for _, gw := range gateways {
				g.kill(gw)
			}
		},
		mend: func() { g.start(gateways...) },
	}
}
