package leaky

import (
	"math"
	"time"
)

// Time is an instant or a span in ticks of 1/64 ns. Instants count from an
// arbitrary origin of the clock and range over 9.1 years from there; spans
// saturate at Forever.
//
// Whole nanoseconds would be too coarse: 64 bytes at 10 Gbit/s cost 51.2 ns.
type Time uint64

const (
	// ticksPerNano makes the rounding error of a 64-byte unit at 10 Gbit/s
	// 0.006 %.
	ticksPerNano = 64

	// Nanosecond is one nanosecond in ticks.
	Nanosecond Time = ticksPerNano

	// Second is one second in ticks.
	Second Time = 1e9 * ticksPerNano

	// Forever is the longest span, 2.3 years. A unit of that cost never fits.
	Forever Time = 1 << 62

	// Never is the last instant.
	Never Time = math.MaxUint64
)

// FromDuration converts d to ticks. A negative d is 0; one beyond Forever
// is Forever.
func FromDuration(d time.Duration) Time {
	if d <= 0 {
		return 0
	}
	if uint64(d) > uint64(Forever)/ticksPerNano {
		return Forever
	}
	return Time(d) * ticksPerNano
}

// Duration converts t to nanoseconds, rounded up.
func (t Time) Duration() time.Duration {
	if t > math.MaxUint64-(ticksPerNano-1) {
		return time.Duration(math.MaxUint64 / ticksPerNano)
	}
	return time.Duration((t + ticksPerNano - 1) / ticksPerNano)
}

// Sub returns t - u, or 0 when u is later.
func (t Time) Sub(u Time) Time {
	if t < u {
		return 0
	}
	return t - u
}

// Add returns t + d, saturating at Never.
func (t Time) Add(d Time) Time {
	if sum := t + d; sum >= t {
		return sum
	}
	return Never
}
