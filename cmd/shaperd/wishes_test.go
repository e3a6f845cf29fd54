package main

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"shaperd/control"
)

// TestWishes checks when what is wanted is over.
func TestWishes(t *testing.T) {
	w := (&wishes{}).clone()
	w.set("a", map[string]string{"rate": "1MB/s"}, newTerm(0), false)
	w.set("a", map[string]string{"packets": "10pps"}, newTerm(time.Hour), false)
	w.set("b", map[string]string{"rate": "2MB/s"}, newTerm(time.Minute), false)
	was := fmt.Sprint(w.limits)
	left, over := w.expired(time.Now().Add(2 * time.Minute))
	if len(over) != 1 || over[0] != `rate of limit "b"` || len(left.limits) != 1 || len(left.limits["a"]) != 2 {
		t.Errorf("after two minutes %v is over, and %v left", over, left.limits)
	}
	if fmt.Sprint(w.limits) != was {
		t.Error("what is in force has changed")
	}
	if next := w.next(); next != w.limits["b"]["rate"][0].until {
		t.Errorf("the next is over at %v", next)
	}
}

// TestSettingsOnTopOfOthers sets a key again and again, for any time, and compares what is
// effective with a list of all that was ever set: it is the last one that has not ended.
func TestSettingsOnTopOfOthers(t *testing.T) {
	start := time.Unix(1e9, 0)
	at := func(second int) time.Time { return start.Add(time.Duration(second) * time.Second) }
	type entry struct {
		value       string
		end         int // 0 is never
		untilReload bool
	}
	rapid.Check(t, func(t *rapid.T) {
		w := (&wishes{}).clone()
		var all []entry
		now := 0
		for i := range rapid.IntRange(1, 30).Draw(t, "steps") {
			now += rapid.IntRange(0, 5).Draw(t, "later")
			switch rapid.IntRange(0, 4).Draw(t, "what") {
			case 0:
				w, _ = w.reloaded()
				for j := range all {
					if all[j].untilReload {
						all[j] = entry{end: -1}
					}
				}
			case 1:
				all = append(all, entry{value: fmt.Sprint(i), untilReload: true})
				w.set("l", map[string]string{"rate": fmt.Sprint(i)}, term{since: at(now)}, true)
			case 2:
				all = append(all, entry{value: fmt.Sprint(i)})
				w.set("l", map[string]string{"rate": fmt.Sprint(i)}, term{since: at(now)}, false)
			default:
				e := entry{value: fmt.Sprint(i), end: now + rapid.IntRange(1, 20).Draw(t, "for")}
				all = append(all, e)
				w.set("l", map[string]string{"rate": e.value}, term{at(now), at(e.end)}, false)
			}
			w, _ = w.expired(at(now))
			want := ""
			for _, e := range all {
				if e.end == 0 || e.end > now {
					want = e.value
				}
			}
			if got := w.values("l")["rate"]; got != want {
				t.Fatalf("at %d it is %q, want %q of %+v; there are %v", now, got, want, all, w.limits)
			}
			if n := len(w.limits["l"]["rate"]); n > 0 && want == "" {
				t.Fatalf("%d settings are left of none", n)
			}
		}
	})
}

// What was ordered for a time lasts for no longer over a restart, though the clock has been
// set, or is that of a board that has none.
func TestOrdersUnderAnotherClock(t *testing.T) {
	ordered := time.Date(2026, 11, 22, 18, 0, 0, 0, time.UTC)
	until := ordered.Add(10 * time.Minute)
	o := savedOrders{Bypass: &control.Bypass{Since: ordered, Until: &until}}
	for _, tt := range []struct {
		now  time.Time
		left time.Duration // 0 is over
	}{
		{ordered.Add(4 * time.Minute), 6 * time.Minute},
		{ordered.Add(11 * time.Minute), 0},
		{ordered.Add(-4 * time.Minute), 10 * time.Minute},
		{time.Unix(0, 0), 10 * time.Minute},
	} {
		w := o.wishes(tt.now)
		if w.bypass == nil && tt.left > 0 || w.bypass != nil && w.bypass.until.Sub(tt.now) != tt.left {
			t.Errorf("at %v it is %+v, want %v more", tt.now, w.bypass, tt.left)
		}
	}
}
