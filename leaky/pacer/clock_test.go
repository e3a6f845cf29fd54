package pacer_test

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky/pacer"

	"shaperd.dev/shaperd/leaky"
)

// A clock that has run for years is as exact as a new one.
func TestClock_AfterYears(t *testing.T) {
	const year = 365 * 24 * time.Hour
	for _, age := range []time.Duration{0, 834 * 24 * time.Hour, 3 * year, 9 * year} {
		c := pacer.NewClockAt(age)
		start := c.Now()
		if got := start.Duration(); got < age || got > age+time.Minute {
			t.Fatalf("a clock of age %v reads %v", age, got)
		}

		done := make(chan struct{})
		go func() { c.Sleep(start + leaky.FromDuration(5*time.Millisecond)); close(done) }()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			t.Fatalf("after %v: a sleep of 5 ms does not end", age)
		}
		if slept := c.Now() - start; slept < leaky.FromDuration(5*time.Millisecond) {
			t.Errorf("after %v: a sleep of 5 ms took %v", age, slept.Duration())
		}

		s := leaky.Shape{Bytes: leaky.NewRate(1e6, time.Second)}
		var b leaky.Bucket
		now := c.Now()
		b.Charge(&s, 1000, 0, now)
		if wait := b.Depart(&s, now) - now; wait != leaky.FromDuration(time.Millisecond) {
			t.Errorf("after %v: 1,000 B at 1 MB/s take %v", age, wait.Duration())
		}

		wakes := 0
		p := pacer.New(c)
		var e pacer.Event
		fired := false
		e.Fire = func(leaky.Time) { fired = true }
		p.Schedule(&e, c.Now()+leaky.FromDuration(2*time.Millisecond))
		p.Run(func(until leaky.Time) bool {
			wakes++
			if fired && until != leaky.Never {
				t.Errorf("after %v: an empty pacer waits until %v", age, until.Duration())
			}
			if !fired {
				c.Sleep(until)
			}
			return !fired
		})
		if wakes > 3 {
			t.Errorf("after %v: one event took %d wake-ups", age, wakes)
		}
	}
}

// While the machine runs, both clocks advance alike.
func TestClock_Boot(t *testing.T) {
	c := pacer.NewClockAt(24 * time.Hour)
	before := c.Now()
	boot := c.Boot()
	after := c.Now()
	if boot < leaky.FromDuration(24*time.Hour) || boot > leaky.FromDuration(24*time.Hour+time.Minute) {
		t.Errorf("a new clock of a day reads %v", boot.Duration())
	}
	c.Sleep(after + leaky.FromDuration(20*time.Millisecond))
	before2 := c.Now()
	passed := c.Boot() - boot
	after2 := c.Now()
	const tick = leaky.Nanosecond
	if least, most := before2-after, after2-before; passed+tick < least || passed > most+tick {
		t.Errorf("%v passed, want %v to %v", passed.Duration(), least.Duration(), most.Duration())
	}
}
