package shaper

import (
	"sync/atomic"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper/topk"
)

// LimitState holds the counters of a limit. It belongs to the limit's name and outlives
// policies. Any goroutine may read and write its exported fields.
type LimitState struct {
	Name string

	// ID identifies the limit in keys. ID+1 does in the keys of its new
	// connections, which have buckets of their own.
	ID uint32

	Bytes       Counters
	Packets     Counters
	Connections Counters
	Marked      atomic.Uint64 // packets marked CE

	UsedTickets, VoidTickets atomic.Uint64 // that the ledger has sold this host, of new connections of a shared limit

	InFlight atomic.Int64 // connections that hold a slot
	Waiting  atomic.Int64 // connections that wait for admission

	Adaptive atomic.Pointer[AdaptiveStatus] // nil unless the maximum in flight is adaptive
	Shed     atomic.Pointer[ShedStatus]     // nil unless the limit sheds, or before it has begun to look

	// Penalties of sources that the limit has refused often, and those that one that observes would impose.
	Penalties, ObservedPenalties PenaltyCounters

	SlotWait   Histogram // waits of admitted connections for a slot
	QueueDelay Histogram // delays of units in queues

	Conformance Conformance
	Keys        topk.Ranking[Key]

	// Protected by Shaper.mu.
	wasObserving bool       // the limit only observed in the last policy with it
	calendars    *calendars // nil if the limit has a bucket
	histories    *histories // of new connections; nil if there were none
}

// Conformance holds the conformance of the units that leave a limit's buckets, as
// measured by [leaky.Meter]. Any goroutine may write and read it: buckets of a limit may be at several threads.
type Conformance struct {
	MaxAllowed atomic.Uint64 // leaky.Time: largest allowed excess of a unit
	MaxExcess  atomic.Uint64 // leaky.Time: largest excess since a reader reset it to 0
	Violations atomic.Uint64 // units beyond their allowed excess
}

// Record adds the result of [leaky.Meter.Record] for a unit.
func (p *Conformance) Record(excess, allowed leaky.Time) {
	raise(&p.MaxAllowed, uint64(allowed))
	raise(&p.MaxExcess, uint64(excess))
	if excess > allowed {
		p.Violations.Add(1)
	}
}

// raise makes n at least least.
func raise(n *atomic.Uint64, least uint64) {
	for was := n.Load(); least > was && !n.CompareAndSwap(was, least); was = n.Load() {
	}
}

// reset discards measurements at another rate.
func (p *Conformance) reset() {
	p.MaxAllowed.Store(0)
	p.MaxExcess.Store(0)
}

// PenaltyCounters are counters of the penalties of a limit.
type PenaltyCounters struct {
	Active  atomic.Int64  // sources that are blocked
	Imposed atomic.Uint64 // blocks
	Evicted atomic.Uint64 // blocks that have ended early, as too many sources were blocked
}

// Counters are counters by verdict and reason.
type Counters [NumVerdicts][NumReasons]atomic.Uint64

// Add adds n.
func (c *Counters) Add(v Verdict, r Reason, n uint64) { c[v][r].Add(n) }

// HistogramBounds are the upper bounds of a Histogram's buckets.
var HistogramBounds = [...]time.Duration{
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond,
	10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second,
}

// Histogram is a histogram of durations.
type Histogram struct {
	Counts [len(HistogramBounds) + 1]atomic.Uint64 // by bound; the last one is beyond all bounds
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

// DownstreamState holds what was measured of a downstream of a listener. No time that traffic waits inside shaperd is
// in it. It lives as long as the configuration names the downstream. Any goroutine may read and write it.
type DownstreamState struct {
	Connect   Histogram // handshakes of TCP connections that were made
	FirstByte Histogram // until the first byte of a connection, since its last byte before, or the handshake
	Answer    Histogram // turns: from the last byte of a question, as sent, until the first byte back
	RTT       Histogram // smoothed round-trip times by TCP, of each connection that is in use, once a second

	ToDownstream   atomic.Uint64 // bytes
	FromDownstream atomic.Uint64 // bytes

	DialsRefused  atomic.Uint64 // by the downstream
	DialsTimedOut atomic.Uint64
	DialsFailed   atomic.Uint64 // for other reasons; those of this host are not among them
	Resets        atomic.Uint64 // connections that it has ended with a reset, or that have timed out
	ICMPErrors    atomic.Uint64 // of UDP flows

	BreakerOpened atomic.Uint64 // how often it was closed before

	Retransmits     atomic.Uint64 // segments that TCP has sent to it again
	Busy            atomic.Uint64 // us in which data was on its way to it, over all connections
	ReceiverLimited atomic.Uint64 // us of these in which its receive window was full
}

// ListenerState holds the counters of a listener. It belongs to the listener's name and
// outlives policies. Any goroutine may read and write it.
type ListenerState struct {
	Name string
	ID   uint16 // identifies the listener in keys

	Open              atomic.Int64              // TCP connections that have a downstream
	Flows             atomic.Int64              // UDP flows
	MaxFlows          atomic.Int64              // maximum of Flows; 0 if the listener has no UDP address
	ToDownstream      atomic.Uint64             // bytes
	FromDownstream    atomic.Uint64             // bytes
	Accepted          atomic.Uint64             // TCP connections
	Ended             [NumEndings]atomic.Uint64 // TCP connections
	DialErrors        atomic.Uint64
	FlowsOpened       atomic.Uint64
	FlowsEvicted      atomic.Uint64 // flows that ended to make room for another
	FlowsRefused      atomic.Uint64 // datagrams without room for their flow
	RepliesSuppressed atomic.Uint64 // replies, coalesced or not, beyond Listen.Amplification
	SendErrors        atomic.Uint64 // datagrams that failed to send, came back as an ICMP error, or were dropped while their flow waited
}
