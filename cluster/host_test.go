package cluster

import "testing"

// group is a ledger and hosts whose calls take no time and are never lost.
type group struct {
	now    Time
	ledger Ledger
	hosts  []*Host
}

func newGroup(hosts int) *group {
	g := &group{now: Second, ledger: Ledger{Run: "a"}}
	for i := range hosts {
		g.hosts = append(g.hosts, NewHost(HostOptions{Params: testParams(hosts), Name: string(rune('a' + i)), Start: 1}, g.now))
	}
	return g
}

func testParams(hosts int) Params { return Params{Hosts: hosts, Lease: Second, Step: Second / 2} }

// run lets every host call ten times a second.
func (g *group) run(d Time) {
	for end := g.now + d; g.now < end; g.now += Second / 10 {
		for _, h := range g.hosts {
			for h.Reply(g.now, g.ledger.Call(g.now, h.Request(g.now, nil))) {
			}
		}
	}
}

func (g *group) use(key string) (parts []int64) {
	for _, h := range g.hosts {
		parts = append(parts, h.Use(key, g.now))
	}
	return parts
}

func TestHost_GetsWhatOthersDoNotWant(t *testing.T) {
	g := newGroup(4)
	if use := g.use("db"); use[0] != 0 {
		t.Errorf("a host that has just started uses %d parts", use[0])
	}
	g.run(2 * Second)
	for i, use := range g.use("db") {
		if use != Whole/4 {
			t.Errorf("host %d uses %d parts of a cold bucket, not its floor of %d", i, use, Whole/4)
		}
	}
	g.hosts[1].Want("db", Whole, 1)
	g.run(Second)
	if use := g.use("db"); use[1] < Whole*9/10 {
		t.Errorf("the only host that wants the bucket uses %d of %d parts", use[1], Whole)
	}
	g.hosts[2].Want("db", Whole, 1)
	g.run(Second)
	if use := g.use("db"); use[1] < Whole*45/100 || use[2] < Whole*45/100 || use[1]+use[2] > Whole {
		t.Errorf("two hosts that want all use %v parts", use)
	}
}

func TestHost_AloneAfterItsLease(t *testing.T) {
	for alone, want := range map[Alone]int64{AloneShare: Whole / 2, AloneClosed: 0, AloneOpen: Whole} {
		g := newGroup(2)
		g.hosts[0].Alone = alone
		g.run(2 * Second)
		g.hosts[0].Want("db", Whole, 1)
		g.run(Second)
		if use := g.use("db"); use[0] < Whole*9/10 {
			t.Fatalf("alone = %d: %v", alone, use)
		}
		g.now += 4 * Second
		if use := g.hosts[0].Use("db", g.now); use != want {
			t.Errorf("alone = %d: uses %d parts after its lease, want %d", alone, use, want)
		}
	}
}

func TestHost_LeavesAndReturns(t *testing.T) {
	g := newGroup(2)
	g.run(2 * Second)
	g.hosts[0].Want("db", Whole, 1)
	left := g.hosts[1]
	for left.Reply(g.now, g.ledger.Call(g.now, left.Leave(g.now))) {
	}
	g.hosts = g.hosts[:1]
	g.run(5 * Second)
	if use := g.use("db"); use[0] < Whole*9/10 || left.Use("db", g.now) != 0 {
		t.Fatalf("the host that remains uses %v parts, the one that left %d", use, left.Use("db", g.now))
	}
	back := NewHost(HostOptions{Params: testParams(2), Name: left.Name, Start: 2, Left: true}, g.now)
	if use := back.Use("db", g.now+Second*100); use != 0 {
		t.Fatalf("a host that left uses %d parts before it has joined", use)
	}
	g.hosts = append(g.hosts, back)
	back.Want("db", Whole, 1)
	g.run(2 * Second)
	if use := g.use("db"); use[0]+use[1] > Whole || use[1] < Whole*45/100 {
		t.Errorf("after its return the hosts use %v parts", use)
	}
}
