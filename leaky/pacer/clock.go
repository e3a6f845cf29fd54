package pacer

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"shaperd.dev/shaperd/leaky"
)

// Clock reads CLOCK_MONOTONIC, counted from shortly before the Clock was created.
// It is safe for concurrent use.
type Clock struct {
	start    time.Time
	base     int64 // CLOCK_MONOTONIC at start or slightly later, in ns
	bootBase int64 // the same of CLOCK_BOOTTIME
}

// NewClock returns a clock that reads slightly more than zero.
func NewClock() *Clock { return NewClockAt(0) }

// NewClockAt returns a clock that reads slightly more than age, as if it had been created
// that long ago.
func NewClockAt(age time.Duration) *Clock {
	// In this order a sleep ends late by the time between the two reads, not early.
	// An early one would be followed by another short sleep, which costs 10 us.
	c := &Clock{start: time.Now().Add(-age)}
	c.base = clockNow(unix.CLOCK_MONOTONIC) - int64(age)
	c.bootBase = clockNow(unix.CLOCK_BOOTTIME) - int64(age)
	return c
}

// clockNow reads a clock of the kernel, in ns.
func clockNow(clock int) int64 {
	var ts unix.Timespec
	// The error is EINVAL or EFAULT, neither of which these arguments can cause.
	unix.RawSyscall(unix.SYS_CLOCK_GETTIME, uintptr(clock), uintptr(unsafe.Pointer(&ts)), 0)
	return ts.Nano()
}

// Now returns the current instant, which may be later than Forever: Forever bounds spans,
// not instants.
func (c *Clock) Now() leaky.Time { return leaky.Time(time.Since(c.start)) * leaky.Nanosecond }

// Boot returns the current instant of a clock that reads as c did when both were created, and goes
// on while the machine is suspended: CLOCK_BOOTTIME. It costs a system call, 130 ns where Now costs
// 25, since Go reads no such clock without one.
func (c *Clock) Boot() leaky.Time {
	return leaky.Time(clockNow(unix.CLOCK_BOOTTIME)-c.bootBase) * leaky.Nanosecond
}

// Sleep returns when the clock reads until or later. A signal ends the system
// call early, and Go sends them to preempt: the clock decides, not the call.
func (c *Clock) Sleep(until leaky.Time) {
	for {
		wait := until.Sub(c.Now())
		if wait == 0 {
			return
		}
		if wait <= MaxShortWait {
			ts := unix.NsecToTimespec(c.base + int64(until.Duration()))
			rawSleepUntil(&ts)
			continue
		}
		ts := unix.NsecToTimespec(c.base + int64((until - MaxShortWait).Duration()))
		_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &ts, nil)
	}
}
