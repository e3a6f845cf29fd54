package leaky

import (
	"time"

	"golang.org/x/sys/unix"
)

// Clock reads CLOCK_MONOTONIC, counted from shortly before the Clock was made.
// It is safe for concurrent use.
type Clock struct {
	start time.Time
	base  int64 // CLOCK_MONOTONIC at start, in ns
}

// NewClock returns a clock that reads a little more than zero.
func NewClock() *Clock {
	var ts unix.Timespec
	// The error is EINVAL or EFAULT, neither of which these arguments can cause.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return &Clock{start: time.Now(), base: ts.Nano()}
}

// Now returns the present instant.
func (c *Clock) Now() Time { return FromDuration(time.Since(c.start)) }

// Sleep returns when the clock reads until or later. A signal ends the system
// call early, and Go sends them to preempt: the clock decides, not the call.
func (c *Clock) Sleep(until Time) {
	for {
		wait := until.Sub(c.Now())
		if wait == 0 {
			return
		}
		if wait <= keepProcessor {
			ts := unix.NsecToTimespec(c.base + int64(until.Duration()))
			rawSleepUntil(&ts)
			continue
		}
		ts := unix.NsecToTimespec(c.base + int64((until - keepProcessor).Duration()))
		_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &ts, nil)
	}
}
