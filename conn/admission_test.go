package conn

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// admissionRig runs an admission on a clock of its own.
type admissionRig struct {
	t         testing.TB
	shaper    *shaper.Shaper
	wheel     *pacer.Wheel
	now       leaky.Time
	admission *admission
	in        map[*visitor]bool // those in flight
	listener  *listener         // of the downstreams, or nil
}

func newAdmissionRig(t testing.TB, limits ...shaper.Limit) *admissionRig {
	return newClassAdmissionRig(t, nil, limits...)
}

func newClassAdmissionRig(t testing.TB, classes []shaper.TrafficClass, limits ...shaper.Limit) *admissionRig {
	r := &admissionRig{t: t, shaper: shaper.New(1000), wheel: new(pacer.Wheel), now: leaky.Second, in: map[*visitor]bool{}}
	clock := func() leaky.Time { return r.now }
	r.admission = newSharing(r.shaper, r.wheel, clock, clock).admission
	r.swapClasses(classes, limits...)
	return r
}

func (r *admissionRig) swap(limits ...shaper.Limit) { r.swapClasses(nil, limits...) }

func (r *admissionRig) swapClasses(classes []shaper.TrafficClass, limits ...shaper.Limit) {
	p := policyOf(r.t, r.shaper, classes, limits...)
	swapPolicy(p, func() { r.shaper.Swap(p, r.now) }, r.now, r.admission)
	for v := range r.in {
		v.retake(&v.flow, p.Route(&v.flow), r.now)
	}
	r.admission.run(r.now)
}

// sleep advances the clock by d.
func (r *admissionRig) sleep(d time.Duration) { r.until(r.now + leaky.FromDuration(d)) }

func (r *admissionRig) until(end leaky.Time) {
	for r.step(end) {
	}
	r.now = end
}

// step advances to the next event, if there is one up to end.
func (r *admissionRig) step(end leaky.Time) bool {
	at, ok := r.wheel.Next()
	if !ok || at > end {
		return false
	}
	r.now = max(r.now, at)
	r.wheel.Advance(r.now)
	return true
}

// after calls f after d.
func (r *admissionRig) after(d time.Duration, f func()) *pacer.Event {
	e := &pacer.Event{Fire: func(leaky.Time) { f() }}
	r.wheel.Schedule(e, r.now+leaky.FromDuration(d))
	return e
}

// visitor is a connection. then, if set, is called when it is admitted or refused.
type visitor struct {
	waiter
	rig        *admissionRig
	granted    bool
	refusedFor shaper.Reason // None unless it was refused
	at         leaky.Time    // when it was admitted or refused
	then       func()

	refusal refusal
	to      *session // with a downstream, or nil
}

func (v *visitor) admitted(now leaky.Time) {
	if v.granted || v.refusedFor != shaper.None {
		v.rig.t.Error("reported twice")
	}
	v.granted = true
	v.rig.in[v] = true
	v.settled(now)
}

func (v *visitor) refused(why refusal, now leaky.Time) {
	if v.granted || v.refusedFor != shaper.None || why.limit == nil || why.reason == shaper.None || len(v.held) > 0 {
		v.rig.t.Errorf("reported twice, or wrongly: %+v", why)
	}
	v.refusedFor, v.refusal = why.reason, why
	v.settled(now)
}

func (v *visitor) settled(now leaky.Time) {
	v.at = now
	if v.then != nil {
		v.then()
	}
}

// visit requests admission for a connection of source.
func (r *admissionRig) visit(source string, then func(*visitor)) *visitor {
	return r.visitPort(source, 1, then)
}

func (r *admissionRig) visitPort(source string, port uint16, then func(*visitor)) *visitor {
	return r.enter(source, port, false, then)
}

func (r *admissionRig) enter(source string, port uint16, unverified bool, then func(*visitor)) *visitor {
	v := &visitor{rig: r}
	v.unverified = unverified
	v.owner, v.listen, v.flow = v, "l", *flowFrom(source, port)
	v.inTurns = r.admission.policy.PerTurn() != 0
	if r.listener != nil {
		v.to = &session{binding: &binding{listener: r.listener}}
		v.to.admission, v.to.flow = r.admission, v.flow
	}
	if then != nil {
		v.then = func() { then(v) }
	}
	r.admission.acquire(&v.waiter, r.now)
	return v
}

func (v *visitor) pool() *gate {
	if v.to == nil {
		return nil
	}
	return v.to.pool()
}

func (v *visitor) assignDownstream(now leaky.Time) {
	if v.to.assignDownstream(now); v.to.downstream == nil {
		v.rig.t.Error("admitted to no downstream")
	}
}
func (v *visitor) leave() { v.rig.admission.cancel(&v.waiter, shaper.ClientGone, v.rig.now) }

func (v *visitor) finish() {
	delete(v.rig.in, v)
	if v.to != nil {
		v.to.downstream.inFlight--
	}
	v.release(v.rig.now)
	if v.to != nil {
		v.to.wakeWaiters(v.rig.now)
	}
}

func (r *admissionRig) must(source string) *visitor {
	r.t.Helper()
	v := r.visit(source, nil)
	if !v.granted {
		r.t.Fatalf("%s was not admitted, refused for %v", source, v.refusedFor)
	}
	return v
}

func TestGate_HoldsCapAndLosesNoWakeup(t *testing.T) {
	rnd := testutil.Rand(t)
	operations := 250_000
	if testing.Short() || raceEnabled {
		operations = 50_000
	}
	limits := func(cap int) []shaper.Limit {
		return []shaper.Limit{
			{Name: "per-source", Key: shaper.KeySource, MaxConnections: 1 + cap/2, QueueTimeout: 10 * time.Millisecond, MaxQueue: 60},
			{Name: "all", MaxConnections: cap, QueueTimeout: 6 * time.Millisecond, MaxQueue: 20},
		}
	}
	const first, visitors = 10, 100
	r := newAdmissionRig(t, limits(first)...)
	cap, inFlight, got, begun := first, 0, 0, 0
	var reasons [shaper.NumReasons]int
	random := func(most int) time.Duration { return time.Duration(rnd.IntN(most)) * time.Microsecond }
	var visit func(source string)
	again := func(source string) { r.after(random(5000), func() { visit(source) }) }
	visit = func(source string) {
		if begun == operations {
			return
		}
		begun++
		gone := &pacer.Event{}
		v := r.visit(source, func(v *visitor) {
			r.wheel.Cancel(gone)
			if !v.granted {
				reasons[v.refusedFor]++
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
		if v.queue != nil {
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
		if cap > r.admission.policy.Limit(1).MaxConnections {
			cap = max(inFlight, r.admission.policy.Limit(1).MaxConnections)
		}
		if r.now > resize && begun < operations {
			resize = r.now + leaky.FromDuration(random(200_000))
			next := 2 // so few that some wait for longer than they may
			if rnd.IntN(2) == 0 {
				next += rnd.IntN(15)
			}
			// Connections in flight stay, so the old cap applies until they have ended.
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
			t.Errorf("none was refused for %v", reason)
		}
	}
	t.Logf("%d operations, %d got a slot, %d client gone, %d timeout, %d full", operations, got,
		reasons[shaper.ClientGone], reasons[shaper.WaitTimeout], reasons[shaper.WaitingFull])
}

func TestPoliteSourceDoesNotWaitBehindAHog(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "all", MaxConnections: 10, QueueTimeout: 10 * time.Second, MaxQueue: 1000})
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

func TestWaitQuota_SharedBySources(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "all", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10})
	first := r.must("10.0.0.1")
	var got, full int
	for range 20 {
		r.visit("10.0.0.1", func(v *visitor) {
			switch {
			case v.granted:
				got++
				v.finish()
			case v.refusedFor == shaper.WaitingFull:
				full++
			}
		})
	}
	if full != 10 {
		t.Errorf("%d of 20 were refused, want 10", full)
	}
	polite := r.visit("10.0.0.2", func(v *visitor) { v.finish() })
	if full != 11 {
		t.Errorf("the polite source did not displace the hog")
	}
	first.finish()
	if !polite.granted {
		t.Error("the polite source was refused")
	}
	if got != 9 {
		t.Errorf("%d connections of the hog got a slot, want 9", got)
	}
	r.idle()
}

// A source that waits at many ports gets no more of the quota than one that waits at one.
func TestWaitQuota_ManyPortsGetOneShare(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "each port", Key: shaper.KeyPort, MaxConnections: 1, QueueTimeout: time.Hour, MaxQueue: 20})
	var in, hog []*visitor
	for port := range uint16(20) {
		in = append(in, r.visitPort("10.0.0.1", 1+port, nil))
		hog = append(hog, r.visitPort("10.0.0.1", 1+port, nil))
	}
	waits := func(all []*visitor) (n int) {
		for _, v := range all {
			if v.queue != nil {
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
		t.Errorf("a source that waits at 20 ports has %d of 20 waiters, one that waits at one of them %d", a, b)
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
	r := newAdmissionRig(t, shaper.Limit{
		Name: "all", NewConnections: shaper.Frequency{N: 50, Per: time.Second}, QueueTimeout: 10 * time.Second, MaxQueue: 1000,
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
		t.Errorf("after an idle hour two were admitted %v apart", d)
	}
	r.idle()
}

func TestObservedGateOnlyCounts(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "all", MaxConnections: 1, QueueTimeout: time.Second, MaxQueue: 10, Observe: true})
	a, b := r.must("10.0.0.1"), r.must("10.0.0.1")
	state := r.shaper.Policy().State(0)
	if state.InFlight.Load() != 2 || state.Connections[shaper.Delay][shaper.ByConnections].Load() != 1 {
		t.Errorf("%d in flight, %d would have waited", state.InFlight.Load(), state.Connections[shaper.Delay][shaper.ByConnections].Load())
	}
	a.finish()
	b.finish()
	r.idle()
}

func TestTryAcquireDoesNotWait(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "all", MaxConnections: 1, QueueTimeout: time.Second, MaxQueue: 10})
	a := r.must("10.0.0.1")
	if _, full := r.admission.tryAcquire(flowFrom("10.0.0.1", 1), "l", false, r.now); full == nil {
		t.Error("a slot was taken that is not free")
	}
	if n := r.shaper.Policy().State(0).Connections[shaper.Refuse][shaper.ByConnections].Load(); n != 1 {
		t.Errorf("%d refusals are counted, want 1", n)
	}
	a.finish()
	got, full := r.admission.tryAcquire(flowFrom("10.0.0.1", 1), "l", false, r.now)
	if full != nil {
		t.Fatal("a free slot was not taken")
	}
	got.release(r.now)
	r.idle()
}

// Many waiters of a source leave at once, in any order.
func TestWaitersLeaveInAnyOrder(t *testing.T) {
	rnd := testutil.Rand(t)
	r := newAdmissionRig(t, shaper.Limit{Name: "all", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 1000})
	first := r.must("10.0.0.1")
	var waiting []*visitor
	for i := range 900 {
		waiting = append(waiting, r.visit(fmt.Sprintf("10.0.0.%d", i%9), nil))
	}
	rand.New(rand.NewPCG(rnd.Uint64(), 0)).Shuffle(len(waiting), func(i, j int) { waiting[i], waiting[j] = waiting[j], waiting[i] })
	for i, v := range waiting {
		v.leave()
		if v.refusedFor != shaper.ClientGone {
			t.Fatalf("refused for %v", v.refusedFor)
		}
		if i%50 == 0 {
			r.consistent()
		}
	}
	first.finish()
	r.idle()
}
