package quota

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

func at(t *testing.T, text string) time.Time {
	t.Helper()
	when, err := time.Parse("2006-01-02 15:04 -0700", text)
	if err != nil {
		t.Fatal(err)
	}
	return when
}

func TestPeriod_Slots(t *testing.T) {
	for _, tt := range []struct{ period, now, start, end string }{
		{"day UTC", "2026-11-28 15:50 +0000", "2026-11-28 00:00 +0000", "2026-11-29 00:00 +0000"},
		{"week UTC", "2026-11-29 23:59 +0000", "2026-11-23 00:00 +0000", "2026-11-30 00:00 +0000"}, // a Sunday
		{"week UTC", "2026-11-30 00:00 +0000", "2026-11-30 00:00 +0000", "2026-12-07 00:00 +0000"},
		{"month UTC", "2026-02-28 23:59 +0000", "2026-02-01 00:00 +0000", "2026-03-01 00:00 +0000"},
		{"month Europe/Berlin", "2026-10-31 23:30 +0000", "2026-11-01 00:00 +0100", "2026-12-01 00:00 +0100"},
		{"day Europe/Berlin", "2026-03-29 12:00 +0000", "2026-03-29 00:00 +0100", "2026-03-30 00:00 +0200"}, // of 23 hours
		{"day Europe/Berlin", "2026-10-25 12:00 +0000", "2026-10-25 00:00 +0200", "2026-10-26 00:00 +0100"}, // of 25
		{"24h", "2026-11-28 15:50 +0000", "2026-11-28 15:00 +0000", "2026-11-28 16:00 +0000"},
	} {
		p, err := ParsePeriod(tt.period)
		if err != nil {
			t.Fatal(err)
		}
		start, end := p.slot(at(t, tt.now))
		if !start.Equal(at(t, tt.start)) || !end.Equal(at(t, tt.end)) {
			t.Errorf("%s at %s: %v to %v, want %s to %s", tt.period, tt.now, start, end, tt.start, tt.end)
		}
		if p.String() != tt.period {
			t.Errorf("%q formats as %q", tt.period, p.String())
		}
	}
}

// A day without a midnight begins an hour late or early; what was used in it must not be forgotten twice.
func TestBudget_DayWithoutMidnight(t *testing.T) {
	p, err := ParsePeriod("day America/Sao_Paulo")
	if err != nil {
		t.Fatal(err)
	}
	const change = "2018-11-04 03:00 +0000" // clocks were set from 00:00 to 01:00
	now := at(t, change).Add(-3 * time.Hour)
	b := New(Quota{Amount: 100, Period: p}, Record{}, now)
	passed := 0
	for ; now.Before(at(t, change).Add(3 * time.Hour)); now = now.Add(time.Minute) {
		b.Follow(now)
		if b.Left() > 0 {
			b.Use(10)
			passed += 10
		}
	}
	if passed != 200 {
		t.Errorf("%d passed in parts of two days, want 200", passed)
	}
}

func TestParsePeriod_Errors(t *testing.T) {
	for _, text := range []string{"", "fortnight", "day Mars/Olympus", "24h UTC", "0h", "367d", "1s", "h", "-1h", "1.5h", "99999999999h"} {
		if p, err := ParsePeriod(text); err == nil {
			t.Errorf("%q is %v, want an error", text, p)
		}
	}
}

// gateway uses a budget as much as it can, and crashes.
type gateway struct {
	rnd    *rand.Rand
	quota  Quota
	budget *Budget
	file   Record
	lost   uint64 // by crashes, at most
}

func (g *gateway) crash(now time.Time) {
	g.lost += g.quota.claim()
	text, err := json.Marshal(g.file)
	if err != nil {
		panic(err)
	}
	var r Record
	if g.file.Used != nil {
		if err := json.Unmarshal(text, &r); err != nil {
			panic(err)
		}
	}
	g.budget = New(g.quota, r, now)
}

// pass passes n, or less if there is no more, and returns how much passed.
func (g *gateway) pass(n uint64, now time.Time) uint64 {
	b := g.budget
	b.Follow(now)
	if b.WantsClaim() {
		r := b.Claim()
		switch g.rnd.IntN(20) {
		case 0: // the write fails, and nobody knows whether it is in the file
			if g.rnd.IntN(2) == 0 {
				g.file = r
			}
			b.Claimed(r, false)
			return 0
		case 1: // a crash in its midst
			if g.rnd.IntN(2) == 0 {
				g.file = r
			}
			g.crash(now)
			return 0
		}
		g.file = r
		b.Claimed(r, true)
	}
	n = min(n, b.Ready())
	turn := b.Use(n)
	back := g.rnd.Uint64N(n + 1)
	b.Return(back, turn)
	return n - back
}

// What passes a quota is at most its amount in each period, and at least that less a claim for each crash.
func TestBudget_Envelope(t *testing.T) {
	rnd := testutil.Rand(t)
	zone, _ := location("Europe/Berlin")
	for _, text := range []string{"day Europe/Berlin", "week UTC", "month Europe/Berlin", "24h", "90min"} {
		for range 20 {
			period, err := ParsePeriod(text)
			if err != nil {
				t.Fatal(err)
			}
			g := &gateway{rnd: rnd, quota: Quota{Amount: 1 + rnd.Uint64N(100_000), Period: period}}
			now := time.Date(2026, time.Month(1+rnd.IntN(12)), 1+rnd.IntN(28), rnd.IntN(24), 0, 0, 0, zone)
			g.budget = New(g.quota, Record{}, now)
			length := map[string]time.Duration{"day": 24 * time.Hour, "week": 7 * 24 * time.Hour, "month": 30 * 24 * time.Hour}[strings.Fields(text)[0]]
			if length == 0 {
				length = period.Rolling
			}
			type passed struct {
				at time.Time
				n  uint64
			}
			var all []passed
			bySlot := map[time.Time]uint64{}
			lostIn := map[time.Time]uint64{}
			first, _ := period.slot(now)
			for range 5000 {
				now = now.Add(time.Duration(rnd.Int64N(int64(length) / 500)))
				slot, _ := period.slot(now)
				lost := g.lost
				n := g.pass(1+rnd.Uint64N(g.quota.Amount/50+1), now)
				all = append(all, passed{now, n})
				bySlot[slot] += n
				lostIn[slot] += g.lost - lost
			}
			if period.Calendar != NoCalendar {
				last, _ := period.slot(now)
				for slot, n := range bySlot {
					full := !slot.Equal(first) && !slot.Equal(last)
					if n > g.quota.Amount || full && n+lostIn[slot] < g.quota.Amount {
						t.Errorf("%s from %v: %d of %d passed, crashes may have cost %d", text, slot, n, g.quota.Amount, lostIn[slot])
					}
				}
				continue
			}
			from, sum := 0, uint64(0)
			for _, p := range all {
				for sum += p.n; !all[from].at.After(p.at.Add(-period.Rolling)); from++ {
					sum -= all[from].n
				}
				if sum > g.quota.Amount {
					t.Fatalf("%s: %d passed until %v, of %d", text, sum, p.at, g.quota.Amount)
				}
			}
		}
	}
}

// However often the clock is set, no more passes than the amount for each period that it has reached.
func TestBudget_ClockIsSet(t *testing.T) {
	rnd := testutil.Rand(t)
	for range 50 {
		g := &gateway{rnd: rnd, quota: Quota{Amount: 10_000, Period: Period{Calendar: Day, Zone: "UTC"}}}
		now := at(t, "2026-11-28 15:50 +0000")
		g.budget = New(g.quota, Record{}, now)
		reached := map[time.Time]bool{}
		var sum uint64
		for range 3000 {
			now = now.Add(time.Duration(rnd.Int64N(int64(10 * time.Minute))))
			switch rnd.IntN(100) {
			case 0:
				now = now.Add(24 * time.Hour)
			case 1:
				now = now.Add(-24 * time.Hour)
			}
			slot, _ := g.quota.Period.slot(now)
			reached[slot] = true
			sum += g.pass(1+rnd.Uint64N(500), now)
		}
		if most := uint64(len(reached)) * g.quota.Amount; sum > most {
			t.Fatalf("%d passed in %d days, want at most %d", sum, len(reached), most)
		}
	}
}

func TestBudget_Change(t *testing.T) {
	now := at(t, "2026-11-28 15:50 +0000")
	month, day, rolling := Period{Calendar: Month, Zone: "UTC"}, Period{Calendar: Day, Zone: "UTC"}, Period{Rolling: 24 * time.Hour}
	use := func(b *Budget, n uint64) {
		r := b.Claim()
		b.Claimed(r, true)
		b.Use(n)
	}
	b := New(Quota{Amount: 100, Period: month}, Record{}, now)
	use(b, 60)
	for _, tt := range []struct {
		name string
		next Quota
		left uint64
	}{
		{"more", Quota{Amount: 200, Period: month}, 140},
		{"less", Quota{Amount: 50, Period: month}, 0},
		{"a day instead, of which the month may have been used", Quota{Amount: 100, Period: day}, 40},
		{"any 24 hours", Quota{Amount: 100, Period: rolling}, 40},
		{"packets, which were not counted", Quota{Amount: 100, Unit: Packets, Period: month}, 100},
	} {
		c := *b
		c.used = slices.Clone(b.used)
		if c.Change(tt.next, now); c.Left() != tt.left {
			t.Errorf("%s: %d left, want %d", tt.name, c.Left(), tt.left)
		}
		if c.Ready() != 0 {
			t.Errorf("%s: %d may pass before it is claimed", tt.name, c.Ready())
		}
	}
}

func TestBudget_Reset(t *testing.T) {
	now := at(t, "2026-11-28 15:50 +0000")
	b := New(Quota{Amount: 512, Period: Period{Calendar: Day, Zone: "UTC"}}, Record{}, now)
	r := b.Claim()
	b.Claimed(r, true)
	turn := b.Use(2)
	pending := b.Claim()
	b.Reset(now)
	b.Claimed(pending, true) // it was being written
	b.Return(2, turn)
	if b.Used() != 0 || b.Ready() != 0 || b.Left() != 512 {
		t.Errorf("after a reset %d are used, %d ready, %d left", b.Used(), b.Ready(), b.Left())
	}
}

// When the time zone of the host changes across a restart, no period begins again.
func TestBudget_HostZone(t *testing.T) {
	was := time.Local
	defer func() { time.Local = was }()
	berlin, err := location("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	now := at(t, "2026-11-28 15:50 +0000")
	for _, text := range []string{"day", "week", "month"} {
		p, err := ParsePeriod(text)
		if err != nil {
			t.Fatal(err)
		}
		time.Local = berlin
		b := New(Quota{Amount: 100, Period: p}, Record{}, now)
		b.Claimed(b.Claim(), true)
		b.Use(1)
		r := b.Record()
		time.Local = time.UTC
		if r.Over(now) {
			t.Errorf("%s: the record is over", text)
		}
		if b := New(Quota{Amount: 100, Period: p}, r, now.Add(time.Minute)); b.Used() != 1 {
			t.Errorf("%s: %d used after a restart in UTC, want 1", text, b.Used())
		}
	}
}

func TestRecord_Over(t *testing.T) {
	start := at(t, "2026-11-28 00:00 +0000")
	for _, tt := range []struct {
		period string
		now    string
		over   bool
	}{
		{"day UTC", "2026-11-28 23:59 +0000", false},
		{"day UTC", "2026-11-29 00:00 +0000", true},
		{"24h", "2026-11-29 00:59 +0000", false},
		{"24h", "2026-11-29 01:00 +0000", true},
	} {
		p, err := ParsePeriod(tt.period)
		if err != nil {
			t.Fatal(err)
		}
		r := Record{Period: p, Start: start, Used: []uint64{1}}
		if r.Over(at(t, tt.now)) != tt.over {
			t.Errorf("%s at %s: over is %v", tt.period, tt.now, !tt.over)
		}
	}
}
