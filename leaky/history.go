package leaky

import "time"

// Count is a maximum of N events in any Per, or in each window of it.
type Count struct {
	N   uint64
	Per Time
}

// NewCount returns the maximum of n events every per.
func NewCount(n uint64, per time.Duration) Count { return Count{n, FromDuration(per)} }

// History is what has passed under a Count, of one key, as far as it matters. It keeps what it knows beyond N for as long as it may matter
// again under another Count. It is not safe for concurrent use. Instants must not go back.
type History interface {
	// Depart returns the earliest instant, not before now, at which the next event may pass.
	Depart(now Time) Time

	// Charge adds n events that passed at an instant.
	Charge(n uint64, at Time)

	// EmptyAt returns the instant from which on the history equals a new one, and may be discarded.
	EmptyAt() Time

	// Used returns how many events count at now, rounded up. It may be more than N.
	Used(now Time) uint64

	// With returns the history under another Count. It may share nothing with this one but if the Count is the same.
	With(c Count, now Time) History

	// Inherit raises the history to at least that of o, another one of the same type and Count, which does not change: no event
	// passes at any instant at which it would not under o.
	Inherit(o History, now Time)

	// Size returns the bytes that the history takes.
	Size() int
}
