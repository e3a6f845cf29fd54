package leaky

import (
	"math/bits"
	"time"
)

// Rate is a number of units per time, stored as the cost of one unit in ticks:
// mult / 2^shift. The zero Rate is unlimited; its units cost nothing.
//
// A multiplication and a shift replace the division, as in the kernel's
// struct psched_ratecfg (net/sched/sch_generic.c), because BPF has no 128-bit
// division. mult is rounded up, so a cost is never less than n / rate. Up to
// 2^37 units per nanosecond mult holds at least 32 significant bits, so a cost
// is never more than a tick and one part in 2^31 above n / rate.
type Rate struct {
	mult  uint64
	max   uint64 // largest n whose cost Cost computes in 64 bits
	shift uint8
}

// NewRate returns the rate of n units every per. n = 0 or per <= 0 gives the
// unlimited Rate. Bytes at b bit/s are NewRate(b, 8*time.Second).
func NewRate(n uint64, per time.Duration) Rate {
	if n == 0 || per <= 0 {
		return Rate{}
	}
	span := uint64(FromDuration(per))

	// Scale span / n up until the quotient has 32 bits or more.
	var shift uint8
	for shift < 62 && quotientBelow(span, shift, n, 1<<31) {
		shift++
	}
	hi, lo := shiftLeft(span, shift)
	mult, rem := bits.Div64(hi, lo, n)
	if rem > 0 {
		mult++
	}
	return Rate{mult: mult, max: uint64(Forever) / mult, shift: shift}
}

// Cost returns the time that n units take, rounded up; at most Forever.
func (r Rate) Cost(n uint64) Time {
	if n > r.max {
		return r.cost128(n)
	}
	return Time((n*r.mult + (1<<r.shift - 1)) >> r.shift)
}

func (r Rate) cost128(n uint64) Time {
	hi, lo := bits.Mul64(n, r.mult)
	lo, carry := bits.Add64(lo, 1<<r.shift-1, 0)
	hi += carry
	if hi>>r.shift != 0 {
		return Forever
	}
	return min(Time(hi<<(64-r.shift)|lo>>r.shift), Forever)
}

// Units returns the number of units that fit into t at rate r, rounded down. It is
// meaningless for the unlimited Rate, for which it returns 0.
func (r Rate) Units(t Time) uint64 {
	if r.mult == 0 {
		return 0
	}
	hi, lo := shiftLeft(uint64(t), r.shift)
	if hi >= r.mult {
		return 1<<64 - 1
	}
	q, _ := bits.Div64(hi, lo, r.mult)
	return q
}

// Parts returns the representation of r, for arithmetic elsewhere: a unit costs
// mult / 2^shift ticks, and limit is the largest n whose product with mult, rounded
// up, stays below 2^63.
func (r Rate) Parts() (mult, limit uint64, shift uint8) { return r.mult, r.max, r.shift }

// Unlimited reports whether r is the zero Rate.
func (r Rate) Unlimited() bool { return r.mult == 0 }

// Rescale converts a backlog from rate r to rate next, keeping the number of
// units, rounded up. It is 0 when either is unlimited, and at most Forever.
func (r Rate) Rescale(backlog Time, next Rate) Time {
	if r == next {
		return backlog
	}
	if r.mult == 0 || next.mult == 0 {
		return 0
	}
	t, exact := r.rescaleDown(backlog, next)
	if !exact {
		t++
	}
	return t
}

// rescaleDown is Rescale, rounded down, and whether that is exact. Both rates are limited.
func (r Rate) rescaleDown(t Time, next Rate) (scaled Time, exact bool) {
	// t * (next.mult / 2^next.shift) / (r.mult / 2^r.shift)
	hi, lo := bits.Mul64(uint64(t), next.mult)
	var down uint8
	if r.shift >= next.shift {
		up := r.shift - next.shift
		if hi>>(64-up) != 0 {
			return Forever, true
		}
		hi, lo = hi<<up|lo>>(64-up), lo<<up
	} else {
		down = next.shift - r.shift
	}
	qhi, rem := hi/r.mult, hi%r.mult
	qlo, rem := bits.Div64(rem, lo, r.mult)
	if qhi>>down != 0 {
		return Forever, true
	}
	scaled = Time(qhi<<(64-down) | qlo>>down)
	if scaled >= Forever {
		return Forever, true
	}
	return scaled, rem == 0 && qlo&(1<<down-1) == 0
}

func shiftLeft(v uint64, s uint8) (hi, lo uint64) {
	return v >> (64 - s), v << s
}

func quotientBelow(span uint64, shift uint8, n, bound uint64) bool {
	hi, lo := shiftLeft(span, shift)
	bhi, blo := bits.Mul64(n, bound)
	return hi < bhi || hi == bhi && lo < blo
}
