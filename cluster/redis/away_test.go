package redis

import (
	"testing"

	"shaperd.dev/shaperd/cluster"
)

// TestParity_WantOfHostThatIsAway has a reply, which gives nothing, see first that a host is away which wants more
// slots: both ledgers remember that it cannot take more.
func TestParity_WantOfHostThatIsAway(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		w := newTwin(t, startServer(t, binary))
		p := cluster.Params{Hosts: 3, Lease: cluster.Second, Step: cluster.Second / 2}
		now := 1000 * cluster.Second
		start := func(name string) *cluster.Host {
			return cluster.NewHost(cluster.HostOptions{Params: p, Name: name, Start: 1}, now)
		}
		away, gives, asks := start("away"), start("gives"), start("asks")
		run := func(d cluster.Time, hosts ...*cluster.Host) {
			for end := now + d; now < end; now += cluster.Second / 10 {
				for _, h := range hosts {
					for h.Reply(now, w.Call(now, h.Request(now, nil))) {
					}
				}
			}
		}
		slots := cluster.SlotsPrefix + "db"
		run(2*cluster.Second, away, gives, asks)
		away.Want(slots, cluster.Whole, 1)
		gives.Want(slots, cluster.Whole, 1)
		run(2*cluster.Second, away, gives, asks)
		expiry := now - cluster.Second/10 + 2*p.Lease + p.Step
		run(2*cluster.Second, gives, asks)
		asks.Want(slots, cluster.Whole, 1)
		w.Call(now, asks.Request(now, nil))
		now = expiry
		q := gives.Request(now, nil)
		w.Call(now, q)
		w.compareSnapshots(now)
		for _, h := range w.ledger.Snapshot(now).Buckets[0].Holders {
			if h.Host == "away" && (h.Want != h.Parts || h.Want == 0 || len(q.Items) > 0) {
				t.Errorf("the host that is away wants %d parts and has %d; the call has %d items", h.Want, h.Parts, len(q.Items))
			}
		}
	})
}
