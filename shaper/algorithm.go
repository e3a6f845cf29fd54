package shaper

import (
	"time"

	"shaperd.dev/shaperd/leaky"
)

// Algorithm is how new connections are counted.
type Algorithm uint8

// The algorithms, with their names in configuration.
const (
	LeakyBucket   Algorithm = iota // "leaky": spaced, but for BurstConnections
	FixedWindow                    // "fixed-window": so many in each window, which begin at multiples of the period
	SlidingWindow                  // "sliding-window": two windows, weighted, see [leaky.SlidingWindow]; proxy plane only
	SlidingLog                     // "sliding-log": so many in any period, see [leaky.SlidingLog]; proxy plane only
)

func (a Algorithm) String() string {
	return enumName(a, "leaky", "fixed-window", "sliding-window", "sliding-log")
}

// HasHistory reports whether what has passed is a [leaky.History], and not a bucket.
func (a Algorithm) HasHistory() bool { return a >= SlidingWindow }

// newConnsShape returns the shape of the buckets of new connections. Under an algorithm with a history they are those that a
// history replaces, and from which one begins if the algorithm changes.
func (l *Limit) newConnsShape() leaky.Shape {
	n, per := l.NewConnections.N, l.NewConnections.Per
	s := leaky.Shape{Packets: leaky.NewRate(n, per), MaxDelay: leaky.FromDuration(l.QueueTimeout)}
	burst := max(l.BurstConnections, 1)
	switch {
	case n == 0:
		return s
	case l.Algorithm == FixedWindow:
		s.Packets, s.PacketsBurst = leaky.NewWindow(n, per)
		s.Window = leaky.FromDuration(per)
		return s
	case l.Algorithm.HasHistory():
		burst = n
	}
	s.PacketsBurst = s.Packets.Cost(1) * leaky.Time(burst-1) // not Cost(burst-1), which is less by the rounding of each
	return s
}

// newHistory returns an empty history of l's new connections.
func (l *Limit) newHistory() leaky.History {
	c := leaky.NewCount(l.NewConnections.N, l.NewConnections.Per)
	if l.Algorithm == SlidingLog {
		return leaky.NewSlidingLog(c)
	}
	return leaky.NewSlidingWindow(c)
}

// validateAlgorithm reports what keeps l from counting its new connections as it says.
func (l *Limit) validateAlgorithm(bad func(key, format string, args ...any)) {
	n := l.NewConnections.N
	switch {
	case l.Algorithm == LeakyBucket:
	case n == 0:
		bad("algorithm", "needs new_connections")
	case l.Shared:
		bad("algorithm", "%v: unsupported with shared", l.Algorithm)
	case l.BurstConnections > 0:
		bad("burst_connections", "unsupported with algorithm %v", l.Algorithm)
	case l.InPacketPlane() && l.Algorithm.HasHistory():
		bad("algorithm", "%v: unsupported for attachments", l.Algorithm)
	case n > MaxWindow || n > uint64(l.NewConnections.Per/time.Nanosecond):
		bad("new_connections", "%d: must be must be at most %d in a window, and one a nanosecond", n, MaxWindow)
	case l.Algorithm == SlidingLog && n > leaky.MaxLog:
		bad("new_connections", "%d: a log has at most %d", n, leaky.MaxLog)
	}
}

// MaxWindow is the maximum number of new connections in a window.
const MaxWindow = 1_000_000
