package shaper

import (
	"math/big"
	"time"

	"shaperd.dev/shaperd/leaky"
)

// naiveLevel is the exact backlog of one bucket in bytes or in packets: it
// drains by rate units every span, and is stored multiplied by span.
type naiveLevel struct {
	rate, span uint64 // units every span ticks; rate 0 is unlimited
	burst      uint64 // units
	level      big.Int
	charged    int64   // charges so far, each of which may have been rounded up
	total      big.Int // sum of all charges, times span
}

func (l *naiveLevel) drain(d leaky.Time) {
	l.level.Sub(&l.level, mul(l.rate, uint64(d)))
	if l.level.Sign() < 0 {
		l.level.SetInt64(0)
	}
}

func (l *naiveLevel) charge(n uint64) {
	if l.rate != 0 {
		l.level.Add(&l.level, mul(n, l.span))
		l.total.Add(&l.total, mul(n, l.span))
		l.charged++
	}
}

// wait returns the ticks that the backlog beyond burst takes to drain.
func (l *naiveLevel) wait() *big.Rat {
	if l.rate == 0 {
		return new(big.Rat)
	}
	beyond := new(big.Int).Sub(&l.level, mul(l.burst, l.span))
	if beyond.Sign() < 0 {
		return new(big.Rat)
	}
	return new(big.Rat).SetFrac(beyond, new(big.Int).SetUint64(l.rate))
}

// tolerance returns the largest difference of package leaky from wait: a tick and a part
// in 2^31 of each cost so far, as leaky.Rate documents, and the same of the burst.
func (l *naiveLevel) tolerance() *big.Rat {
	if l.rate == 0 {
		return new(big.Rat)
	}
	total := new(big.Int).Add(&l.total, mul(l.burst, l.span))
	tol := new(big.Rat).SetFrac(total, new(big.Int).SetUint64(l.rate))
	tol.Mul(tol, big.NewRat(1, 1<<30))
	return tol.Add(tol, big.NewRat(l.charged+2, 1))
}

func mul(a, b uint64) *big.Int {
	return new(big.Int).Mul(new(big.Int).SetUint64(a), new(big.Int).SetUint64(b))
}

func ratOf(t leaky.Time) *big.Rat { return new(big.Rat).SetInt(new(big.Int).SetUint64(uint64(t))) }

type naiveBucket struct {
	at             leaky.Time
	bytes, packets naiveLevel
}

// naiveShaper decides on units with a map of buckets by key.
type naiveShaper struct {
	policy  *Policy
	buckets map[Key]*naiveBucket
}

func (o *naiveShaper) bucket(i int, f *Flow, r Route, now leaky.Time) *naiveBucket {
	k := o.policy.Key(i, f, r)
	b := o.buckets[k]
	if b == nil {
		l := o.policy.Limit(i)
		b = &naiveBucket{at: now}
		b.bytes = naiveLevel{rate: l.Rate, span: uint64(8 * leaky.Second), burst: l.Burst}
		b.packets = naiveLevel{rate: l.Packets.N, span: uint64(leaky.FromDuration(max(l.Packets.Per, time.Nanosecond))), burst: l.BurstPackets}
		o.buckets[k] = b
	}
	b.bytes.drain(now - b.at)
	b.packets.drain(now - b.at)
	b.at = now
	return b
}

// naiveAnswer is the result of exact arithmetic: the wait of each limit for a unit,
// and the tolerance for rounded arithmetic.
type naiveAnswer struct {
	wait, tolerance map[int]*big.Rat
}

func (o *naiveShaper) waits(f *Flow, r Route, set Set, now leaky.Time) naiveAnswer {
	a := naiveAnswer{wait: map[int]*big.Rat{}, tolerance: map[int]*big.Rat{}}
	for i := range set.All {
		b := o.bucket(i, f, r, now)
		a.wait[i] = larger(b.bytes.wait(), b.packets.wait())
		a.tolerance[i] = larger(b.bytes.tolerance(), b.packets.tolerance())
	}
	return a
}

func (o *naiveShaper) charge(f *Flow, r Route, set Set, bytes, packets uint64, now leaky.Time) {
	for i := range set.All {
		b := o.bucket(i, f, r, now)
		b.bytes.charge(bytes + packets*uint64(o.policy.Limit(i).Overhead))
		b.packets.charge(packets)
	}
}

// close reports whether got is within the tolerance of limit i's wait.
func (a naiveAnswer) close(i int, got leaky.Time) bool {
	off := new(big.Rat).Sub(ratOf(got), a.wait[i])
	return off.Abs(off).Cmp(a.tolerance[i]) <= 0
}

// exceeds reports whether limit i's wait is longer than got by more than the tolerance.
func (a naiveAnswer) exceeds(i int, got leaky.Time) bool {
	return new(big.Rat).Sub(a.wait[i], a.tolerance[i]).Cmp(ratOf(got)) > 0
}

// refusing returns the limits of set that must refuse, and those that may.
func (a naiveAnswer) refusing(p *Policy, set Set) (must, may Set) {
	for i := range set.All {
		maxDelay := ratOf(p.Shape(i).MaxDelay)
		if a.exceeds(i, p.Shape(i).MaxDelay) {
			must |= 1 << i
		}
		if new(big.Rat).Add(a.wait[i], a.tolerance[i]).Cmp(maxDelay) > 0 {
			may |= 1 << i
		}
	}
	return must, may
}

func larger(a, b *big.Rat) *big.Rat {
	if a.Cmp(b) < 0 {
		return b
	}
	return a
}
