package conn

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// gateRig runs gates on a clock of its own.
type gateRig struct {
	t      testing.TB
	shaper *shaper.Shaper
	wheel  *leaky.Wheel
	now    leaky.Time
	gates  *gates
	in     map[*visitor]bool // in flight
	site   *site             // where they go, or nil
}

func newGateRig(t testing.TB, limits ...shaper.Limit) *gateRig {
	r := &gateRig{t: t, shaper: shaper.New(1000), wheel: new(leaky.Wheel), now: leaky.Second, in: map[*visitor]bool{}}
	r.gates = newGates(r.shaper, r.wheel, func() leaky.Time { return r.now })
	r.swap(limits...)
	return r
}

func (r *gateRig) swap(limits ...shaper.Limit) {
	p := policy(r.t, r.shaper, limits...)
	r.gates.swap(p, func() { r.shaper.Swap(p, r.now) }, r.now)
	for v := range r.in {
		v.move(&v.flow, p.Route(&v.flow), r.now)
	}
	r.gates.run(r.now)
}

// sleep lets d pass.
func (r *gateRig) sleep(d time.Duration) { r.until(r.now + leaky.FromDuration(d)) }

func (r *gateRig) until(end leaky.Time) {
	for r.step(end) {
	}
	r.now = end
}

// step goes to the next event, if there is one up to end.
func (r *gateRig) step(end leaky.Time) bool {
	at, ok := r.wheel.Next()
	if !ok || at > end {
		return false
	}
	r.now = max(r.now, at)
	r.wheel.Advance(r.now)
	return true
}

// after calls f after d.
func (r *gateRig) after(d time.Duration, f func()) *leaky.Event {
	e := &leaky.Event{Fire: func(leaky.Time) { f() }}
	r.wheel.Schedule(e, r.now+leaky.FromDuration(d))
	return e
}

// visitor is a connection. then, if set, is called when it is admitted or refused.
type visitor struct {
	entrant
	rig  *gateRig
	in   bool
	why  shaper.Reason // None as long as it is not refused
	at   leaky.Time    // when it was admitted or refused
	then func()

	refusal refusal
	to      *session // that goes to a downstream, if it matters which
}

func (v *visitor) admitted(now leaky.Time) {
	if v.in || v.why != shaper.None {
		v.rig.t.Error("told twice")
	}
	v.in = true
	v.rig.in[v] = true
	v.told(now)
}

func (v *visitor) refused(why refusal, now leaky.Time) {
	if v.in || v.why != shaper.None || why.limit == nil || why.reason == shaper.None || len(v.held) > 0 {
		v.rig.t.Errorf("told twice, or wrongly: %+v", why)
	}
	v.why, v.refusal = why.reason, why
	v.told(now)
}

func (v *visitor) told(now leaky.Time) {
	v.at = now
	if v.then != nil {
		v.then()
	}
}

// visit sends a connection of source to the gates.
func (r *gateRig) visit(source string, then func(*visitor)) *visitor {
	return r.visitPort(source, 1, then)
}

func (r *gateRig) visitPort(source string, port uint16, then func(*visitor)) *visitor {
	return r.enter(source, port, false, then)
}

func (r *gateRig) enter(source string, port uint16, stranger bool, then func(*visitor)) *visitor {
	v := &visitor{rig: r}
	v.stranger = stranger
	v.owner, v.listen, v.flow = v, "l", *flowFrom(source, port)
	if r.site != nil {
		v.to = &session{service: &service{site: r.site}}
		v.to.gates, v.to.flow = r.gates, v.flow
	}
	if then != nil {
		v.then = func() { then(v) }
	}
	r.gates.enter(&v.entrant, r.now)
	return v
}

func (v *visitor) pool() *gate {
	if v.to == nil {
		return nil
	}
	return v.to.pool()
}

func (v *visitor) place(now leaky.Time) {
	if v.to.place(now); v.to.to == nil {
		v.rig.t.Error("let through to no downstream")
	}
}
func (v *visitor) leave() { v.rig.gates.leave(&v.entrant, shaper.ClientGone, v.rig.now) }

func (v *visitor) finish() {
	delete(v.rig.in, v)
	if v.to != nil {
		v.to.to.inFlight--
	}
	v.release(v.rig.now)
	if v.to != nil {
		v.to.wake(v.rig.now)
	}
}

func (r *gateRig) must(source string) *visitor {
	r.t.Helper()
	v := r.visit(source, nil)
	if !v.in {
		r.t.Fatalf("%s is not in, refused for %v", source, v.why)
	}
	return v
}

// idle checks that nothing is left behind.
func (r *gateRig) idle() {
	r.t.Helper()
	if n := len(r.gates.byKey) + len(r.gates.queues) + len(r.gates.parties) + len(r.gates.told); n != 0 {
		r.t.Errorf("%d gates, %d queues, %d parties and %d outcomes are left",
			len(r.gates.byKey), len(r.gates.queues), len(r.gates.parties), len(r.gates.told))
	}
	if r.site != nil && (len(r.site.pools) != 0 || r.site.waiting.waiting != 0 || r.site.awaiting.Waiting.Load() != 0) {
		r.t.Errorf("%d pools and %d who wait for them are left", len(r.site.pools), r.site.waiting.waiting)
	}
	for state, room := range r.gates.rooms {
		if room.waiting != 0 || len(room.longest)+len(room.tenants) != 0 || state.InFlight.Load() != 0 || state.Waiting.Load() != 0 {
			r.t.Errorf("%s: %d waiting, %d in flight", state.Name, room.waiting, state.InFlight.Load())
		}
	}
	if n := r.wheel.Len(); n != 0 {
		r.t.Errorf("%d events are left", n)
	}
}

// consistent checks that nobody waits for what is free, and that queues, rooms and
// counts agree.
func (r *gateRig) consistent() {
	waiting := map[*room]int{}
	for _, gt := range r.gates.byKey {
		if len(gt.turns) > 0 && (gt.rule.Observe || gt.full(r.now) == shaper.None && !gt.keeps(gt.turns[0].queues[0], false)) {
			r.t.Fatalf("%s: a slot is free and somebody waits for it", gt.state.Name)
		}
		if len(gt.turns) > 0 && gt.full(r.now) == shaper.ByNew && !gt.timer.Scheduled() {
			r.t.Fatalf("%s: nobody will be woken when the pace allows it", gt.state.Name)
		}
		here := 0
		for _, src := range gt.turns {
			n := 0
			for _, q := range src.queues {
				if q.at() != src || q.gates[q.pos] != gt || q.len == 0 || !q.timeout.Scheduled() {
					r.t.Fatal("a queue is not where it should be")
				}
				for e := q.head; e != nil; e = e.next {
					if e.waitsIn != q || len(e.held) > 0 {
						r.t.Fatal("an entrant is in a queue that it does not know of, or holds slots while it waits")
					}
					n++
				}
			}
			if n == 0 || n != src.len || gt.sources[src.addr] != src {
				r.t.Fatalf("a source of %d has %d", src.len, n)
			}
			here += n
		}
		waiting[gt.room] += here
		if gt.waiting != here {
			r.t.Fatalf("%d wait, of %d", here, gt.waiting)
		}
	}
	for state, room := range r.gates.rooms {
		if room.waiting != waiting[room] || int(state.Waiting.Load()) != room.waiting {
			r.t.Fatalf("%s: %d wait, %d are counted, %d shown", state.Name, waiting[room], room.waiting, state.Waiting.Load())
		}
		if i := r.gates.policy.Index(state); room.waiting > r.gates.policy.Limit(i).MaxWaiting {
			r.t.Fatalf("%s: %d wait, more than may", state.Name, room.waiting)
		}
	}
}

func TestGateNeverExceedsItsCapNorLosesAWakeUp(t *testing.T) {
	rnd := newRand(t)
	operations := 250_000
	if testing.Short() || raceEnabled {
		operations = 50_000
	}
	limits := func(cap int) []shaper.Limit {
		return []shaper.Limit{
			{Name: "per-source", Key: shaper.KeySource, Connections: 1 + cap/2, MaxWait: 10 * time.Millisecond, MaxWaiting: 60},
			{Name: "all", Connections: cap, MaxWait: 6 * time.Millisecond, MaxWaiting: 20},
		}
	}
	const first, visitors = 10, 100
	r := newGateRig(t, limits(first)...)
	cap, inFlight, got, begun := first, 0, 0, 0
	var reasons [shaper.Reasons]int
	random := func(most int) time.Duration { return time.Duration(rnd.IntN(most)) * time.Microsecond }
	var visit func(source string)
	again := func(source string) { r.after(random(5000), func() { visit(source) }) }
	visit = func(source string) {
		if begun == operations {
			return
		}
		begun++
		gone := &leaky.Event{}
		v := r.visit(source, func(v *visitor) {
			r.wheel.Cancel(gone)
			if !v.in {
				reasons[v.why]++
				again(source)
				return
			}
			got++
			if inFlight++; inFlight > cap {
				t.Fatalf("%d in flight, cap %d", inFlight, cap)
			}
			r.after(random(2000), func() {
				inFlight--
				v.finish()
				again(source)
			})
		})
		if v.waitsIn != nil {
			gone.Fire = func(leaky.Time) { v.leave() }
			r.wheel.Schedule(gone, r.now+leaky.FromDuration(random(30_000)))
		}
	}
	for i := range visitors {
		visit(fmt.Sprintf("10.0.0.%d", i%7))
	}
	resize := r.now
	for r.step(leaky.Forever) {
		r.consistent()
		if cap > r.gates.policy.Limit(1).Connections {
			cap = max(inFlight, r.gates.policy.Limit(1).Connections)
		}
		if r.now > resize && begun < operations {
			resize = r.now + leaky.FromDuration(random(200_000))
			next := 2 + rnd.IntN(15)
			// What is in flight stays, so the old cap binds until it has drained.
			cap = max(next, inFlight)
			r.swap(limits(next)...)
		}
	}
	r.idle()
	refused := 0
	for _, n := range reasons {
		refused += n
	}
	if got+refused != operations {
		t.Errorf("%d got a slot, %d were refused, of %d", got, refused, operations)
	}
	for _, reason := range []shaper.Reason{shaper.ClientGone, shaper.WaitTimeout, shaper.WaitingFull} {
		if reasons[reason] == 0 {
			t.Errorf("nobody was refused for %v", reason)
		}
	}
	t.Logf("%d operations, %d got a slot, %d client gone, %d timeout, %d full", operations, got,
		reasons[shaper.ClientGone], reasons[shaper.WaitTimeout], reasons[shaper.WaitingFull])
}

func TestPoliteSourceDoesNotWaitBehindAHog(t *testing.T) {
	r := newGateRig(t, shaper.Limit{Name: "all", Connections: 10, MaxWait: 10 * time.Second, MaxWaiting: 1000})
	const service = 100 * time.Millisecond
	hogs := true
	var hog func()
	hog = func() {
		r.visit("10.0.0.1", func(v *visitor) {
			r.after(service, func() {
				v.finish()
				if hogs {
					hog()
				}
			})
		})
	}
	for range 200 {
		hog()
	}
	r.sleep(time.Second)
	var worst time.Duration
	for range 20 {
		begun, done := r.now, false
		r.visit("10.0.0.2", func(v *visitor) {
			worst = max(worst, (v.at - begun).Duration())
			r.after(service, func() { v.finish(); done = true })
		})
		for !done {
			r.step(leaky.Forever)
		}
	}
	hogs = false
	r.sleep(time.Minute)
	if worst > 2*service || worst == 0 {
		t.Errorf("the polite source waited up to %v, want some, at most %v", worst, 2*service)
	}
	r.idle()
}

func TestFullRoomIsSharedBySources(t *testing.T) {
	r := newGateRig(t, shaper.Limit{Name: "all", Connections: 1, MaxWait: time.Minute, MaxWaiting: 10})
	first := r.must("10.0.0.1")
	var got, full int
	for range 20 {
		r.visit("10.0.0.1", func(v *visitor) {
			switch {
			case v.in:
				got++
				v.finish()
			case v.why == shaper.WaitingFull:
				full++
			}
		})
	}
	if full != 10 {
		t.Errorf("%d of 20 were refused, want 10", full)
	}
	polite := r.visit("10.0.0.2", func(v *visitor) { v.finish() })
	if full != 11 {
		t.Errorf("the polite source took no place from the hog")
	}
	first.finish()
	if !polite.in {
		t.Error("the polite source was refused")
	}
	if got != 9 {
		t.Errorf("%d of the hog's got a slot, want 9", got)
	}
	r.idle()
}

// A source that waits at many ports has no more of the room for it than one that waits at one.
func TestFullRoomIsSharedBySourcesOfManyPorts(t *testing.T) {
	r := newGateRig(t, shaper.Limit{Name: "each port", Key: shaper.KeyPort, Connections: 1, MaxWait: time.Hour, MaxWaiting: 20})
	var in, hog []*visitor
	for port := range uint16(20) {
		in = append(in, r.visitPort("10.0.0.1", 1+port, nil))
		hog = append(hog, r.visitPort("10.0.0.1", 1+port, nil))
	}
	waits := func(all []*visitor) (n int) {
		for _, v := range all {
			if v.waitsIn != nil {
				n++
			}
		}
		return n
	}
	var polite []*visitor
	for range 12 {
		polite = append(polite, r.visitPort("10.0.0.2", 1, nil))
	}
	r.consistent()
	if a, b := waits(hog), waits(polite); a != 10 || b != 10 {
		t.Errorf("a source that waits at 20 ports has %d of 20 places, one that waits at one of them %d", a, b)
	}
	for _, v := range append(polite, hog...) {
		v.leave()
	}
	for _, v := range in {
		v.finish()
	}
	r.idle()
}

func TestNewConnectionsAreSpaced(t *testing.T) {
	r := newGateRig(t, shaper.Limit{
		Name: "all", NewConnections: shaper.Frequency{N: 50, Per: time.Second}, MaxWait: 10 * time.Second, MaxWaiting: 1000,
	})
	var at []time.Duration
	start := r.now
	for i := range 100 {
		r.visit(fmt.Sprintf("10.0.0.%d", i), func(v *visitor) {
			at = append(at, (v.at - start).Duration())
			v.finish()
		})
	}
	r.sleep(10 * time.Second)
	for i := range 100 {
		if want := time.Duration(i) * 20 * time.Millisecond; at[i] < want || at[i] > want+time.Microsecond {
			t.Fatalf("connection %d after %v, want %v", i, at[i], want)
		}
	}
	r.sleep(time.Hour)
	before := r.now
	r.must("10.0.0.1").finish()
	second := r.visit("10.0.0.1", func(v *visitor) { v.finish() })
	r.sleep(time.Second)
	if d := (second.at - before).Duration(); d < 20*time.Millisecond {
		t.Errorf("after an hour's rest two came %v apart", d)
	}
	r.idle()
}

func TestObservedGateOnlyCounts(t *testing.T) {
	r := newGateRig(t, shaper.Limit{Name: "all", Connections: 1, MaxWait: time.Second, MaxWaiting: 10, Observe: true})
	a, b := r.must("10.0.0.1"), r.must("10.0.0.1")
	state := r.shaper.Policy().State(0)
	if state.InFlight.Load() != 2 || state.Connections[shaper.Delay][shaper.ByConnections].Load() != 1 {
		t.Errorf("in flight %d, would have waited %d", state.InFlight.Load(), state.Connections[shaper.Delay][shaper.ByConnections].Load())
	}
	a.finish()
	b.finish()
	r.idle()
}

func TestTakeDoesNotWait(t *testing.T) {
	r := newGateRig(t, shaper.Limit{Name: "all", Connections: 1, MaxWait: time.Second, MaxWaiting: 10})
	a := r.must("10.0.0.1")
	if _, full := r.gates.take(flowFrom("10.0.0.1", 1), "l", r.now); full == nil {
		t.Error("a slot was taken that is not free")
	}
	if n := r.shaper.Policy().State(0).Connections[shaper.Refuse][shaper.ByConnections].Load(); n != 1 {
		t.Errorf("%d refusals are counted, want 1", n)
	}
	a.finish()
	got, full := r.gates.take(flowFrom("10.0.0.1", 1), "l", r.now)
	if full != nil {
		t.Fatal("a free slot was not taken")
	}
	got.release(r.now)
	r.idle()
}

// A source with many waiters that leave at once, in any order.
func TestWaitersLeaveInAnyOrder(t *testing.T) {
	rnd := newRand(t)
	r := newGateRig(t, shaper.Limit{Name: "all", Connections: 1, MaxWait: time.Minute, MaxWaiting: 1000})
	first := r.must("10.0.0.1")
	var waiting []*visitor
	for i := range 900 {
		waiting = append(waiting, r.visit(fmt.Sprintf("10.0.0.%d", i%9), nil))
	}
	rand.New(rand.NewPCG(rnd.Uint64(), 0)).Shuffle(len(waiting), func(i, j int) { waiting[i], waiting[j] = waiting[j], waiting[i] })
	for i, v := range waiting {
		v.leave()
		if v.why != shaper.ClientGone {
			t.Fatalf("refused for %v", v.why)
		}
		if i%50 == 0 {
			r.consistent()
		}
	}
	first.finish()
	r.idle()
}
