// Package leaky implements the arithmetic of a leaky bucket used as a queue. Package pacer has
// the timers that release units at the instants it computes.
//
// A bucket is one number: t, the virtual time at which it will have drained.
// A unit of n bytes that arrives at now is handled by four lines:
//
//	cost   = n / rate                      (as time, rounded up)
//	depart = max(now, t - burst)
//	if depart - now > max_delay: refuse    (the bucket is full, nothing changes)
//	t      = max(t, now) + cost
//
// This is the virtual scheduling form of the generic cell rate algorithm
// (ITU-T I.371, annex A) with the cost of a unit in place of a fixed increment.
// What leaves a bucket in any interval [s, e] is at most
// rate * (e - s) + burst + one unit.
//
// A bucket may also be one of several that share a limit, see [Share].
//
// Everything is integer arithmetic on ticks of 1/64 ns, and every addition
// saturates: an overflow makes a bucket slower, never faster.
//
// Nothing here reads a clock: time is an argument. No type may be used concurrently, unless its
// comment says so.
package leaky
