package pacer_test

import (
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky/pacer"

	"shaperd.dev/shaperd/leaky"
)

func TestSleepNeverReturnsEarly(t *testing.T) {
	clock := pacer.NewClock()
	stop := make(chan struct{})
	defer close(stop)
	go func() { // signals end system calls early
		for {
			select {
			case <-stop:
				return
			default:
				_ = syscall.Kill(syscall.Getpid(), syscall.SIGURG)
				time.Sleep(100 * time.Microsecond)
			}
		}
	}()
	for _, d := range []time.Duration{0, time.Microsecond, 100 * time.Microsecond, 5 * time.Millisecond} {
		for range 20 {
			until := clock.Now() + leaky.FromDuration(d)
			clock.Sleep(until)
			if now := clock.Now(); now < until {
				t.Fatalf("a sleep of %v ended %v early", d, (until - now).Duration())
			}
		}
	}
}

// run paces packets at the rate of s for d and returns the instants at which they left.
func run(p *pacer.Pacer, clock *pacer.Clock, s *leaky.Shape, d time.Duration) []leaky.Time {
	var b leaky.Bucket
	var left []leaky.Time
	slack := s.Packets.Cost(1)
	end := clock.Now() + leaky.FromDuration(d)
	var e pacer.Event
	e.Fire = func(now leaky.Time) {
		for b.Depart(s, now) <= now {
			b.Charge(s, 0, 1, leaky.CatchUp(b.DrainedAt(), now, slack))
			left = append(left, now)
		}
		p.Schedule(&e, b.Depart(s, now))
	}
	b.Charge(s, 0, 1, clock.Now())
	p.Schedule(&e, b.DrainedAt())
	p.Run(func(until leaky.Time) bool {
		clock.Sleep(min(until, end))
		return clock.Now() < end
	})
	return left
}

func TestPacer_StaysWithinEnvelope(t *testing.T) {
	const pps = 5000
	// Every run must stay within the envelope. Stalls of the machine lose throughput, but not in every run, or those of
	// a plain loop of sleeps as well.
	var packets, wakeups int
	for range 10 {
		plain := make(chan int)
		go func() { plain <- sleepOnce(pps) }()
		packets = paceOnce(t, pps)
		if wakeups = <-plain; packets >= min(pps/2, wakeups)*7/10 {
			return
		}
	}
	t.Errorf("%d packets left in 0.5 s, want about %d; a plain loop of sleeps had %d turns", packets, pps/2, wakeups)
}

// sleepOnce returns how many of the instants of a frequency are met within 0.5 s by a thread that sleeps until each, and omits those
// that are over.
func sleepOnce(frequency int64) (n int) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	now := func() int64 {
		var ts unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
		return ts.Nano()
	}
	every := int64(time.Second) / frequency
	begun := now()
	for at := begun; at < begun+int64(time.Second)/2; at += every {
		if now() >= at+every {
			continue
		}
		ts := unix.NsecToTimespec(at)
		_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &ts, nil)
		n++
	}
	return n
}

// paceOnce paces packets for 0.5 s, checks their departure times, and returns their number.
func paceOnce(t *testing.T, pps uint64) int {
	clock := pacer.NewClock()
	p := pacer.New(clock)
	s := leaky.Shape{Packets: leaky.NewRate(pps, time.Second)}
	left := run(p, clock, &s, 500*time.Millisecond)
	low, sigma := 0.0, 0.0
	for i, at := range left {
		line := float64(pps) * float64(at) / float64(leaky.Second)
		if i == 0 {
			low = -line
		}
		low = min(low, float64(i)-line)
		sigma = max(sigma, float64(i+1)-line-low)
	}
	if sigma > 2.001 {
		t.Errorf("sigma %.3f packets, want at most 2", sigma)
	}
	counts, sum := p.Lateness()
	var n uint64
	for _, c := range counts {
		n += c
	}
	if n < uint64(len(left))/2 || sum <= 0 {
		t.Errorf("lateness of %d wake-ups recorded, sum %v, for %d packets", n, sum, len(left))
	}
	return len(left)
}

// BenchmarkPacer reports what pacing costs at 10,000 packets a second, as a
// share of one core, and how even the gaps are.
func BenchmarkPacer(b *testing.B) {
	clock := pacer.NewClock()
	s := leaky.Shape{Packets: leaky.NewRate(10_000, time.Second)}
	for b.Loop() {
		p := pacer.New(clock)
		before := cpuTime()
		start := time.Now()
		left := run(p, clock, &s, time.Second)
		elapsed := time.Since(start)
		b.ReportMetric(100*float64(cpuTime()-before)/float64(elapsed), "%core")
		b.ReportMetric(float64(len(left))/elapsed.Seconds(), "packets/s")
		gaps := make([]time.Duration, 0, len(left))
		for i := 1; i < len(left); i++ {
			gaps = append(gaps, (left[i] - left[i-1]).Duration())
		}
		slices.Sort(gaps)
		b.ReportMetric(float64(gaps[len(gaps)/100])/1e3, "p1-gap-us")
		b.ReportMetric(float64(gaps[len(gaps)*99/100])/1e3, "p99-gap-us")
	}
}

func cpuTime() time.Duration {
	var ru syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &ru)
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}
