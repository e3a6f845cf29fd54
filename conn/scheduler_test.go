package conn

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// rig runs a scheduler on a clock of its own.
type rig struct {
	t          *testing.T
	shaper     *shaper.Shaper
	wheel      *pacer.Wheel
	scheduler  *scheduler
	policy     *shaper.Policy
	now        leaky.Time
	departures map[*queue]*sigma
	count      int

	refused   int
	refusedBy map[string]int
}

func newRig(t *testing.T, limits ...shaper.Limit) *rig { return newClassRig(t, nil, limits...) }

func newClassRig(t *testing.T, classes []shaper.TrafficClass, limits ...shaper.Limit) *rig {
	s := shaper.New(1000)
	r := &rig{t: t, shaper: s, wheel: new(pacer.Wheel), now: leaky.Second, departures: map[*queue]*sigma{}, refusedBy: map[string]int{}}
	clock := func() leaky.Time { return r.now }
	r.scheduler = newSharing(s, r.wheel, clock, clock).scheduler
	r.policy = policyOf(t, s, classes, limits...)
	s.Swap(r.policy, 0)
	return r
}

// weightOf returns the weight of a source.
func (r *rig) weightOf(source string) int {
	f := flowFrom(source, 1)
	return r.policy.Class(r.policy.ClassOf(f, r.policy.Route(f), false)).Weight
}

func (r *rig) path(f *shaper.Flow) []hop { return r.pathOf(f, false) }

func (r *rig) spec(f *shaper.Flow, unverified bool) pathSpec {
	route := r.policy.Route(f)
	return pathSpec{policy: r.policy, flow: f, route: route, set: route.ToDownstream, unverified: unverified}
}

func (r *rig) pathOf(f *shaper.Flow, unverified bool) []hop {
	path := r.scheduler.newPath(r.spec(f, unverified))
	for _, h := range path {
		q := h.queue
		if r.departures[q] == nil {
			r.departures[q] = &sigma{rate: float64(r.policy.Limit(r.policy.IndexOf(q.state)).Rate) / 8 / float64(leaky.Second)}
		}
	}
	return path
}

// packet leaves once. A stream leaves repeatedly.
type packet struct {
	unit
	rig   *rig
	id    int
	after *int // id of the last one of its flow that left
}

func (p *packet) send(now leaky.Time) (bytes, packets uint64, requeue bool) {
	if p.after != nil {
		if p.id < *p.after {
			p.rig.t.Fatalf("unit %d left after unit %d of the same flow", p.id, *p.after)
		}
		*p.after = p.id
	}
	p.rig.record(&p.unit, now, p.bytes)
	return p.bytes, 1, false
}

func (p *packet) resubmit(now leaky.Time) { p.rig.scheduler.submit(&p.unit, now) }

func (p *packet) refused(by *queue, _ shaper.Reason) {
	p.rig.refused++
	p.rig.refusedBy[by.state.Name]++
}

type stream struct {
	unit
	rig   *rig
	left  uint64
	moved uint64
}

func (s *stream) send(now leaky.Time) (bytes, packets uint64, requeue bool) {
	n := min(s.bytes, s.left)
	s.left -= n
	s.moved += n
	s.rig.record(&s.unit, now, n)
	return n, 0, s.left > 0
}

func (s *stream) resubmit(now leaky.Time) { s.rig.scheduler.submit(&s.unit, now) }

func (s *stream) refused(by *queue, _ shaper.Reason) {
	s.rig.t.Errorf("%s refused a grant", by.state.Name)
}

func (r *rig) record(u *unit, now leaky.Time, n uint64) {
	r.count++
	for _, h := range u.path {
		r.departures[h.queue].add(now, n)
	}
}

// advance fires what is due up to now, each event slightly late.
func (r *rig) advance(now leaky.Time, late func() leaky.Time) {
	for {
		at, ok := r.wheel.Next()
		if !ok || at > now {
			r.now = now
			return
		}
		r.now = max(r.now, min(now, at+late()))
		r.wheel.Advance(r.now)
	}
}

func onTime() leaky.Time { return 0 }

func TestEveryBucketKeepsItsEnvelope(t *testing.T) {
	rnd := testutil.Rand(t)
	const maxUnit = 1500
	var refused, delayed int
	for round := range 40 {
		keys := []shaper.Fields{0, shaper.KeySource, shaper.KeyPort, shaper.KeySource | shaper.KeyPort, shaper.KeyConnection}
		var limits []shaper.Limit
		for i := range 1 + rnd.IntN(4) {
			limits = append(limits, shaper.Limit{
				Name: fmt.Sprint("limit", i), Key: keys[rnd.IntN(len(keys))], MaxDelay: time.Duration(rnd.IntN(50)) * time.Millisecond,
				Rate: 1e6 + rnd.Uint64N(1e7), Burst: uint64(rnd.IntN(2) * 10000),
			})
		}
		r := newRig(t, limits...)
		type client struct {
			path []hop
			last int
		}
		var clients []*client
		for i := range 12 {
			f := &shaper.Flow{
				Source: netip.AddrFrom4([4]byte{10, 0, 0, byte(i % 4)}), Port: uint16(1 + i%3), Protocol: shaper.TCP,
				Connection: uint64(i),
			}
			clients = append(clients, &client{path: r.path(f), last: -1})
		}
		late := func() leaky.Time { return leaky.Time(rnd.Uint64N(uint64(leaky.Second / 2000))) }
		now := leaky.Second
		for id := range 3000 {
			now += leaky.Time(rnd.Uint64N(uint64(leaky.Second / 1000)))
			r.advance(now, late)
			c := clients[rnd.IntN(len(clients))]
			n := 64 + rnd.Uint64N(maxUnit-63)
			p := &packet{rig: r, id: id, after: &c.last}
			p.unit = unit{owner: p, path: c.path, bytes: n, packets: 1, credit: 1, droppable: true}
			r.scheduler.submit(&p.unit, now)
			if p.queued {
				delayed++
			}
		}
		r.advance(now+100*leaky.Second, late)
		refused += r.refused
		if r.count+r.refused != 3000 {
			t.Fatalf("round %d: %d units left and %d were refused, of 3000", round, r.count, r.refused)
		}
		for q, s := range r.departures {
			limit := r.policy.Limit(r.policy.IndexOf(q.state))
			slack := max(fullDatagram, float64(limit.Rate)/8*byteSlack.Duration().Seconds())
			if bound := float64(limit.Burst) + maxUnit + slack + 1; s.max > bound {
				t.Errorf("round %d: %v: sigma %.0f bytes, want at most %.0f", round, limit.Name, s.max, bound)
			}
			if q.root.HasUnits() || q.root.Longest(nil, 0) != nil || len(q.bookings)+len(q.booked) != 0 || q.forwarding != nil || q.queuedBytes != 0 || q.queuedPackets != 0 {
				t.Errorf("round %d: %v is not empty: %+v", round, limit.Name, q)
			}
		}
	}
	if refused == 0 || delayed == 0 {
		t.Errorf("the limits had no effect: %d refused, %d delayed", refused, delayed)
	}
}

// No unit waits longer than the depth of the queue, its own cost and the lateness of the timer.
func TestNoUnitWaitsBeyondMaxDelay(t *testing.T) {
	rnd := testutil.Rand(t)
	r := newRig(t, shaper.Limit{Name: "all", Rate: 8e6, MaxDelay: 20 * time.Millisecond})
	path := r.path(flowFrom("10.0.0.1", 1))
	now, worst := leaky.Second, leaky.Time(0)
	for range 5000 {
		now += leaky.Time(rnd.Uint64N(uint64(leaky.Second / 1500)))
		r.advance(now, onTime)
		p := &timed{packet: packet{rig: r}, worst: &worst}
		p.unit = unit{owner: p, path: path, bytes: 1000, packets: 1, credit: 1, droppable: true}
		r.scheduler.submit(&p.unit, now)
	}
	r.advance(now+leaky.Second, onTime)
	if r.refused == 0 {
		t.Error("nothing was refused")
	}
	if bound := leaky.FromDuration(21 * time.Millisecond); worst > bound || worst < bound/2 {
		t.Errorf("the longest wait was %v, want up to %v", worst.Duration(), bound.Duration())
	}
}

type timed struct {
	packet
	worst *leaky.Time
}

func (p *timed) send(now leaky.Time) (bytes, packets uint64, requeue bool) {
	*p.worst = max(*p.worst, now-p.arrived)
	return p.packet.send(now)
}

// polite is a datagram that must not be refused.
type polite struct {
	timed
	lost *int
}

func (p *polite) refused(*queue, shaper.Reason) { *p.lost++ }

func (r *rig) polite(path []hop, worst *leaky.Time, lost *int, now leaky.Time) {
	p := &polite{timed{packet{rig: r}, worst}, lost}
	p.unit = unit{owner: p, path: path, bytes: 1000, packets: 1, credit: 1, droppable: true}
	r.scheduler.submit(&p.unit, now)
}

// flood sends datagrams along path, all at once.
func (r *rig) flood(path []hop, n int, size uint64, now leaky.Time) {
	for range n {
		p := &packet{rig: r}
		p.unit = unit{owner: p, path: path, bytes: size, packets: 1, credit: 1, droppable: true}
		r.scheduler.submit(&p.unit, now)
	}
}

// A datagram delayed far beyond max_delay by others is dropped when its turn comes.
func TestOverdueDatagramsAreDropped(t *testing.T) {
	r := newRig(t, shaper.Limit{Name: "all", Rate: 8e6, MaxDelay: 20 * time.Millisecond})
	first := r.path(flowFrom("10.0.0.1", 1))
	worst := leaky.Time(0)
	for range 21 {
		p := &timed{packet: packet{rig: r}, worst: &worst}
		p.unit = unit{owner: p, path: first, bytes: 1000, packets: 1, credit: 1, droppable: true}
		r.scheduler.submit(&p.unit, leaky.Second)
	}
	for i := range 29 { // streams are not dropped, and take most turns: 30 ms a round
		s := &stream{rig: r, left: 20_000}
		s.unit = unit{owner: s, path: r.path(flowFrom(fmt.Sprintf("10.0.1.%d", i), 1)), bytes: 1000}
		r.scheduler.submit(&s.unit, leaky.Second)
	}
	r.advance(3*leaky.Second, onTime)
	if r.refused != 18 {
		t.Errorf("%d were dropped, want all except the first and two that streams did not delay", r.refused)
	}
	if worst < leaky.FromDuration(29*time.Millisecond) || worst > leaky.FromDuration(31*time.Millisecond) {
		t.Errorf("the second one waited for %v, want a round", worst.Duration())
	}
	if len(r.scheduler.work) > 0 || r.scheduler.byKey[first[0].key].root.HasUnits() {
		t.Error("a unit is left")
	}
}

// The overhead of a datagram is charged to the rate, and to the queue.
func TestDatagramOverheadIsCharged(t *testing.T) {
	r := newRig(t, shaper.Limit{Name: "bytes", Rate: 8e6, Overhead: 900, MaxDelay: 100 * time.Millisecond})
	f := flowFrom("10.0.0.1", 1)
	f.Protocol = shaper.UDP
	path := r.path(f)
	for range 1000 {
		p := &packet{rig: r}
		p.unit = unit{owner: p, path: path, bytes: 100, packets: 1, credit: 1, droppable: true}
		r.scheduler.submit(&p.unit, leaky.Second)
	}
	// One leaves at once, and the queue takes 100 more before it exceeds max_delay.
	if r.refused != 899 {
		t.Errorf("%d of 1000 were refused, want 899", r.refused)
	}
	r.advance(leaky.Second+leaky.Second/20, onTime)
	if r.count != 51 {
		t.Errorf("%d of 1000 bytes each left in 50 ms at 1 MB/s, want 51", r.count)
	}
}

func TestWithdraw(t *testing.T) {
	r := newRig(t,
		shaper.Limit{Name: "all", Rate: 8e6},
		shaper.Limit{Name: "per-source", Key: shaper.KeySource, Rate: 8e6})
	var packets []*packet
	for i := range 9 {
		p := &packet{rig: r, id: i}
		p.unit = unit{owner: p, path: r.path(flowFrom(fmt.Sprintf("10.0.0.%d", i%3), 1)), bytes: 1000, packets: 1, credit: 1}
		packets = append(packets, p)
		r.scheduler.submit(&p.unit, leaky.Second)
	}
	for _, i := range []int{8, 1, 4} { // a tail, the head of its first queue, and one behind it
		r.scheduler.withdraw(leaky.Second, &packets[i].unit)
		r.scheduler.withdraw(leaky.Second, &packets[i].unit)
	}
	r.advance(10*leaky.Second, onTime)
	if r.count != 6 {
		t.Errorf("%d units left, want 6", r.count)
	}
	for _, q := range r.scheduler.byKey {
		if q.root.HasUnits() || q.root.Longest(nil, 0) != nil || len(q.bookings)+len(q.booked) != 0 || q.forwarding != nil || q.queuedBytes != 0 {
			t.Errorf("queue of %s is not empty", q.state.Name)
		}
	}
}

// Units that are withdrawn together must not let each other leave.
func TestWithdrawnUnitsDoNotLeave(t *testing.T) {
	r := newRig(t, shaper.Limit{Name: "all", Rate: 8e6})
	path := r.path(flowFrom("10.0.0.1", 1))
	var units []*unit
	for i := range 5 {
		p := &packet{rig: r, id: i}
		p.unit = unit{owner: p, path: path, bytes: 1000, packets: 1, credit: 1}
		r.scheduler.submit(&p.unit, leaky.Second)
		units = append(units, &p.unit)
	}
	r.scheduler.withdraw(2*leaky.Second, units...) // long after the next one was due
	if r.count != 1 {
		t.Errorf("%d units left, want the first alone", r.count)
	}
}

func TestReload_KeepsOrderAndBacklog(t *testing.T) {
	limit := shaper.Limit{Name: "all", Rate: 8e6, MaxDelay: time.Second}
	r := newRig(t, limit)
	path := r.path(flowFrom("10.0.0.1", 1))
	last := -1
	now := leaky.Second
	for i := range 100 {
		p := &packet{rig: r, id: i, after: &last}
		p.unit = unit{owner: p, path: path, bytes: 1000, packets: 1, credit: 1}
		r.scheduler.submit(&p.unit, now)
	}
	r.advance(now+leaky.Second/100, onTime) // 10 of them
	if r.count < 9 || r.count > 12 {
		t.Fatalf("%d units left in 10 ms, want 10", r.count)
	}
	now += leaky.Second / 100
	limit.Rate = 4e6
	before := r.count
	r.policy = policy(t, r.shaper, limit)
	r.shaper.Swap(r.policy, now)
	if !r.scheduler.keepsPath(path, r.spec(flowFrom("10.0.0.1", 1), false), now) {
		t.Fatal("the path has changed")
	}
	if r.count-before > 1 {
		t.Errorf("%d units left at once after the reload", r.count-before)
	}
	r.advance(now+leaky.Second/10, onTime) // 50 at half the rate
	if n := r.count - before; n < 49 || n > 52 {
		t.Errorf("%d units left in 100 ms, want 50", n)
	}
	r.advance(now+leaky.Second, onTime)
	if r.count != 100 {
		t.Errorf("%d units left, want 100", r.count)
	}
}

func TestReleasePath_KeepsBacklog(t *testing.T) {
	r := newRig(t, shaper.Limit{Name: "all", Rate: 8e3, MaxDelay: time.Minute})
	f := flowFrom("10.0.0.1", 1)
	path := r.path(f)
	p := &packet{rig: r}
	p.unit = unit{owner: p, path: path, bytes: 1000, packets: 1, credit: 1}
	r.scheduler.submit(&p.unit, leaky.Second) // costs a second
	r.scheduler.releasePath(path, leaky.Second)
	if len(r.scheduler.byKey) != 0 {
		t.Fatal("a queue without a flow is kept")
	}
	again := r.path(f)
	q := &packet{rig: r}
	q.unit = unit{owner: q, path: again, bytes: 1000, packets: 1, credit: 1}
	r.scheduler.submit(&q.unit, leaky.Second+leaky.Second/2)
	if !q.queued {
		t.Error("a new connection got a fresh bucket")
	}
}
