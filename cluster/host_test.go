package cluster

import (
	"fmt"
	"testing"
)

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

// Buckets of each kind become cold again when nobody needs them, also if the host that needed them was restarted.
func TestHost_RemindsOfWhatNobodyNeeds(t *testing.T) {
	g := newGroup(3)
	g.run(2 * Second)
	keys := []string{"db", SlotsPrefix + "db", TicketsPrefix + "db"}
	for _, key := range keys {
		g.hosts[0].Want(key, Whole, 1)
	}
	g.run(Second)
	if n := g.hosts[1].Status(g.now).Hot; n != len(keys) {
		t.Fatalf("%d buckets are hot, want %d", n, len(keys))
	}
	g.hosts[0] = NewHost(HostOptions{Params: testParams(3), Name: g.hosts[0].Name, Start: 2}, g.now)
	g.run(65 * Second)
	if n := g.hosts[1].Status(g.now).Hot; n != 0 {
		t.Errorf("%d buckets are hot that nobody needs: %+v", n, g.hosts[1].Status(g.now).Shares)
	}
	for i := range 100 {
		g.hosts[1].Want(fmt.Sprint(i), Whole, 1)
	}
	g.run(Second)
	g.hosts[1] = NewHost(HostOptions{Params: testParams(3), Name: g.hosts[1].Name, Start: 2}, g.now)
	g.run(65 * Second)
	if n := g.hosts[2].Status(g.now).Hot; n != 0 {
		t.Errorf("%d of 100 buckets are hot that nobody needs", n)
	}
}

// A host does not remember buckets for which it has no more need: of any, but those that the ledger may still know
// that it wants, and never so many of these that a call takes long.
func TestHost_ForgetsWhatItAskedFor(t *testing.T) {
	g := newGroup(2)
	g.run(2 * Second)
	h := g.hosts[0]
	key := func(i int) string { return fmt.Sprint(SlotsPrefix, "key", i) }
	for i := range 3 * maxAsked {
		h.Want(key(i), 0, 1)
	}
	if n := len(h.asked); n != 0 {
		t.Errorf("%d buckets are known that it never wanted", n)
	}
	for i := range 3 * maxAsked { // calls are lost
		h.Want(key(i), Whole, 1)
		if i%1000 == 0 {
			h.Request(g.now, nil)
		}
		h.Want(key(i), 0, 1)
	}
	if n := len(h.asked); n > maxAsked {
		t.Errorf("%d buckets are known that it wanted while the ledger was away", n)
	}
	g.run(20 * Second)
	if n := len(h.asked); n != 0 || !h.Joined() {
		t.Errorf("joined %v, and %d buckets are known when the ledger knows that they are not wanted", h.Joined(), n)
	}
	h.Want(key(0), Whole, 1)
	g.run(Second)
	if use := g.use(key(0)); use[0] < Whole*9/10 {
		t.Errorf("it uses %v of a bucket that it wants again", use)
	}
}

// TestHost_ClaimsAllAtANewLedger claims leases that do not fit into one call, while another host makes all their
// buckets hot, and units that were admitted before are yet to leave.
func TestHost_ClaimsAllAtANewLedger(t *testing.T) {
	g := newGroup(2)
	g.run(2 * Second)
	for i := range 3 * MaxItems / 2 {
		for _, h := range g.hosts {
			h.Want(fmt.Sprintf("k%03d", i), Whole, 1)
		}
	}
	g.run(2 * Second)
	g.ledger = Ledger{Run: "b"}
	a, b := g.hosts[0], g.hosts[1]
	for b.Reply(g.now, g.ledger.Call(g.now, b.Request(g.now, nil))) {
	}
	inUse := func(key string) int64 {
		if key == "k000" {
			return Whole / 2
		}
		return 0
	}
	a.Reply(g.now, g.ledger.Call(g.now, a.Request(g.now, inUse)))
	for more := true; more; {
		q := a.Request(g.now, inUse)
		if !q.Claim {
			t.Fatalf("call %d claims nothing", q.N)
		}
		more = q.More
		a.Reply(g.now, g.ledger.Call(g.now, q))
	}
	for key, share := range a.hot {
		if h := g.ledger.state.buckets[key].holders["a"]; share.parts > 0 && (h == nil || h.parts < share.parts) {
			t.Errorf("%d parts of %s are not claimed", share.parts, key)
		}
	}
}

// TestHost_TellsAgainWhatWasLost loses the call that tells of slots, and then the host does not say for a while that it
// knows that their bucket is hot.
func TestHost_TellsAgainWhatWasLost(t *testing.T) {
	const slots = SlotsPrefix + "slots"
	g := newGroup(2)
	g.run(2 * Second)
	for _, h := range g.hosts {
		h.Want(slots, Whole, 1)
		for i := range 3 * MaxItems / 2 {
			h.Want(fmt.Sprintf("k%03d", i), Whole, 1)
		}
	}
	g.run(2 * Second)
	a, b, lateInUse := g.hosts[0], g.hosts[1], int64(0)
	has := a.hot[slots].parts
	g.ledger = Ledger{Run: "b"}
	for b.Reply(g.now, g.ledger.Call(g.now, b.Request(g.now, nil))) {
	}
	request := func() *Request {
		return a.Request(g.now, func(key string) int64 {
			if IsSlots(key) {
				return has
			}
			return lateInUse
		})
	}
	call := func() *Request {
		q := request()
		a.Reply(g.now, g.ledger.Call(g.now, q))
		return q
	}
	call()
	a.turn, a.hot[slots].want = "k", 0 // so that the slots come last
	call()                             // the first page of claims
	request()                          // the second one is lost
	a.leave()
	a.beUnsure()
	a.hot[slots].version = a.known // the last bucket to become hot
	lateInUse = 1
	call()
	lateInUse = 0
	for q := call(); ; q = call() {
		known := int64(0)
		if h := g.ledger.state.buckets[slots].holders["a"]; h != nil {
			known = h.parts
		}
		if q.Told {
			if known < has {
				t.Errorf("the host says that it has told all slots, but the ledger knows of %d of %d", known, has)
			}
			return
		}
	}
}

// A host that had a longer lease before it was started again uses nothing until others do not count on that any more.
func TestHost_StaysAwayForTheLeaseBefore(t *testing.T) {
	long := testParams(2)
	long.Lease = 10 * Second
	h := NewHost(HostOptions{Params: testParams(2), Name: "a", Start: 1, Away: long.Away()}, Second)
	for _, after := range []Time{0, 3 * Second, long.Away() - 1} {
		if use := h.Use("db", Second+after); use != 0 {
			t.Errorf("uses %d parts after %d us", use, after)
		}
	}
	if use := h.Use("db", Second+long.Away()); use != Whole/2 {
		t.Errorf("uses %d parts afterwards, want its floor", use)
	}
}

// Two processes of a host whose clock was set back go on with different starts, or a late call of the first would speak
// for the second.
func TestHost_StartsOfTwoProcesses(t *testing.T) {
	g := newGroup(1)
	g.hosts[0].Start = 1000
	g.run(Second)
	starts := map[int64]bool{1000: true}
	for _, salt := range []int64{7, 8} {
		l := g.ledger.Clone()
		h := NewHost(HostOptions{Params: testParams(1), Name: "a", Start: 10, Salt: salt}, g.now)
		for h.Reply(g.now, l.Call(g.now, h.Request(g.now, nil))) {
		}
		if h.Start < 1000 || !h.Joined() {
			t.Errorf("start %d, joined %v; want a later one than 1000 that has joined", h.Start, h.Joined())
		}
		starts[h.Start] = true
	}
	if len(starts) != 3 {
		t.Errorf("starts %v: two of them are the same", starts)
	}
}

// What a host tells of itself is told again if it has changed while a call was on its way.
func TestHost_TellsInfoThatChanges(t *testing.T) {
	g := newGroup(2)
	g.run(2 * Second)
	h := g.hosts[0]
	q := h.Request(g.now, nil)
	h.SetInfo(7, "new")
	h.Reply(g.now, g.ledger.Call(g.now, q))
	if q = h.Request(g.now, nil); q.Info != "new" || q.Digest != 7 {
		t.Errorf("the next call has %q, %d", q.Info, q.Digest)
	}
}
