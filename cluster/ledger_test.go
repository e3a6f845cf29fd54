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

func TestLedger_LendsBesideOneAway(t *testing.T) {
	if wrong := lendBesideOneAway(); wrong != "" {
		t.Error(wrong)
	}
}

// lendBesideOneAway has the ledger hear of a host once in almost two leases: its lease lasts for long after the
// ledger counts it no more. It returns what is wrong, or "".
func lendBesideOneAway() string {
	g := newGroup(3)
	g.run(2 * Second)
	away := g.hosts[0]
	g.hosts = g.hosts[1:]
	g.run(9 * Second / 10)
	away.Reply(g.now, g.ledger.Call(g.now, away.Request(g.now, nil)))
	g.run(2 * Second / 10)
	asks := func(d Time) int64 {
		g.hosts[0].Want("db", Whole, 1)
		g.run(d)
		return g.use("db")[0]
	}
	floor := away.Params.Floor()
	for end := away.Lease().End; g.now+Second/10 < end; {
		if asks(Second/10) > floor {
			return "a host is lent a bucket that another in the group takes for cold"
		}
	}
	asks(2 * Second)
	if asks(Second) <= floor {
		return "a host that is away keeps the others from the bucket"
	}
	return ""
}

// TestLedger_ForgetsAHostTwice forgets a host again whose place another one has: there is no other place to give away,
// as the ledger has yet to hear of one host.
func TestLedger_ForgetsAHostTwice(t *testing.T) {
	g := newGroup(4)
	away := g.hosts[3]
	c := g.hosts[2]
	g.hosts = g.hosts[:3]
	g.run(2 * Second)
	g.hosts = g.hosts[:2] // the third is gone, the fourth has never reached this ledger
	g.run(10 * Second)
	for range 2 {
		if !g.ledger.Forget(g.now, "c") {
			t.Fatal("the host is not forgotten")
		}
	}
	g.run(10 * Second)
	use := func() int64 { return g.hosts[0].Use("db", g.now) + g.hosts[1].Use("db", g.now) }
	g.hosts = append(g.hosts, NewHost(HostOptions{Params: testParams(4), Name: "new", Start: 1, Left: true}, g.now))
	g.run(10 * Second)
	before := use()
	for range 2 {
		if !g.ledger.Forget(g.now, "c") {
			t.Fatal("the host is not forgotten")
		}
	}
	late := c.Leave(g.now)
	for range 2 {
		g.ledger.Call(g.now, late)
	}
	g.run(10 * Second)
	if n := g.ledger.state.places(g.now); n != 3 || use() != before {
		t.Errorf("%d places are taken, want 3; two hosts use %d, before %d", n, use(), before)
	}
	g.hosts = append(g.hosts, away)
	g.run(10 * Second)
	if !away.Joined() {
		t.Error("there is no place for the fourth host")
	}
	g.hosts = append(g.hosts, NewHost(HostOptions{Params: testParams(4), Name: "c", Start: 9, Left: true}, g.now))
	g.run(10 * Second)
	if g.hosts[4].Joined() || len(g.ledger.state.members) != 4 {
		t.Errorf("the host whose place is taken has joined: there are %d", len(g.ledger.state.members))
	}
}

// TestLedger_EpochsOfTwoProcesses has two processes go on from the same old state, one after the other, while the clock
// is behind: hosts must not take the second for the first.
func TestLedger_EpochsOfTwoProcesses(t *testing.T) {
	g := newGroup(2)
	g.now = 100 * Second
	g.run(Second)
	old := g.ledger.Clone()
	epochs := map[int64]bool{}
	for _, run := range []string{"b", "c", "d"} {
		l := old.Clone()
		l.Run = run
		epochs[l.Call(10*Second, g.hosts[0].Request(g.now, nil)).Epoch] = true
	}
	if len(epochs) != 3 {
		t.Errorf("epochs %v of three processes", epochs)
	}
}
