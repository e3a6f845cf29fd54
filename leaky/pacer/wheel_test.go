package pacer

import (
	"slices"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// The oracle is a sorted list.
func TestWheelAgainstOracle(t *testing.T) {
	rnd := testutil.Rand(t)
	for _, span := range []leaky.Time{1 << 10, 1 << 20, 1 << 30, 1 << coarseShift, 100 * leaky.Second, 9 * 3600 * leaky.Second, 10 * 24 * 3600 * leaky.Second} {
		w := new(Wheel)
		events := make([]Event, 200)
		want := map[int]leaky.Time{}
		fired := map[int]leaky.Time{}
		now := leaky.Time(rnd.Uint64N(3 * 365 * 24 * 3600 * uint64(leaky.Second))) // a clock may be old
		w.Skip(now)
		for i := range events {
			events[i].Fire = func(at leaky.Time) { fired[i] = at }
		}
		total := 0
		for range 3000 {
			i := rnd.IntN(len(events))
			switch rnd.IntN(5) {
			case 0:
				w.Cancel(&events[i])
				delete(want, i)
				if rnd.IntN(10) == 0 { // they go to another wheel, which has stood still for longer, or has gone on
					next := new(Wheel)
					next.Skip(now.Sub(leaky.Time(rnd.Uint64N(uint64(span)))))
					var own Event
					next.Schedule(&own, now)
					next.Cancel(&own)
					next.Absorb(w)
					if w.Len() != 0 {
						t.Fatalf("%d events are left", w.Len())
					}
					w = next
				}
			case 1, 2:
				at := now + leaky.Time(rnd.Uint64N(uint64(span)))
				if rnd.IntN(8) == 0 {
					at = now.Sub(at - now)
				}
				w.Schedule(&events[i], at)
				want[i] = at
			default:
				if rnd.IntN(2) == 0 {
					now += leaky.Time(rnd.Uint64N(uint64(span / 4)))
				} else if at, ok := w.Next(); ok { // as a pacer does
					now = max(now, at)
				}
				clear(fired)
				w.Advance(now)
				for i, at := range want {
					if at <= now {
						if fired[i] != now {
							t.Fatalf("event %d at %d did not fire at %d", i, at, now)
						}
						delete(want, i)
						delete(fired, i)
						total++
					}
				}
				if len(fired) > 0 {
					t.Fatalf("fired early, or after Cancel: %v", fired)
				}
			}
			if w.Len() != len(want) || events[i].Scheduled() != hasKey(want, i) {
				t.Fatalf("Len = %d, want %d", w.Len(), len(want))
			}
			next, ok := w.Next()
			if ok != (len(want) > 0) {
				t.Fatalf("Next: ok = %v with %d events", ok, len(want))
			}
			if !ok {
				continue
			}
			var ats []leaky.Time
			for _, at := range want {
				ats = append(ats, at)
			}
			// A far event may need an Advance early, when its coarse slot begins.
			if soonest := slices.Min(ats); next > soonest || next < soonest && next%(1<<coarseShift) != 0 {
				t.Fatalf("Next = %d, soonest %d, now %d", next, soonest, now)
			}
		}
		if total == 0 {
			t.Errorf("span %d: nothing fired", span)
		}
	}
}

func hasKey(m map[int]leaky.Time, k int) bool { _, ok := m[k]; return ok }

func TestWheel_FireMayScheduleAndCancel(t *testing.T) {
	w := new(Wheel)
	var order []string
	var a, b, c Event
	a.Fire = func(now leaky.Time) {
		order = append(order, "a")
		w.Cancel(&b)        // due too, and not fired yet
		w.Schedule(&a, now) // for the next Advance, or this would never end
		w.Schedule(&c, now+leaky.Second)
	}
	b.Fire = func(leaky.Time) { order = append(order, "b") }
	c.Fire = func(leaky.Time) { order = append(order, "c") }
	w.Schedule(&a, 10)
	w.Schedule(&b, 10)
	w.Advance(20)
	w.Cancel(&a)
	w.Advance(30)
	w.Advance(20 + leaky.Second)
	if got, want := order, []string{"a", "c"}; !slices.Equal(got, want) {
		t.Errorf("fired %v, want %v", got, want)
	}
	if w.Len() != 0 {
		t.Errorf("Len = %d, want 0", w.Len())
	}
}

func TestWheel_Defer(t *testing.T) {
	w := new(Wheel)
	var fired []string
	events := map[string]*Event{}
	for _, name := range []string{"a", "again", "canceled", "scheduled", "b"} {
		events[name] = &Event{Fire: func(leaky.Time) { fired = append(fired, name) }}
		w.Schedule(events[name], leaky.Second)
		w.Defer(events[name])
	}
	events["again"].Fire = func(leaky.Time) { fired = append(fired, "again"); w.Defer(events["again"]) }
	w.Cancel(events["canceled"])
	w.Schedule(events["scheduled"], leaky.Second)
	w.FireDeferred(1)
	if want := []string{"a", "again", "b"}; !slices.Equal(fired, want) || !w.HasDeferred() || w.Len() != 1 {
		t.Errorf("fired %v, want %v; %d are scheduled", fired, want, w.Len())
	}
	other := new(Wheel)
	if other.Absorb(w); w.HasDeferred() || w.Len() > 0 {
		t.Error("some are left")
	}
	w, fired = other, nil
	w.FireDeferred(2)
	w.Advance(leaky.Second)
	if want := []string{"again", "scheduled"}; !slices.Equal(fired, want) || !w.HasDeferred() {
		t.Errorf("fired %v, want %v", fired, want)
	}
}

func TestWheel_KeepsOrderWithinSlot(t *testing.T) {
	w := new(Wheel)
	var order []int
	events := make([]Event, 10)
	for i := range events {
		events[i].Fire = func(leaky.Time) { order = append(order, i) }
		w.Schedule(&events[i], 1000)
	}
	w.Advance(1000)
	if !slices.IsSorted(order) || len(order) != len(events) {
		t.Errorf("fired in order %v", order)
	}
}

// BenchmarkWheel times finding, firing and rescheduling one event, with 100,000 of them
// in the wheel, a million a second.
func BenchmarkWheel(b *testing.B) {
	w := new(Wheel)
	events := make([]Event, 100_000)
	fired := 0
	for i := range events {
		e := &events[i]
		again := leaky.Second/10 + leaky.Time(i)
		e.Fire = func(now leaky.Time) { fired++; w.Schedule(e, now+again) }
		w.Schedule(e, leaky.Time(i)*64000)
	}
	b.ReportAllocs()
	for b.Loop() {
		for fired == 0 {
			at, _ := w.Next()
			w.Advance(at)
		}
		fired--
	}
}

// A pacer that follows Next rarely wakes up for events far in the future.
func TestWheel_FarEventsCauseFewWakeups(t *testing.T) {
	const n = 50_000
	for _, c := range []struct {
		after    leaky.Time
		maxWakes int // wake-ups before the first event
	}{{10 * leaky.Second, 1}, {2 * 3600 * leaky.Second, 1}, {12 * 3600 * leaky.Second, 1 + 3*slotCount/2}} {
		w := new(Wheel)
		fired := 0
		events := make([]Event, n)
		for i := range events {
			events[i].Fire = func(leaky.Time) { fired++ }
			w.Schedule(&events[i], c.after+leaky.Time(i))
		}
		wakes := 0
		for fired == 0 {
			at, _ := w.Next()
			w.Advance(at)
			wakes++
		}
		if wakes--; wakes > c.maxWakes {
			t.Errorf("events %v away: %d wake-ups before the first, want at most %d", c.after.Duration(), wakes, c.maxWakes)
		}
		w.Advance(c.after + n)
		if fired != n || w.Len() != 0 {
			t.Errorf("events %v away: %d of %d fired", c.after.Duration(), fired, n)
		}
	}
}

// Events beyond the coarse ring are not all reinserted at once.
func TestWheel_SpreadsEventsBeyondCoarseRing(t *testing.T) {
	w := new(Wheel)
	const n = 50_000
	events := make([]Event, n)
	for i := range events {
		w.Schedule(&events[i], 24*3600*leaky.Second)
	}
	for i := range w.coarse.slots {
		count := 0
		for e := w.coarse.slots[i].next; e != nil && e != &w.coarse.slots[i]; e = e.next {
			count++
		}
		if count > 50 {
			t.Fatalf("%d of %d events wait in one slot", count, n)
		}
	}
}

func TestWheelDoesNotAllocate(t *testing.T) {
	w := new(Wheel)
	var now leaky.Time
	events := make([]Event, 1000)
	for i := range events {
		events[i].Fire = func(leaky.Time) {}
	}
	if n := testing.AllocsPerRun(100, func() {
		for i := range events {
			w.Schedule(&events[i], now+leaky.Time(i)*leaky.Second/100)
		}
		for range 100 {
			at, _ := w.Next()
			now = max(now, at)
			w.Advance(now)
		}
		w.Cancel(&events[len(events)-1])
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
