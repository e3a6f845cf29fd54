package conn

import (
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// hooked is a datagram of 1,000 bytes that calls a function when it leaves.
type hooked struct {
	packet
	then func()
}

func (h *hooked) send(now leaky.Time) (bytes, packets uint64, requeue bool) {
	bytes, packets, requeue = h.packet.send(now)
	h.then()
	return bytes, packets, requeue
}

func (r *rig) offer(path []hop, droppable bool, then func()) *hooked {
	h := &hooked{packet{rig: r}, then}
	h.unit = unit{owner: h, path: path, bytes: 1000, packets: 1, credit: 1, droppable: droppable}
	r.scheduler.submit(&h.unit, r.now)
	return h
}

// A loop that is stopped between two units and goes on after the lease has ended, and one whose machine
// was suspended there, which the loop's clock does not show, lets no further unit leave.
func TestLeaseEnd_LoopStops(t *testing.T) {
	for _, tt := range []struct {
		name      string
		suspended bool
	}{
		{"process stopped", false},
		{"machine suspended", true},
	} {
		for _, queues := range []int{1, 5} {
			r := newRig(t, shaper.Limit{Name: "l", Key: shaper.KeySource, Shared: true, Rate: 8e6, Burst: 1e6, MaxDelay: time.Second})
			var away leaky.Time
			r.scheduler.sharing.boot = func() leaky.Time { return r.now + away }
			r.setShares(shaper.Shares{Lease: shaper.Lease{End: 20 * leaky.Second, AloneAt: leaky.Never, Cold: shaper.Whole}})
			var paths [][]hop
			for i := range queues {
				paths = append(paths, r.path(flowFrom(fmt.Sprint("10.0.0.", i), 1)))
			}
			r.advance(10*leaky.Second, onTime) // all have the credit of a full burst
			stopped := false
			for range 50 {
				for _, path := range paths {
					r.offer(path, true, func() {
						switch {
						case stopped:
						case tt.suspended:
							away = 3600 * leaky.Second
						default:
							r.now += 3600 * leaky.Second
						}
						stopped = true
					})
				}
			}
			if r.count != 1 {
				t.Errorf("%s, %d queues: %d units left after the lease had ended, want the one alone that was about to", tt.name, queues, r.count)
			}
		}
	}
}

// Parts change at the end of the lease by themselves, and what has passed since is counted at the parts
// of each phase, however late the loop wakes up. Between the two instants a quarter is all there is, or all that is
// not withheld.
func TestLeaseEnd_Phases(t *testing.T) {
	ms := leaky.Second / 1000
	for _, late := range []leaky.Time{0, 3 * ms, 50 * ms} {
		for _, suspended := range []bool{false, true} {
			for _, withheld := range []uint32{0, shaper.Whole * 3 / 4} {
				checkPhases(t, late, suspended, withheld)
			}
		}
	}
}

func checkPhases(t *testing.T, late leaky.Time, suspended bool, withheld uint32) {
	ms := leaky.Second / 1000
	r := newRig(t, shaper.Limit{Name: "l", Shared: true, Rate: 8e6, MaxDelay: time.Second}) // a unit a millisecond
	var away leaky.Time
	r.scheduler.sharing.boot = func() leaky.Time { return r.now + away }
	path := r.path(flowFrom("10.0.0.1", 1))
	lease := shaper.Lease{End: r.now + 20*ms, AloneAt: r.now + 40*ms, Cold: shaper.Whole / 4, Between: shaper.Whole / 4, Alone: shaper.Whole / 2}
	if withheld > 0 {
		lease.Between, lease.Withheld = shaper.Whole, withheld
	}
	key := r.keyOf(flowFrom("10.0.0.1", 1))
	r.setShares(shaper.Shares{Lease: lease, Given: []shaper.KeyParts{{Key: key, Parts: shaper.Whole}}})
	h := &hooked{packet{rig: r}, func() {}}
	h.unit = unit{owner: h, path: path, bytes: 100_000, packets: 1}
	start := r.now
	r.scheduler.submit(&h.unit, r.now) // leaves, and the bucket owes 100 ms at the whole rate
	next := r.offer(path, false, func() {})
	// 20 ms at the whole, 20 ms at a quarter, and the rest at a half.
	want := start + (20+20+2*(100-20-5))*ms
	if suspended {
		r.advance(start+10*ms, onTime)
		away = 15 * ms // it is 5 ms after the end of the lease now
		r.scheduler.sharing.follow(r.now)
		// By the loop's clock 5 ms at the whole, as the machine may have stopped before that, and
		// 20 at a quarter.
		want = start + (5+20+2*(100-5-5))*ms
	}
	r.advance(start+60*ms, func() leaky.Time { return late })
	if !next.queued {
		t.Fatal("a unit left early")
	}
	at := r.paceOut(next)
	if at < want || at > want+leaky.Second/1e6 {
		t.Errorf("wake-ups %v late, suspended %v, withheld %d: the unit left after %v, want %v", late.Duration(), suspended, withheld, (at - start).Duration(), (want - start).Duration())
	}
}

// paceOut advances until h has left, and returns when it did.
func (r *rig) paceOut(h *hooked) leaky.Time {
	for h.queued {
		at, ok := r.wheel.Next()
		if !ok {
			r.t.Fatal("a unit waits for ever")
		}
		r.advance(at, onTime)
	}
	return r.now
}

// While this host has no parts nothing leaves. Datagrams wait for max_delay and streams for ever, and
// later they leave without a burst.
func TestShut(t *testing.T) {
	r := newRig(t, shaper.Limit{Name: "l", Shared: true, Rate: 8e6, Burst: 50_000, MaxDelay: 20 * time.Millisecond})
	first := r.path(flowFrom("10.0.0.1", 1))
	for range 100 { // before any lease
		r.offer(first, true, func() {})
	}
	if r.count != 0 || r.refused == 0 || r.refused > 80 {
		t.Errorf("%d left and %d were refused, want none and all but those of max_delay", r.count, r.refused)
	}
	grant := r.offer(r.path(flowFrom("10.0.0.2", 1)), false, func() {})
	r.advance(r.now+leaky.Second, onTime)
	if r.count != 0 || r.refused != 100 {
		t.Errorf("after a second %d left and %d were refused, want none and all", r.count, r.refused)
	}
	r.advance(r.now+100*leaky.Second, onTime)
	r.setShares(shaper.Shares{Lease: steady(shaper.Whole / 2)})
	if grant.queued || r.count != 1 {
		t.Errorf("%d left when it had parts, want the grant", r.count)
	}
	for range 20 {
		r.offer(first, true, func() {})
	}
	if r.count != 1 {
		t.Errorf("%d left at once after it had parts, want one: there is no credit", r.count)
	}
	before := r.now
	r.advance(r.now+leaky.Second/50, onTime)
	if n := r.count; n < 10 || n > 12 {
		t.Errorf("%d left in %v at half of a unit a millisecond", n, (r.now - before).Duration())
	}
	r.setShares(shaper.Shares{Lease: shaper.Lease{}})
	n := r.count
	if r.advance(r.now+leaky.Second, onTime); r.count != n {
		t.Errorf("%d left after the parts were taken away", r.count-n)
	}
}

// A unit that is booked leaves when its buckets allow it after a change of a share, not before and not
// when it was booked.
func TestShareChange_Rebooks(t *testing.T) {
	ms := leaky.Second / 1000
	r := newRig(t,
		shaper.Limit{Name: "source", Key: shaper.KeySource, Shared: true, Rate: 8e6, MaxDelay: time.Second},
		shaper.Limit{Name: "port", Key: shaper.KeyPort, Rate: 8e5, MaxDelay: time.Second})
	r.setShares(shaper.Shares{Lease: steady(shaper.Whole)})
	r.advance(2*leaky.Second, onTime)
	start := r.now
	one, two := r.path(flowFrom("10.0.0.1", 1)), r.path(flowFrom("10.0.0.1", 2))
	r.offer(one, false, func() {})
	booked := r.offer(one, false, func() {}) // waits 10 ms for the port
	r.advance(start+9*ms, onTime)
	other := &hooked{packet{rig: r}, func() {}}
	other.unit = unit{owner: other, path: two, bytes: 30_000, packets: 1}
	r.scheduler.submit(&other.unit, r.now) // leaves, and the source waits until 39 ms
	r.advance(start+15*ms, onTime)
	if !booked.booked || booked.due != start+39*ms {
		t.Fatalf("booked %v, for %v; want 39ms", booked.booked, (booked.due - start).Duration())
	}
	for _, step := range []struct {
		at, parts, due leaky.Time // ms, of 4, ms
	}{
		{19, 2, 59}, // 20 ms are left, which take 40
		{29, 0, 0},
		{500, 2, 530},
		{510, 4, 520},
	} {
		r.advance(start+step.at*ms, onTime)
		r.setShares(shaper.Shares{Lease: steady(uint32(step.parts) * shaper.Whole / 4)})
		want := start + step.due*ms
		if step.due == 0 {
			want = leaky.Never
		}
		if booked.due < want || booked.due > want.Add(ms/1000) {
			t.Fatalf("at %d ms with %d parts: booked for %v, want %d ms", step.at, step.parts, (booked.due - start).Duration(), step.due)
		}
	}
	if at := r.paceOut(booked); at < start+520*ms || at > start+520*ms+ms/1000 {
		t.Errorf("the booked unit left after %v, want 520ms", (at - start).Duration())
	}
}

// While shares change, sources are served as fairly as ever.
func TestShareChange_IsFair(t *testing.T) {
	r := newFairRig(t, t.Fatalf)
	r.rig = newRig(t, shaper.Limit{Name: "all", Shared: true, Rate: 8e6})
	for i := range 5 {
		r.open(fmt.Sprint("10.0.0.", i), slicesOf(uint64(300*(i+1)), 4000))
	}
	parts := uint32(shaper.Whole)
	for range 2000 {
		parts = parts*16_807%(1<<31-1) | 1<<12
		r.setShares(shaper.Shares{Lease: steady(min(parts%(shaper.Whole+1), shaper.Whole))})
		r.advance(r.now+leaky.Second/500, onTime)
	}
	if n := len(r.sources.served); n != 5 || r.sources.served["10.0.0.0"] < 1e5 {
		t.Errorf("%d sources were served, one of them %.0f bytes", n, r.sources.served["10.0.0.0"])
	}
}

func TestSharedUnit_DoesNotAllocate(t *testing.T) {
	s := shaper.New(1000)
	wheel, now := new(pacer.Wheel), leaky.Second
	clock := func() leaky.Time { return now }
	sg := newSharing(s, wheel, clock, clock)
	p := policy(t, s, shaper.Limit{Name: "all", Shared: true, Rate: 100e9, MaxDelay: time.Second})
	s.Swap(p, 0)
	sg.set(&shaper.Shares{Lease: steady(shaper.Whole / 3)})
	f := flowFrom("10.0.0.1", 1)
	u := &benchUnit{}
	u.unit = unit{owner: u, path: sg.scheduler.newPath(pathSpec{policy: p, flow: f, route: p.Route(f), set: 1}), bytes: 1500, packets: 1}
	if n := testing.AllocsPerRun(1000, func() {
		sg.scheduler.submit(&u.unit, now)
		for u.queued {
			now, _ = wheel.Next()
			wheel.Advance(now)
		}
	}); n != 0 {
		t.Errorf("%v allocations a unit", n)
	}
}
