package leaky

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// keepProcessor is the longest wait in which a pacing thread keeps its Go
// processor. A thread that gives it up sleeps at no cost to the other goroutines,
// but has to win one back before it can act: with all of them busy that took up
// to 7 ms. And the runtime's monitor, which takes it away, then looks every 20 us for
// more to take, at twice the cost of the pacing.
const keepProcessor = Time(20*time.Millisecond) * ticksPerNano

// LateBounds are the upper bounds of the classes in which [Pacer.Late] counts.
var LateBounds = [...]time.Duration{
	10 * time.Microsecond, 20 * time.Microsecond, 50 * time.Microsecond,
	100 * time.Microsecond, 200 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond,
	10 * time.Millisecond, 50 * time.Millisecond,
}

// Pacer fires the events of its wheel at their instants. All events fire on the
// thread that calls Run, and only there may the Wheel be used once it runs.
type Pacer struct {
	Wheel
	clock *Clock

	late    [len(LateBounds) + 1]atomic.Uint64
	lateSum atomic.Uint64 // ns
}

// NewPacer returns a pacer that lives by clock.
func NewPacer(clock *Clock) *Pacer { return &Pacer{clock: clock} }

// Run fires events until wait returns false. Between events it calls wait, which
// returns at until, or earlier when it has work of its own to do or has done it;
// [Clock.Sleep] with a true result is the simplest. until is Never when nothing is
// scheduled.
//
// Run locks its goroutine to a thread and asks for exact timers on it. Go's own
// are rounded to a millisecond when the process is idle (runtime/netpoll_epoll.go).
// The thread holds on to a Go processor during short waits: give the process one
// more than it would have.
func (p *Pacer) Run(wait func(until Time) bool) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// The default slack lets a sleep end 50 us late. An error would leave it so.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	for {
		p.Fire()
		at, _ := p.Next()
		if !wait(at) {
			return
		}
	}
}

// Fire fires what is due. Run does so before each wait; a wait with much to do
// calls it now and then.
func (p *Pacer) Fire() {
	if at, ok := p.Next(); ok {
		if now := p.clock.Now(); at <= now {
			p.noteLate(now - at)
			p.Advance(now)
		}
	}
}

// Late returns how many wake-ups fell into each class of lateness, the last one
// beyond all LateBounds, and their sum. It may be called from any goroutine.
func (p *Pacer) Late() (counts [len(LateBounds) + 1]uint64, sum time.Duration) {
	for i := range counts {
		counts[i] = p.late[i].Load()
	}
	return counts, time.Duration(p.lateSum.Load())
}

func (p *Pacer) noteLate(by Time) {
	d := by.Duration()
	i := 0
	for i < len(LateBounds) && d > LateBounds[i] {
		i++
	}
	p.late[i].Add(1)
	p.lateSum.Add(uint64(d))
}

// ShortWait reports whether a pacing thread should wait d without giving up its
// Go processor, in a system call that the Go scheduler does not know of.
func ShortWait(d Time) bool { return d <= keepProcessor }

func rawSleepUntil(ts *unix.Timespec) {
	unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME,
		uintptr(unsafe.Pointer(ts)), 0, 0, 0)
}
