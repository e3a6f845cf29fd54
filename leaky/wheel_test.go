package leaky

import (
	"slices"
	"testing"
)

// The oracle is a sorted list.
func TestWheelAgainstOracle(t *testing.T) {
	rnd := newRand(t)
	for _, span := range []Time{1 << 10, 1 << 20, 1 << 30, 100 * Second} {
		w := new(Wheel)
		events := make([]Event, 200)
		want := map[int]Time{}
		fired := map[int]Time{}
		var now Time
		for i := range events {
			events[i].Fire = func(at Time) { fired[i] = at }
		}
		total := 0
		for range 3000 {
			i := rnd.IntN(len(events))
			switch rnd.IntN(5) {
			case 0:
				w.Cancel(&events[i])
				delete(want, i)
			case 1, 2:
				at := now + Time(rnd.Uint64N(uint64(span)))
				if rnd.IntN(8) == 0 {
					at = now.Sub(at - now)
				}
				w.Schedule(&events[i], at)
				want[i] = at
			default:
				now += Time(rnd.Uint64N(uint64(span / 4)))
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
			var ats []Time
			for _, at := range want {
				ats = append(ats, at)
			}
			// A far event may ask for a look at its slot before its time, never after.
			if soonest := slices.Min(ats); next > soonest || next < soonest && soonest-next < 1<<slotShift && soonest-now < Second/4 {
				t.Fatalf("Next = %d, soonest %d, now %d", next, soonest, now)
			}
		}
		if total == 0 {
			t.Errorf("span %d: nothing fired", span)
		}
	}
}

func hasKey(m map[int]Time, k int) bool { _, ok := m[k]; return ok }

func TestWheelFireMaySchedule(t *testing.T) {
	w := new(Wheel)
	var order []string
	var a, b, c Event
	a.Fire = func(now Time) {
		order = append(order, "a")
		w.Cancel(&b)        // due too, and not fired yet
		w.Schedule(&a, now) // for the next Advance, or this would never end
		w.Schedule(&c, now+Second)
	}
	b.Fire = func(Time) { order = append(order, "b") }
	c.Fire = func(Time) { order = append(order, "c") }
	w.Schedule(&a, 10)
	w.Schedule(&b, 10)
	w.Advance(20)
	w.Cancel(&a)
	w.Advance(30)
	w.Advance(20 + Second)
	if got, want := order, []string{"a", "c"}; !slices.Equal(got, want) {
		t.Errorf("fired %v, want %v", got, want)
	}
	if w.Len() != 0 {
		t.Errorf("Len = %d, want 0", w.Len())
	}
}

func TestWheelKeepsOrderWithinASlot(t *testing.T) {
	w := new(Wheel)
	var order []int
	events := make([]Event, 10)
	for i := range events {
		events[i].Fire = func(Time) { order = append(order, i) }
		w.Schedule(&events[i], 1000)
	}
	w.Advance(1000)
	if !slices.IsSorted(order) || len(order) != len(events) {
		t.Errorf("fired in order %v", order)
	}
}

// BenchmarkWheel times one event: found, fired and scheduled anew, with 100,000
// of them in the wheel, a million a second.
func BenchmarkWheel(b *testing.B) {
	w := new(Wheel)
	events := make([]Event, 100_000)
	fired := 0
	for i := range events {
		e := &events[i]
		again := Second/10 + Time(i)
		e.Fire = func(now Time) { fired++; w.Schedule(e, now+again) }
		w.Schedule(e, Time(i)*64000)
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

// Far events that are scheduled at one instant do not stand in one slot, now or when
// they have been placed anew: Next looks at all of a slot.
func TestFarEventsAreSpread(t *testing.T) {
	w := new(Wheel)
	const n = 50_000
	fired := 0
	for i := range n {
		w.Schedule(&Event{Fire: func(Time) { fired++ }}, 10*Second+Time(i))
	}
	for now := Time(0); now < 11*Second; now += Second / 1000 {
		w.Advance(now)
		most := 0
		if now < 9*Second && now%(Second/10) == 0 {
			for i := range w.slots {
				count := 0
				for e := w.slots[i].next; e != nil && e != &w.slots[i]; e = e.next {
					count++
				}
				most = max(most, count)
			}
			if most > 50 {
				t.Fatalf("%d of %d far events stand in one slot", most, n)
			}
		}
	}
	if fired != n {
		t.Errorf("%d of %d fired", fired, n)
	}
}
