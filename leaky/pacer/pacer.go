package pacer

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"shaperd.dev/shaperd/leaky"
)

// MaxShortWait is the longest wait during which a pacing thread keeps its Go
// processor, in a system call that bypasses the Go scheduler. A thread that releases it sleeps at no cost to the other goroutines,
// but has to acquire one again before it can act: with all of them busy that took up
// to 7 ms. And the runtime's monitor, which retakes processors, then polls every 20 us
// for more to retake, at twice the cost of the pacing.
const MaxShortWait = leaky.Second / 50 // 20 ms

// LatenessBounds are the upper bounds of the histogram that [Pacer.Lateness] returns.
var LatenessBounds = [...]time.Duration{
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

	lateness    [len(LatenessBounds) + 1]atomic.Uint64
	latenessSum atomic.Uint64 // ns
}

// New returns a pacer that uses clock.
func New(clock *Clock) *Pacer { return &Pacer{clock: clock} }

// Run fires events until wait returns false. Between events it calls wait, which
// returns at until, or earlier after work of its own; the simplest wait is
// [Clock.Sleep] followed by true. until is Never when nothing is scheduled.
//
// Run locks its goroutine to a thread and requests exact timers on it. Go's own
// are rounded to a millisecond when the process is idle (runtime/netpoll_epoll.go).
// The thread keeps its Go processor during short waits, so GOMAXPROCS should be one
// higher than otherwise.
func (p *Pacer) Run(wait func(until leaky.Time) bool) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// The default slack lets a sleep end 50 us late. On an error it remains.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	for {
		p.Fire()
		at, _ := p.Next()
		if !wait(at) {
			return
		}
	}
}

// Fire fires the events that are due. Run does so before each wait; a wait with much
// work of its own should call it from time to time.
func (p *Pacer) Fire() {
	if at, ok := p.Next(); ok {
		if now := p.clock.Now(); at <= now {
			p.recordLateness(now - at)
			p.Advance(now)
		}
	}
}

// Lateness returns a histogram of the lateness of wake-ups, the last count being of those
// beyond all LatenessBounds, and the sum. It may be called from any goroutine.
func (p *Pacer) Lateness() (counts [len(LatenessBounds) + 1]uint64, sum time.Duration) {
	for i := range counts {
		counts[i] = p.lateness[i].Load()
	}
	return counts, time.Duration(p.latenessSum.Load())
}

// Absorb moves the events of o, and what it has recorded, to p. Neither may be in Run, or both stand still in their wait.
func (p *Pacer) Absorb(o *Pacer) {
	p.Wheel.Absorb(&o.Wheel)
	for i := range o.lateness {
		p.lateness[i].Add(o.lateness[i].Swap(0))
	}
	p.latenessSum.Add(o.latenessSum.Swap(0))
}

func (p *Pacer) recordLateness(by leaky.Time) {
	d := by.Duration()
	i := 0
	for i < len(LatenessBounds) && d > LatenessBounds[i] {
		i++
	}
	p.lateness[i].Add(1)
	p.latenessSum.Add(uint64(d))
}

func rawSleepUntil(ts *unix.Timespec) {
	unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME,
		uintptr(unsafe.Pointer(ts)), 0, 0, 0)
}
