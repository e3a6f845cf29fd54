package daemon

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"shaperd.dev/shaperd/api"
)

// TestOverrides_Expire checks which overrides expire, and when.
func TestOverrides_Expire(t *testing.T) {
	w := (&overrides{}).clone()
	w.set("a", map[string]string{"rate": "1MB/s"}, newValidity(0), false)
	w.set("a", map[string]string{"packets": "10pps"}, newValidity(time.Hour), false)
	w.set("b", map[string]string{"rate": "2MB/s"}, newValidity(time.Minute), false)
	was := fmt.Sprint(w.limits)
	left, over := w.afterExpiry(time.Now().Add(2 * time.Minute))
	if len(over) != 1 || over[0] != `rate of limit "b"` || len(left.limits) != 1 || len(left.limits["a"]) != 2 {
		t.Errorf("after two minutes %v have expired, and %v are left", over, left.limits)
	}
	if fmt.Sprint(w.limits) != was {
		t.Error("the original was modified")
	}
	if next := w.nextExpiry(); next != w.limits["b"]["rate"][0].until {
		t.Errorf("the next expiry is %v", next)
	}
}

// TestOverrides_MatchModel overrides a key repeatedly, for random times, and compares the effective
// value with a model: the last override that has not ended.
func TestOverrides_MatchModel(t *testing.T) {
	start := time.Unix(1e9, 0)
	at := func(second int) time.Time { return start.Add(time.Duration(second) * time.Second) }
	type entry struct {
		value       string
		end         int // 0: never
		untilReload bool
	}
	rapid.Check(t, func(t *rapid.T) {
		w := (&overrides{}).clone()
		var all []entry
		now := 0
		for i := range rapid.IntRange(1, 30).Draw(t, "steps") {
			now += rapid.IntRange(0, 5).Draw(t, "later")
			switch rapid.IntRange(0, 4).Draw(t, "what") {
			case 0:
				w, _ = w.afterReload()
				for j := range all {
					if all[j].untilReload {
						all[j] = entry{end: -1}
					}
				}
			case 1:
				all = append(all, entry{value: fmt.Sprint(i), untilReload: true})
				w.set("l", map[string]string{"rate": fmt.Sprint(i)}, validity{since: at(now)}, true)
			case 2:
				all = append(all, entry{value: fmt.Sprint(i)})
				w.set("l", map[string]string{"rate": fmt.Sprint(i)}, validity{since: at(now)}, false)
			default:
				e := entry{value: fmt.Sprint(i), end: now + rapid.IntRange(1, 20).Draw(t, "for")}
				all = append(all, e)
				w.set("l", map[string]string{"rate": e.value}, validity{at(now), at(e.end)}, false)
			}
			w, _ = w.afterExpiry(at(now))
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
				t.Fatalf("%d overrides are left, want none", n)
			}
		}
	})
}

// TestOverrides_ClockChange checks that a restart never prolongs an override, even when the clock
// has been set, or the board has no clock.
func TestOverrides_ClockChange(t *testing.T) {
	since := time.Date(2026, 11, 22, 18, 0, 0, 0, time.UTC)
	until := since.Add(10 * time.Minute)
	o := persistedOverrides{Bypass: &api.Bypass{Since: since, Until: &until}}
	for _, tt := range []struct {
		now  time.Time
		left time.Duration // 0: expired
	}{
		{since.Add(4 * time.Minute), 6 * time.Minute},
		{since.Add(11 * time.Minute), 0},
		{since.Add(-4 * time.Minute), 10 * time.Minute},
		{time.Unix(0, 0), 10 * time.Minute},
	} {
		w := o.overrides(tt.now)
		if w.bypass == nil && tt.left > 0 || w.bypass != nil && w.bypass.until.Sub(tt.now) != tt.left {
			t.Errorf("at %v it is %+v, want %v more", tt.now, w.bypass, tt.left)
		}
	}
}
