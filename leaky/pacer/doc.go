// Package pacer releases events at instants of package leaky: a timing wheel, a clock, and a
// thread that sleeps until the next event is due.
//
// Go's timers are a millisecond coarse. A thread of its own, which sleeps until an absolute time,
// wakes within 12 us of it at 10,000 events a second (1st to 99th percentile) for 8 % of a core.
//
// A [Wheel] and a [Pacer] belong to one thread. A [Clock] may be used concurrently.
package pacer
