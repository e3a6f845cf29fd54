package config

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Schedule is the times at which something holds: any of its spans.
type Schedule []span

// span is a part of some days of the week, by the clocks of a time zone. In the night of a change of daylight saving time it is longer or
// shorter by what the clocks are set back or forward.
type span struct {
	text       string
	days       uint8 // bit d is set if the span begins on [time.Weekday] d
	start, end int   // minutes of the day; an end that is not after the start is on the next day
	zone       *time.Location
}

const minutesOfDay = 24 * 60

var weekdays = [...]string{"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"}

// parseSpan parses a span of a schedule, such as "Mon-Fri 08:00-18:00 Europe/Berlin". Without days it is on all, without a time
// zone by the clock of this host.
func parseSpan(text string) (span, error) {
	s := span{text: strings.Join(strings.Fields(text), " "), days: 1<<7 - 1, zone: time.Local}
	fields := strings.Fields(text)
	if len(fields) > 0 && !strings.Contains(fields[0], ":") {
		var err error
		if s.days, err = parseDays(fields[0]); err != nil {
			return s, fmt.Errorf("%s: %w", quote(text), err)
		}
		fields = fields[1:]
	}
	if len(fields) == 0 || len(fields) > 2 {
		return s, fmt.Errorf("%s: write days, times and a time zone, as in \"Mon-Fri 08:00-18:00 Europe/Berlin\"; the first and the last may be missing", quote(text))
	}
	start, end, ok := strings.Cut(fields[0], "-")
	var err error
	if s.start, err = parseClock(start); err == nil && ok {
		s.end, err = parseClock(end)
	}
	switch {
	case err != nil || !ok || s.start == minutesOfDay:
		return s, fmt.Errorf("%s: %s is not a time of day to another, such as 08:00-18:00 or 22:00-06:00", quote(text), quote(fields[0]))
	case s.start == s.end:
		return s, fmt.Errorf("%s: begins when it ends: write 00:00-24:00 for all day", quote(text))
	}
	if len(fields) == 2 {
		if s.zone, err = time.LoadLocation(fields[1]); err != nil || fields[1] == "" {
			return s, fmt.Errorf("%s: unknown time zone %s: write its name, such as Europe/Berlin or UTC", quote(text), quote(fields[1]))
		}
	}
	return s, nil
}

// parseDays parses days of the week: "Mon", "Mon-Fri" or "Mon,Wed,Sat-Sun".
func parseDays(text string) (days uint8, err error) {
	for part := range strings.SplitSeq(text, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, to := weekday(first), weekday(last)
		if from < 0 || to < 0 {
			return 0, fmt.Errorf("%s is not a day or several, such as Mon-Fri or Sat,Sun", quote(part))
		}
		for d := from; ; d = (d + 1) % 7 {
			days |= 1 << d
			if d == to {
				break
			}
		}
	}
	return days, nil
}

func weekday(name string) int {
	return slices.IndexFunc(weekdays[:], func(d string) bool { return strings.EqualFold(d, name) })
}

// parseClock parses a time of day from 00:00 to 24:00, in minutes.
func parseClock(text string) (int, error) {
	if text == "24:00" {
		return minutesOfDay, nil
	}
	t, err := time.Parse("15:04", text)
	return t.Hour()*60 + t.Minute(), err
}

func (s span) String() string { return s.text }

// holds reports whether it is in s at t.
func (s *span) holds(t time.Time) bool {
	t = t.In(s.zone)
	today, now := t.Weekday(), t.Hour()*60+t.Minute()
	begins := func(d time.Weekday) bool { return s.days>>d&1 != 0 }
	if s.start < s.end {
		return begins(today) && s.start <= now && now < s.end
	}
	return begins(today) && s.start <= now || begins((today+6)%7) && now < s.end
}

// Holds reports whether it is in s at t.
func (s Schedule) Holds(t time.Time) bool {
	return slices.ContainsFunc(s, func(one span) bool { return one.holds(t) })
}

// Changes returns the first full minute after t at which s holds if it does not at t, or does not if it does; the zero time if that is not
// within eight days.
func (s Schedule) Changes(t time.Time) time.Time {
	is := s.Holds(t)
	for next := t.Truncate(time.Minute); next.Before(t.Add(8 * 24 * time.Hour)); {
		if next = next.Add(time.Minute); s.Holds(next) != is {
			return next
		}
	}
	return time.Time{}
}

// texts returns the spans of s as text.
func (s Schedule) texts() (all []string) {
	for _, one := range s {
		all = append(all, one.text)
	}
	return all
}

func (s Schedule) String() string { return strings.Join(s.texts(), ", ") }
