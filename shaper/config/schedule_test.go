package config

import (
	"testing"
	"time"
)

func schedule(t *testing.T, texts ...string) (s Schedule) {
	t.Helper()
	for _, text := range texts {
		one, err := parseSpan(text)
		if err != nil {
			t.Fatal(err)
		}
		s = append(s, one)
	}
	return s
}

func TestSchedule_Holds(t *testing.T) {
	for _, tt := range []struct {
		schedule string
		at       string
		want     bool
	}{
		{"Mon-Fri 08:00-18:00 Europe/Berlin", "2026-11-27T08:00:00+01:00", true}, // a Friday
		{"Mon-Fri 08:00-18:00 Europe/Berlin", "2026-11-27T07:59:59+01:00", false},
		{"Mon-Fri 08:00-18:00 Europe/Berlin", "2026-11-27T17:59:59.9+01:00", true},
		{"Mon-Fri 08:00-18:00 Europe/Berlin", "2026-11-27T18:00:00+01:00", false},
		{"Mon-Fri 08:00-18:00 Europe/Berlin", "2026-11-28T12:00:00+01:00", false},
		{"mon-fri 08:00-18:00 Europe/Berlin", "2026-11-27T07:30:00Z", true},
		{"22:00-06:00 UTC", "2026-11-27T23:00:00Z", true},
		{"22:00-06:00 UTC", "2026-11-27T05:59:00Z", true},
		{"22:00-06:00 UTC", "2026-11-27T06:00:00Z", false},
		{"Fri 22:00-06:00 UTC", "2026-11-28T05:00:00Z", true}, // begun on Friday
		{"Fri 22:00-06:00 UTC", "2026-11-27T05:00:00Z", false},
		{"Sat,Sun 00:00-24:00 UTC", "2026-11-28T23:59:59Z", true},
		{"Sat,Sun 00:00-24:00 UTC", "2026-11-30T00:00:00Z", false},
		{"Sat-Mon 12:00-13:00 UTC", "2026-11-29T12:30:00Z", true},
		{"Sat-Mon 12:00-13:00 UTC", "2026-12-01T12:30:00Z", false},
		// Clocks go from 02:00 to 03:00 on 2026-03-29, and from 03:00 to 02:00 on 2026-10-25.
		{"02:30-04:00 Europe/Berlin", "2026-03-29T01:59:00+01:00", false},
		{"02:30-04:00 Europe/Berlin", "2026-03-29T03:00:00+02:00", true},
		{"02:30-02:40 Europe/Berlin", "2026-03-29T03:10:00+02:00", false},
		{"02:30-02:40 Europe/Berlin", "2026-10-25T02:35:00+02:00", true},
		{"02:30-02:40 Europe/Berlin", "2026-10-25T02:50:00+02:00", false},
		{"02:30-02:40 Europe/Berlin", "2026-10-25T02:35:00+01:00", true}, // again
	} {
		at, err := time.Parse(time.RFC3339, tt.at)
		if err != nil {
			t.Fatal(err)
		}
		if got := schedule(t, tt.schedule).Holds(at); got != tt.want {
			t.Errorf("%s at %s: %v", tt.schedule, tt.at, got)
		}
	}
}

// Each minute of some weeks with changes of daylight saving time: a schedule changes when it says that it will.
func TestSchedule_Changes(t *testing.T) {
	for _, s := range []Schedule{
		schedule(t, "Mon-Fri 08:00-18:00 Europe/Berlin"), schedule(t, "Sun 02:30-03:30 Europe/Berlin"), schedule(t, "22:00-06:00 America/New_York", "12:00-13:00 Asia/Kolkata"),
		schedule(t, "Sat,Sun 00:00-24:00 Europe/Berlin"),
	} {
		for _, begin := range []string{"2026-03-27T00:00:00Z", "2026-10-23T00:00:00Z"} {
			at, _ := time.Parse(time.RFC3339, begin)
			is, change, changes := s.Holds(at), s.Changes(at), 0
			for range 10 * minutesOfDay {
				at = at.Add(time.Minute)
				if now := s.Holds(at); now != is {
					if !change.Equal(at) {
						t.Fatalf("%v changes at %v, and said at %v", s, at, change)
					}
					is, change = now, s.Changes(at)
					changes++
				}
			}
			if changes < 2 {
				t.Errorf("%v changed %d times", s, changes)
			}
		}
	}
	if always := schedule(t, "00:00-24:00 UTC").Changes(time.Now()); !always.IsZero() {
		t.Errorf("one that always holds changes at %v", always)
	}
}

func TestParseSpan_Errors(t *testing.T) {
	for text, want := range map[string]string{
		"":                         `"": write days, times and a time zone, as in "Mon-Fri 08:00-18:00 Europe/Berlin"; the first and the last may be missing`,
		"Mon":                      `"Mon": write days, times and a time zone, as in "Mon-Fri 08:00-18:00 Europe/Berlin"; the first and the last may be missing`,
		"Mo-Fr 08:00-18:00":        `"Mo-Fr 08:00-18:00": "Mo-Fr" is not a day or several, such as Mon-Fri or Sat,Sun`,
		"08:00":                    `"08:00": "08:00" is not a time of day to another, such as 08:00-18:00 or 22:00-06:00`,
		"08:00-25:00":              `"08:00-25:00": "08:00-25:00" is not a time of day to another, such as 08:00-18:00 or 22:00-06:00`,
		"24:00-06:00":              `"24:00-06:00": "24:00-06:00" is not a time of day to another, such as 08:00-18:00 or 22:00-06:00`,
		"08:00-08:00":              `"08:00-08:00": begins when it ends: write 00:00-24:00 for all day`,
		"08:00-18:00 Berlin":       `"08:00-18:00 Berlin": unknown time zone "Berlin": write its name, such as Europe/Berlin or UTC`,
		"Mon 08:00-18:00 UTC fast": `"Mon 08:00-18:00 UTC fast": write days, times and a time zone, as in "Mon-Fri 08:00-18:00 Europe/Berlin"; the first and the last may be missing`,
	} {
		if _, err := parseSpan(text); err == nil || err.Error() != want {
			t.Errorf("%q: %v\nwant %s", text, err, want)
		}
	}
}
