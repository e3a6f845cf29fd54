package cluster

import "testing"

// TestLedger_MarkedAndExpired has a host come back that was to give something of a bucket back, whose
// part is void by now, and that does not mention the bucket.
func TestLedger_MarkedAndExpired(t *testing.T) {
	g := newGroup(2)
	g.run(2 * Second)
	g.hosts[0].Want("db", Whole, 1)
	g.run(Second)
	g.hosts[1].Want("db", Whole, 1)
	away := g.hosts[0]
	g.hosts = g.hosts[1:]
	g.run(Second / 5) // the other one asks, and then wants nothing any more
	g.hosts[0].Want("db", 0, 1)
	g.run(4 * Second)
	q := away.Request(g.now, nil)
	q.Items = nil
	if r := g.ledger.Call(g.now, q); !r.Resync || len(r.Grants) > 0 {
		t.Errorf("the ledger has not forgotten a host that was away: %+v", r)
	}
}
