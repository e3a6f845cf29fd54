// Package quota counts what may pass in a day, a week, a month or any period, so that a crash never gives any of it twice.
//
// A [Budget] is what one key has used of a [Quota]. What it may use is claimed ahead: a claim is written to a file before
// the first byte of it passes. After a crash all that was claimed counts as used, so what passes never exceeds the quota, and
// is at least the quota less one claim for each crash. The package reads no clock and writes no file.
package quota

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Unit is what a quota counts.
type Unit uint8

// The units.
const (
	Bytes       Unit = iota // of payload
	Packets                 // datagrams
	Connections             // TCP connections and UDP flows
)

func (u Unit) String() string {
	if u > Connections {
		return fmt.Sprintf("unit %d", u)
	}
	return [...]string{"bytes", "packets", "connections"}[u]
}

// Quota is an amount for each period. The zero Quota is none. Quotas are comparable.
type Quota struct {
	Amount uint64 // 0 is no quota, at most MaxAmount
	Unit   Unit
	Period Period
}

// MaxAmount is the maximum amount of a quota.
const MaxAmount = 1e18

// Period is how long an amount is for: a day, a week or a month of the calendar of a time zone, or any period of that length.
type Period struct {
	Calendar Calendar
	Zone     string        // with a calendar: the name of a time zone; "" is that of the host
	Rolling  time.Duration // without one: the amount is for any period of that length; MinRolling to MaxRolling
}

// Calendar is a unit of the calendar.
type Calendar uint8

// The units of the calendar.
const (
	NoCalendar Calendar = iota // the period is rolling
	Day
	Week // begins on Monday
	Month
)

// Bounds of a rolling period.
const (
	MinRolling = time.Minute
	MaxRolling = 366 * 24 * time.Hour
)

// rollingSlots is in how many slots a rolling period is counted. What was used in a slot counts until the period has passed
// since the end of the slot, so that no period sees more than the amount, wherever it begins.
const rollingSlots = 24

// slot returns the slot of t: of a calendar the day, week or month, and of a rolling period a part of it.
func (p *Period) slot(t time.Time) (start, end time.Time) {
	if p.Calendar == NoCalendar {
		length := p.Rolling / rollingSlots
		start = time.Unix(0, t.UnixNano()-t.UnixNano()%int64(length))
		return start, start.Add(length)
	}
	zone, _ := location(p.Zone)
	t = t.In(zone)
	year, month, day := t.Date()
	midnight := func(month time.Month, day int) time.Time { return time.Date(year, month, day, 0, 0, 0, 0, zone) }
	switch p.Calendar {
	case Day:
		return midnight(month, day), midnight(month, day+1)
	case Week:
		day -= (int(t.Weekday()) + 6) % 7
		return midnight(month, day), midnight(month, day+7)
	default:
		return midnight(month, 1), midnight(month+1, 1)
	}
}

// slotBegun returns the slot that began at start, perhaps in another time zone: that of the host may have changed.
func (p *Period) slotBegun(start time.Time) (from, end time.Time) {
	switch p.Calendar {
	case NoCalendar:
		return p.slot(start)
	case Day:
		return p.slot(start.Add(12 * time.Hour))
	default:
		return p.slot(start.Add(36 * time.Hour))
	}
}

// slots is how many slots count besides the present one.
func (p *Period) slots() int {
	if p.Calendar == NoCalendar {
		return rollingSlots
	}
	return 0
}

// claim is how much is claimed at once.
func (q *Quota) claim() uint64 { return max(q.Amount/claims, 1) }

// claims is how many claims an amount is: so a crash costs up to 0.4 % of it.
const claims = 256

// String returns the period as it is written in the configuration.
func (p Period) String() string {
	switch p.Calendar {
	case Day:
		return "day" + p.zone()
	case Week:
		return "week" + p.zone()
	case Month:
		return "month" + p.zone()
	}
	if p.Rolling%time.Hour == 0 {
		return fmt.Sprintf("%dh", p.Rolling/time.Hour)
	}
	return fmt.Sprintf("%dmin", p.Rolling/time.Minute)
}

func (p *Period) zone() string {
	if p.Zone == "" {
		return ""
	}
	return " " + p.Zone
}

// Validate returns an error if p is not a period.
func (p *Period) Validate() error {
	switch _, err := location(p.Zone); {
	case p.Calendar > Month:
		return fmt.Errorf("unknown calendar %d", p.Calendar)
	case p.Calendar != NoCalendar && p.Rolling != 0:
		return errors.New("a period of the calendar has no length")
	case p.Calendar != NoCalendar && err != nil:
		return fmt.Errorf("unknown time zone %q: write its name, such as Europe/Berlin or UTC", p.Zone)
	case p.Calendar == NoCalendar && p.Zone != "":
		return errors.New("a rolling period has no time zone")
	case p.Calendar == NoCalendar && (p.Rolling < MinRolling || p.Rolling > MaxRolling):
		return errors.New("a period must be from 1min to 366d")
	}
	return nil
}

// ParsePeriod is the inverse of [Period.String]: "day", "week" or "month", with a time zone, which is the host's if there is none; or
// a length such as "24h" or "90min".
func ParsePeriod(text string) (Period, error) {
	name, zone, hasZone := strings.Cut(text, " ")
	if calendar, ok := map[string]Calendar{"day": Day, "week": Week, "month": Month}[name]; ok {
		p := Period{Calendar: calendar, Zone: zone}
		return p, p.Validate()
	}
	number := strings.TrimRight(name, "abcdefghijklmnopqrstuvwxyz")
	unit := map[string]time.Duration{"min": time.Minute, "h": time.Hour, "d": 24 * time.Hour}[name[len(number):]]
	n, err := strconv.ParseUint(number, 10, 16)
	if hasZone || unit == 0 || err != nil {
		return Period{}, fmt.Errorf("%q is not a period: write day, week or month, with a time zone if need be, or a length such as 24h", text)
	}
	p := Period{Rolling: time.Duration(n) * unit}
	return p, p.Validate()
}

// locations are the time zones in use, by name.
var locations sync.Map

// location returns a time zone, and an error and UTC if there is none of that name.
func location(name string) (*time.Location, error) {
	if name == "" {
		return time.Local, nil
	}
	if zone, ok := locations.Load(name); ok {
		return zone.(*time.Location), nil
	}
	zone, err := time.LoadLocation(name)
	if err != nil {
		return time.UTC, err
	}
	locations.Store(name, zone)
	return zone, nil
}
