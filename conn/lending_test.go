package conn

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

const third = (shaper.Whole + 2) / 3

// poolKey is the key of the pool of the first limit for a port.
func (r *admissionRig) poolKey(port uint16) shaper.Key {
	return shaper.Key{Limit: r.shaper.Policy().State(0).ID, Port: port}
}

// demands reports what the host of r needs of pools.
func (r *admissionRig) demands() (all []shaper.Demand) {
	ld := r.admission.sharing.lending
	ld.beginReport()
	for more := true; more; {
		all, more = ld.report(all, r.now)
	}
	return all
}

// Waiters are served at once when a host has more slots, and nothing is admitted while more are in flight than
// it has.
func TestLending(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "cap", Shared: true, MaxConnections: 30, QueueTimeout: time.Hour, MaxQueue: 1000})
	var waiting []*visitor
	for i := range 50 {
		waiting = append(waiting, r.visit(fmt.Sprint("10.0.0.", i), nil))
	}
	key, now := r.poolKey(0), r.now
	lease := shaper.Lease{End: now + leaky.Second, AloneAt: now + 2*leaky.Second, Alone: third, Hosts: 3, SlotsCold: third}
	given := func(parts uint32) []shaper.KeyParts { return []shaper.KeyParts{{Key: key, Parts: parts}} }
	with := func(change func(*shaper.Lease)) shaper.Lease {
		l := lease
		change(&l)
		return l
	}
	closed, open := with(func(l *shaper.Lease) { l.Alone = 0 }), with(func(l *shaper.Lease) { l.Alone = shaper.Whole })
	joining := with(func(l *shaper.Lease) { l.SlotsCold = 0 })
	for _, tt := range []struct {
		name   string
		at     leaky.Time // after now
		shares shaper.Shares
		slots  int
	}{
		{"no lease", 0, shaper.Shares{}, 0},
		{"it does not know yet what is hot", 0, shaper.Shares{Lease: joining}, 5},
		{"cold", 0, shaper.Shares{Lease: lease}, 10},
		{"hot", 0, shaper.Shares{Lease: lease, Slots: given(shaper.Whole)}, 20},
		{"hot, renewed", 0, shaper.Shares{Lease: lease}, 20},
		{"less", 0, shaper.Shares{Lease: lease, Slots: given(shaper.Whole / 5)}, 8},
		{"none of the pool", 0, shaper.Shares{Lease: lease, Slots: given(0)}, 5},
		{"cold again", 0, shaper.Shares{Lease: lease, ColdSlots: []shaper.Key{key}}, 10},
		{"hot again", 0, shaper.Shares{Lease: lease, Slots: given(shaper.Whole)}, 20},
		{"all others are cold", 0, shaper.Shares{Lease: lease, Reset: true}, 10},
		{"all others are cold but this one", 0, shaper.Shares{Lease: lease, Reset: true, Slots: given(2 * third)}, 15},
		{"the lease has ended", leaky.Second, shaper.Shares{Lease: lease}, 15},
		{"alone", 2 * leaky.Second, shaper.Shares{Lease: lease}, 15},
		{"closed", 2 * leaky.Second, shaper.Shares{Lease: closed}, 0},
		{"open", 2 * leaky.Second, shaper.Shares{Lease: open}, 30},
		{"back in the group", 2 * leaky.Second, shaper.Shares{Lease: with(func(l *shaper.Lease) { l.AloneAt = leaky.Never })}, 15},
	} {
		r.until(now + tt.at)
		before := len(r.in)
		r.setShares(tt.shares)
		if n := len(r.in); n != max(before, tt.slots) {
			t.Errorf("%s: %d in flight after %d, want %d", tt.name, n, before, max(before, tt.slots))
		}
		for v := range r.in { // slots beyond go to nobody
			if v.finish(); len(r.in) < tt.slots {
				t.Fatalf("%s: %d in flight, want %d at least", tt.name, len(r.in), tt.slots)
			}
			waiting = append(waiting, r.visit(fmt.Sprint("10.0.1.", len(waiting)), nil))
			if len(r.in) == tt.slots {
				break
			}
		}
		r.consistent()
	}
	for _, v := range waiting {
		if !v.granted {
			r.admission.withdraw(&v.waiter, r.now)
		}
	}
	for v := range r.in {
		v.finish()
	}
	r.setShares(shaper.Shares{Lease: lease, Reset: true})
	for range 2 {
		r.demands()
		r.admission.sharing.report(nil, r.admission.sharing.beginReport(), r.now)
	}
	if n := len(r.admission.byKey); n > 0 {
		t.Errorf("%d gates are left", n)
	}
}

// The slots change by themselves when a host has been alone for long, and waiters need no other event.
func TestLending_Alone(t *testing.T) {
	for _, tt := range []struct {
		alone     uint32
		then, new int // in flight, and those of them that came last
	}{{0, 5, 0}, {third, 10, 5}, {shaper.Whole, 30, 25}} {
		r := newAdmissionRig(t, shaper.Limit{Name: "cap", Shared: true, MaxConnections: 30, QueueTimeout: time.Hour, MaxQueue: 1000})
		r.setShares(shaper.Shares{Lease: shaper.Lease{End: r.now + leaky.Second, AloneAt: r.now + 2*leaky.Second, Alone: tt.alone, Hosts: 3, SlotsCold: third}})
		for i := range 50 {
			r.visit(fmt.Sprint("10.0.0.", i), nil)
		}
		end := r.now + 2*leaky.Second
		r.until(end - 1)
		if n := len(r.in); n != 10 {
			t.Errorf("%d in flight before it is alone, want 10", n)
		}
		for v := range r.in {
			if v.finish(); len(r.in) != 10 {
				t.Errorf("%d in flight, want 10", len(r.in))
			}
			break
		}
		r.until(end)
		for v := range r.in {
			if len(r.in) > tt.then {
				v.finish()
			}
		}
		if n := len(r.in); n != tt.then {
			t.Errorf("alone with %d parts: %d in flight, want %d", tt.alone, n, tt.then)
		}
	}
}

// A report says what connections need of hot pools, and of those that may become short.
func TestLending_Demand(t *testing.T) {
	slots := func(n int) uint32 { return shaper.SlotPool{Most: 30, Hosts: 3}.Parts(n) }
	for _, tt := range []struct {
		name     string
		given    uint32 // parts; 0 is cold
		inFlight int
		waiting  int // and as many sources
		want     string
	}{
		{name: "unused"},
		{name: "80 % of a cold one", inFlight: 8},
		{name: "90 % of a cold one", inFlight: 9, want: fmt.Sprint(slots(9), slots(9), slots(10)-slots(9), 0)},
		{name: "a cold one with waiters", inFlight: 10, waiting: 7, want: fmt.Sprint(slots(10), slots(17), slots(18)-slots(17), 7)},
		{name: "more than there is", inFlight: 10, waiting: 70, want: fmt.Sprint(slots(10), shaper.Whole, 0, 70)},
		{name: "a hot one that is unused", given: 1, want: fmt.Sprint(0, 0, 0, 0)},
		{name: "own slots", given: shaper.Whole, inFlight: 4, want: fmt.Sprint(0, 0, 0, 0)},
		{name: "the next would be of the pool", given: shaper.Whole, inFlight: 5, want: fmt.Sprint(0, 0, slots(6), 0)},
		{name: "all of it", given: shaper.Whole, inFlight: 20, want: fmt.Sprint(slots(20), slots(20), slots(22)-slots(20), 0)},
		{name: "all of it, with waiters", given: shaper.Whole, inFlight: 20, waiting: 1, want: fmt.Sprint(slots(20), slots(21), slots(23)-slots(21), 1)},
	} {
		r := newAdmissionRig(t, shaper.Limit{Name: "cap", Key: shaper.KeyPort, Shared: true, MaxConnections: 30, QueueTimeout: time.Hour, MaxQueue: 1000})
		shares := shaper.Shares{Lease: shaper.Lease{End: leaky.Never, AloneAt: leaky.Never, Alone: third, Hosts: 3, SlotsCold: third}}
		if tt.given > 0 {
			shares.Slots = []shaper.KeyParts{{Key: r.poolKey(1), Parts: tt.given}}
		}
		r.setShares(shares)
		told := 0
		r.admission.sharing.onShort = func() { told++ }
		for i := range tt.inFlight + tt.waiting {
			r.visit(fmt.Sprint("10.0.0.", i), nil)
		}
		for range 3 {
			got := ""
			for _, d := range r.demands() {
				if d.Key != r.poolKey(1) || !d.Slots {
					t.Errorf("%s: %+v is reported", tt.name, d)
				}
				got += fmt.Sprint(d.Held, d.Want, d.Spare, d.Waiting)
			}
			if got != tt.want {
				t.Errorf("%s: %s is reported, want %s", tt.name, got, tt.want)
			}
		}
		if told != min(1, tt.waiting) {
			t.Errorf("%s: told %d times", tt.name, told)
		}
	}
}

// A host wants what was in flight at the same time of late, and gives back the rest.
func TestLending_DemandFalls(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "cap", Shared: true, MaxConnections: 30, QueueTimeout: time.Hour, MaxQueue: 1000})
	pool := shaper.SlotPool{Most: 30, Hosts: 3}
	r.setShares(shaper.Shares{Lease: shaper.Lease{End: leaky.Never, AloneAt: leaky.Never, Hosts: 3}, Slots: []shaper.KeyParts{{Key: r.poolKey(0), Parts: shaper.Whole}}})
	for i := range 20 {
		r.visit(fmt.Sprint("10.0.0.", i), nil)
	}
	for v := range r.in {
		if len(r.in) > 8 {
			v.finish()
		}
	}
	begin := r.now
	wantAt := func(d time.Duration, held, want, all int) {
		t.Helper()
		for r.now < begin+leaky.FromDuration(d) {
			r.sleep(25 * time.Millisecond)
			r.demands()
		}
		if got := r.demands()[0]; got.Held != pool.Parts(held) || got.Want != pool.Parts(want) || got.Want+got.Spare != pool.Parts(all) {
			t.Errorf("after %v: %+v, want %d, %d and %d slots", d, got, held, want, all)
		}
	}
	wantAt(400*time.Millisecond, 8, 20, 22)
	wantAt(1200*time.Millisecond, 8, 8, 22)
	wantAt(2100*time.Millisecond, 8, 8, 9)
}

// A limit that becomes shared while connections are in flight reports them, and what waits is not admitted
// before they have ended. Until it is known which of its pools are hot, a host has only its own slots of each.
func TestLending_BecomesShared(t *testing.T) {
	limit := shaper.Limit{Name: "cap", Key: shaper.KeyPort, MaxConnections: 30, QueueTimeout: time.Hour, MaxQueue: 1000}
	r := newAdmissionRig(t, limit)
	shares := shaper.Shares{Lease: shaper.Lease{End: leaky.Never, AloneAt: leaky.Never, Alone: third, Hosts: 3, SlotsCold: third}, Reset: true}
	r.setShares(shares)
	for i := range 35 {
		r.visitPort("10.0.0.1", 1, nil)
		if i < 8 {
			r.visitPort("10.0.0.1", 2, nil) // less than a host may have of a cold pool
		}
	}
	limit.Shared = true
	was := r.shaper.Policy()
	r.swap(limit)
	r.admission.sharing.reload(r.now)
	r.sleep(0)
	late := shares
	late.Policy = was // the member did not know of the reload yet
	r.setShares(late)
	r.visitPort("10.0.0.1", 2, nil)
	for range 6 {
		r.visitPort("10.0.0.1", 3, nil)
	}
	if n := len(r.in); n != 38+5 {
		t.Fatalf("%d in flight, want the 38 of before, and 5 slots of a new pool", n)
	}
	r.setShares(shares)
	if n := len(r.in); n != 38+1+6 {
		t.Fatalf("%d in flight, want 7 more, of cold pools", n)
	}
	all := r.demands()
	slices.SortFunc(all, func(a, b shaper.Demand) int { return int(a.Key.Port) - int(b.Key.Port) })
	if len(all) != 2 || all[0].Key != r.poolKey(1) || all[0].Held != shaper.Whole || all[0].Waiting != 1 || all[1].Key != r.poolKey(2) {
		t.Errorf("%+v is reported, want a pool that is used up, and one that is nearly", all)
	}
	for v := range r.in {
		if v.flow.Port == 1 {
			v.finish()
			break
		}
	}
	if n := len(r.in); n != 44 {
		t.Errorf("%d in flight after one has ended, want 44", n)
	}
	r.swap(limit)
	r.admission.sharing.reload(r.now) // which changes nothing
	r.visitPort("10.0.0.1", 3, nil)
	if n := len(r.in); n != 45 {
		t.Errorf("%d in flight, want one more, of a cold pool", n)
	}
	limit.Shared = false
	r.swap(limit)
	r.admission.sharing.reload(r.now)
	if n := len(r.in); n != 46 {
		t.Errorf("%d in flight when the limit is not shared any more, want one more, of 30", n)
	}
	if all := r.demands(); len(all) > 0 {
		t.Errorf("%+v is reported of a limit that is not shared any more", all)
	}
}

// Connections that are refused, since none may wait, ask for slots too.
func TestLending_Refused(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "cap", Key: shaper.KeyPort, Shared: true, MaxConnections: 2})
	told := 0
	r.admission.sharing.onShort = func() { told++ }
	r.setShares(shaper.Shares{Lease: shaper.Lease{End: leaky.Never, AloneAt: leaky.Never, Alone: third, Hosts: 3, SlotsCold: third}})
	for range 3 {
		if v := r.visit("10.0.0.1", nil); v.granted {
			t.Fatal("admitted without a slot")
		}
	}
	all := r.demands()
	if len(all) != 1 || all[0].Waiting != 1 || all[0].Want != shaper.Whole || told != 1 {
		t.Errorf("%+v is reported, and told %d times", all, told)
	}
	if all = r.demands(); len(all) != 1 || all[0].Waiting != 1 {
		t.Errorf("%+v is reported just after", all)
	}
	r.sleep(time.Second)
	r.demands()
	r.admission.sharing.report(nil, r.admission.sharing.beginReport(), r.now)
	if n := len(r.admission.byKey); n != 0 {
		t.Errorf("%d gates are left", n)
	}
	r.setShares(shaper.Shares{Lease: r.admission.sharing.lease, Slots: []shaper.KeyParts{{Key: r.poolKey(1), Parts: shaper.Whole}}})
	r.must("10.0.0.1")
}

// A host whose adaptive maximum falls does not say that it has more parts than it was given, as it would have more slots
// when that rises again; nor fewer than what is in flight needs of the operator's maximum.
func TestLending_AdaptiveDemand(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{
		Name: "cap", Match: shaper.Match{Protocol: shaper.TCP}, Shared: true, MaxConnections: 100, Adapt: shaper.AdaptOn, MinConnections: 1, QueueTimeout: time.Hour, MaxQueue: 1000,
	})
	state, key := r.shaper.Policy().State(0), r.poolKey(0)
	level := func(n int) {
		state.Adaptive.Store(&shaper.AdaptiveStatus{Limit: n, Most: n, Current: n})
		for _, ad := range r.admission.adapters {
			r.admission.sharing.lending.update(ad.gate)
		}
		r.admission.run(r.now)
	}
	give := func(parts uint32) {
		r.setShares(shaper.Shares{
			Lease: shaper.Lease{End: r.now + leaky.Second, AloneAt: leaky.Never, Hosts: 2, SlotsCold: shaper.Whole / 2}, Slots: []shaper.KeyParts{{Key: key, Parts: parts}},
		})
	}
	level(100)
	for i := range 120 {
		r.visit(fmt.Sprint("10.0.0.", i), nil)
	}
	give(shaper.Whole / 2)
	most := shaper.SlotPool{Most: 100, Hosts: 2, Lent: true}
	for _, tt := range []struct {
		level    int
		given    uint32
		inFlight int
		held     uint32
	}{
		{100, shaper.Whole / 2, 50, most.Parts(50)},
		{89, shaper.Whole / 2, 50, shaper.Whole / 2},
		{10, shaper.Whole / 2, 50, shaper.Whole / 2},
		{100, shaper.Whole / 2, 50, most.Parts(50)},
		{50, shaper.Whole / 10, 50, most.Parts(50)}, // it has to give back, and cannot yet
		{100, shaper.Whole / 10, 50, most.Parts(50)},
		{100, shaper.Whole * 6 / 10, 60, most.Parts(60)},
	} {
		level(tt.level)
		give(tt.given)
		all := r.demands()
		if n := len(r.in); n != tt.inFlight || len(all) != 1 || all[0].Held != tt.held {
			t.Errorf("%+v: %d in flight, %+v", tt, n, all)
		}
	}
	for v := range r.in {
		v.finish()
	}
}
