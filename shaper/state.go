package shaper

import (
	"sync/atomic"
	"time"

	"shaperd/leaky"
)

// State is what a limit has done, kept under its name from policy to policy.
// All of it may be read and written by any goroutine.
type State struct {
	Name string

	// ID marks the limit in keys. ID+1 marks it in the keys of its new
	// connections, which have buckets of their own.
	ID uint32

	Bytes       Counts
	Packets     Counts
	Connections Counts
	Marked      atomic.Uint64 // packets marked CE

	InFlight atomic.Int64 // connections that hold a slot
	Waiting  atomic.Int64 // connections that wait for one

	Wait  Histogram // of connections for a slot, those that got one
	Queue Histogram // of units in the bucket's queue

	Promise Promise
	Keys    Ranking[Key]

	// Guarded by Shaper.mu.
	shape, newConns *leaky.Shape // in effect last, or nil
	observed        bool         // it only observed then
	calendars       *calendars   // or nil
}

// Promise is how what leaves a limit's buckets keeps to their envelopes, as [leaky.Meter]
// measures it. One goroutine writes, any may read.
type Promise struct {
	Allowed    atomic.Uint64 // leaky.Time: the most that a unit was allowed
	Worst      atomic.Uint64 // the largest excess, since somebody set it to 0
	Violations atomic.Uint64 // units that left beyond what they were allowed
}

// Note takes in what a meter has measured of a unit.
func (p *Promise) Note(excess, allowed leaky.Time) {
	if uint64(allowed) > p.Allowed.Load() {
		p.Allowed.Store(uint64(allowed))
	}
	if uint64(excess) > p.Worst.Load() {
		p.Worst.Store(uint64(excess))
	}
	if excess > allowed {
		p.Violations.Add(1)
	}
}

// restart forgets what was measured at another rate.
func (p *Promise) restart() {
	p.Allowed.Store(0)
	p.Worst.Store(0)
}

// Counts counts by verdict and reason.
type Counts [Verdicts][Reasons]atomic.Uint64

// Add counts n.
func (c *Counts) Add(v Verdict, r Reason, n uint64) { c[v][r].Add(n) }

// HistogramBounds are the upper bounds of a Histogram's classes.
var HistogramBounds = [...]time.Duration{
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond,
	10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second,
}

// Histogram counts spans of time by class.
type Histogram struct {
	Counts [len(HistogramBounds) + 1]atomic.Uint64 // the last one beyond all bounds
	Sum    atomic.Uint64                           // ns
}

// Observe counts d.
func (h *Histogram) Observe(d time.Duration) {
	i := 0
	for i < len(HistogramBounds) && d > HistogramBounds[i] {
		i++
	}
	h.Counts[i].Add(1)
	h.Sum.Add(uint64(max(d, 0)))
}

// ListenerState is what a listener has done, kept under its name from policy to
// policy. All of it may be read and written by any goroutine.
type ListenerState struct {
	Name string
	ID   uint16 // marks the listener in keys

	Open           atomic.Int64  // TCP connections with a downstream
	Flows          atomic.Int64  // UDP flows
	MaxFlows       atomic.Int64  // that it may have; 0 when it has no UDP address
	ToDownstream   atomic.Uint64 // bytes
	FromDownstream atomic.Uint64
	Accepted       atomic.Uint64 // TCP connections
	Ended          [Endings]atomic.Uint64
	DialErrors     atomic.Uint64
	FlowsOpened    atomic.Uint64
	FlowsEvicted   atomic.Uint64 // flows that ended to make room for another
	FlowsRefused   atomic.Uint64 // datagrams for whose flow there was no room
	Withheld       atomic.Uint64 // answers, joined or not, beyond Listen.Amplification
	SendErrors     atomic.Uint64 // datagrams a socket did not take, that came back as an error, or that were not kept while their flow waited
}
