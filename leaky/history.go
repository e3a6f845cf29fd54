package leaky

import "time"

// Count is a maximum of N events in any Per, or in each window of it.
type Count struct {
	N   uint64
	Per Time
}

// NewCount returns the maximum of n events every per.
func NewCount(n uint64, per time.Duration) Count { return Count{n, FromDuration(per)} }

// History is what has passed under a Count, of one key, as far as it matters. It is not safe for concurrent use. Instants must
// not go back.
type History interface {
	// Depart returns the earliest instant, not before now, at which the next event may pass.
	Depart(now Time) Time

	// Charge adds an event that passes at now.
	Charge(now Time)

	// EmptyAt returns the instant from which on the history equals a new one, and may be discarded.
	EmptyAt() Time

	// Used returns how many of N events are taken at now, rounded up.
	Used(now Time) uint64

	// Inherit raises the history to at least that of o, another one of the same type and Count: no event passes at any instant
	// at which it would not under o.
	Inherit(o History, now Time)
}
