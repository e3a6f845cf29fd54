package conn

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/asn"
)

var (
	byPrefix = []shaper.TurnBy{shaper.TurnPrefix24, shaper.TurnSource}
	byAS     = []shaper.TurnBy{shaper.TurnASN, shaper.TurnPrefix24, shaper.TurnSource}
)

// testASNs has 10.1.0.0/16 as AS 1 and 10.2.0.0/16 as AS 2.
func testASNs(t testing.TB) *asn.Table {
	t.Helper()
	var ranges []asn.Range
	for i := range 2 {
		n := byte(1 + i)
		ranges = append(ranges, asn.Range{First: netip.AddrFrom4([4]byte{10, n, 0, 0}), Last: netip.AddrFrom4([4]byte{10, n, 255, 255}), ASN: uint32(n)})
	}
	table, err := asn.New(ranges)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// All sources of a prefix together get what one elsewhere gets, and so do all prefixes of an AS; below they share alike.
func TestTurns_InQueue(t *testing.T) {
	r := newStreams(t, nil)
	limit := shaper.Limit{Name: "all", Rate: 80e6, Turns: byAS}
	r.policy = policyByAS(t, r.shaper, testASNs(t), nil, limit)
	r.shaper.Swap(r.policy, r.now)
	parts := map[*stream]float64{r.add("10.2.0.1", 1): 1. / 3, r.add("192.0.2.1", 1): 1. / 3} // AS 2, and no AS
	for i := range 256 {
		parts[r.add(fmt.Sprint("10.1.0.", i), 1)] = 1. / 3 / 2 / 256
	}
	for i := range 2 { // another prefix of AS 1
		parts[r.add(fmt.Sprint("10.1.1.", i), 1)] = 1. / 3 / 2 / 2
	}
	r.advance(r.now+10*leaky.Second, onTime)
	for i, s := range r.streams {
		if want := 100e6 * parts[s]; float64(s.moved) < want-8*1448 || float64(s.moved) > want+8*1448 {
			t.Errorf("%v moved %d bytes, want %.0f", r.flows[i].Source, s.moved, want)
		}
	}
}

// A prefix of IPv6 is a /48: all that one site has.
func TestTurns_InQueueByIPv6(t *testing.T) {
	r := newStreams(t, nil, shaper.Limit{Name: "all", Rate: 8e6, Turns: byPrefix})
	var site uint64
	var streams []*stream
	for i := range 50 {
		streams = append(streams, r.add(fmt.Sprintf("2001:db8:1:%x::1", i), 1))
	}
	other := r.add("2001:db8:2::1", 1)
	r.advance(r.now+2*leaky.Second, onTime)
	for _, s := range streams {
		site += s.moved
	}
	if site < other.moved-4*1448 || site > other.moved+4*1448 {
		t.Errorf("50 /64 of a /48 moved %d bytes, one elsewhere %d", site, other.moved)
	}
}

// The weight of a class is that of its members at the first level.
func TestTurns_WithWeights(t *testing.T) {
	r := newStreams(t, []shaper.TrafficClass{classOf("10.1.0.0/16", 3)}, shaper.Limit{Name: "all", Rate: 8e6, Turns: byPrefix})
	a, b, c := r.add("10.1.0.1", 1), r.add("10.1.0.2", 1), r.add("10.2.0.1", 1)
	r.advance(r.now+4*leaky.Second, onTime)
	if sum := a.moved + b.moved; sum < 3*c.moved-8*1448 || sum > 3*c.moved+8*1448 || a.moved < b.moved-3*1448 || a.moved > b.moved+3*1448 {
		t.Errorf("two of a /24 of weight 3 moved %d and %d bytes, one elsewhere %d", a.moved, b.moved, c.moved)
	}
}

// A prefix whose addresses come, send a unit, and are gone gets no more than one address that stays, and what is kept of it is bounded.
func TestTurns_ChurnGainsNothing(t *testing.T) {
	r := newStreams(t, nil, shaper.Limit{Name: "all", Rate: 8e6, Turns: byPrefix})
	own := r.add("10.0.0.1", 1)
	type guest struct {
		*stream
		path []hop
	}
	var guests []guest
	var theirs uint64
	most := 0
	for i := 0; r.now < 6*leaky.Second; i++ {
		kept := guests[:0]
		for _, g := range guests {
			if g.left == 0 {
				theirs += g.moved
				r.scheduler.releasePath(g.path, r.now)
				continue
			}
			kept = append(kept, g)
		}
		guests = kept
		for len(guests) < 5 {
			s := &stream{rig: r.rig, left: 1448}
			path := r.path(flowFrom(fmt.Sprintf("10.9.9.%d", i%256), 1))
			s.unit = unit{owner: s, path: path, bytes: 1448, credit: grantCredit}
			r.scheduler.submit(&s.unit, r.now)
			guests = append(guests, guest{s, path})
			i++
		}
		r.advance(r.now+leaky.Second/10_000, onTime)
		for _, q := range r.scheduler.byKey {
			most = max(most, len(q.sources))
		}
	}
	if off := (float64(own.moved) - float64(theirs)) / 1448; off < -12 || off > 12 || theirs == 0 {
		t.Errorf("one address moved %d bytes, those that come and go %d: %.1f units off", own.moved, theirs, off)
	}
	if most > 2*256+10 {
		t.Errorf("%d members were kept", most)
	}
	for _, g := range guests {
		r.scheduler.withdraw(r.now, &g.unit)
		r.scheduler.releasePath(g.path, r.now)
	}
	r.advance(r.now+leaky.Second/100, onTime)
	for _, q := range r.scheduler.byKey {
		for key, sq := range q.sources {
			if sq.flows == 0 && sq.parent != nil && sq.parent.flows == 0 {
				t.Errorf("%v is kept below a prefix without flows", key.addr)
			}
		}
	}
}

// A reload changes by what turns are taken under a backlog: the bucket leaves no burst, and no stream is lost.
func TestTurns_ReloadUnderBacklog(t *testing.T) {
	rnd := testutil.Rand(t)
	limit := func(turns []shaper.TurnBy) shaper.Limit { return shaper.Limit{Name: "all", Rate: 80e6, Turns: turns} }
	r := newStreams(t, nil, limit(nil))
	for i := range 6 {
		r.add(fmt.Sprint("10.1.0.", i), 1)
	}
	r.add("10.2.0.1", 1)
	for range 100 {
		turns := [][]shaper.TurnBy{nil, byPrefix, byAS}[rnd.IntN(3)]
		before := r.streams[6].moved
		var was uint64
		for _, s := range r.streams {
			was += s.moved
		}
		r.reload([]shaper.Limit{limit(turns)})
		r.advance(r.now+leaky.Second/10, onTime)
		var all uint64
		for _, s := range r.streams {
			all += s.moved
		}
		want := 1e6 / 2
		if turns == nil {
			want = 1e6 / 7
		}
		if got := float64(r.streams[6].moved - before); got < want-8*1448 || got > want+8*1448 || all-was < 1e6-3*1448 {
			t.Fatalf("with turns by %v the one of another prefix moved %.0f bytes of %d, want %.0f", turns, got, all-was, want)
		}
	}
	for q, sent := range r.departures {
		if sent.max > 4*1448 {
			t.Errorf("%s: a burst of %.0f bytes", q.state.Name, sent.max)
		}
	}
	for i, s := range r.streams {
		r.scheduler.withdraw(r.now, &s.unit)
		r.scheduler.releasePath(r.streams[i].path, r.now)
	}
	if n := len(r.scheduler.byKey); n != 0 {
		t.Errorf("%d queues are left", n)
	}
}

// Whatever sources come, leave and end: while a connection waits at a gate, at each level of turns, no sibling of the member that it is
// of is served twice while that member is not, and all is consistent. Reloads change the levels.
func TestTurns_AtGate(t *testing.T) {
	rnd := testutil.Rand(t)
	rounds := 200
	if raceEnabled {
		rounds = 40
	}
	table := testASNs(t)
	served := 0
	for range rounds {
		turns := [][]shaper.TurnBy{byPrefix, byAS}[rnd.IntN(2)]
		r := newAdmissionRig(t)
		swap := func() {
			limit := shaper.Limit{Name: "all", MaxConnections: 1 + rnd.IntN(3), QueueTimeout: time.Hour, MaxQueue: 1000, Turns: turns}
			p := policyByAS(t, r.shaper, table, nil, limit)
			swapPolicy(p, func() { r.shaper.Swap(p, r.now) }, r.now, r.admission)
			for v := range r.in {
				v.retake(&v.flow, p.Route(&v.flow), r.now)
			}
			r.admission.run(r.now)
		}
		swap()
		type passes [shaper.MaxTurns]map[memberKey]int // by siblings at each level, since it waits or its own member there was served
		waiting := map[*visitor]*passes{}
		membersOfVisitor := func(v *visitor) members {
			for _, gt := range r.admission.byKey {
				return v.membersAt(gt)
			}
			panic("no gate")
		}
		serve := func(v *visitor) {
			mine := membersOfVisitor(v)
			for w, passed := range waiting {
				if w.queue == nil || w == v {
					continue
				}
				its := membersOfVisitor(w)
				for level := range mine.n {
					a, b := mine.keys[level], its.keys[level]
					if a == b {
						passed[level] = nil
						continue
					}
					if passed[level] == nil {
						passed[level] = map[memberKey]int{}
					}
					if passed[level][a]++; passed[level][a] > 1 {
						t.Fatalf("%v was served %d times while %v waited", a, passed[level][a], b)
					}
					break
				}
			}
			served++
		}
		for range 300 {
			switch n := rnd.IntN(10); {
			case n < 5:
				source := fmt.Sprintf("10.%d.%d.%d", 1+rnd.IntN(3), rnd.IntN(2), rnd.IntN(3))
				v := r.visit(source, func(v *visitor) {
					if v.granted && waiting[v] != nil {
						serve(v)
					}
					delete(waiting, v)
				})
				if v.queue != nil {
					waiting[v] = new(passes)
				}
			case n < 8:
				for v := range r.in {
					v.finish()
					break
				}
			case n < 9:
				for v := range waiting {
					v.leave()
					break
				}
			case rnd.IntN(10) == 0:
				turns = [][]shaper.TurnBy{nil, byPrefix, byAS}[rnd.IntN(3)]
				rest := waiting
				waiting = map[*visitor]*passes{} // the reload itself may serve some
				swap()
				for v := range rest {
					if v.queue != nil {
						waiting[v] = new(passes)
					}
				}
			}
			r.consistent()
		}
		for len(r.in) > 0 {
			for v := range r.in {
				v.finish()
				break
			}
		}
		r.idle()
	}
	if served == 0 {
		t.Error("nothing was served in turns")
	}
}

// In a full waiting line the addresses of a prefix make room together: one elsewhere finds a place.
func TestTurns_InFullWaitingLine(t *testing.T) {
	limit := shaper.Limit{Name: "all", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 100, Turns: byPrefix}
	r := newAdmissionRig(t, limit)
	r.must("10.9.0.1")
	var prefix, others []*visitor
	for i := range 100 {
		prefix = append(prefix, r.visit(fmt.Sprint("10.1.0.", i), nil))
	}
	for range 40 {
		others = append(others, r.visit("10.2.0.1", nil))
		r.consistent()
	}
	for _, v := range others {
		if v.refusedFor != shaper.None {
			t.Fatal("one elsewhere was refused, while many of a prefix wait")
		}
	}
	refused := 0
	for _, v := range prefix {
		if v.refusedFor == shaper.WaitingFull {
			refused++
		}
	}
	if refused != 40 {
		t.Errorf("%d of the prefix made room, want 40", refused)
	}
}
