package shaper

import "slices"

// TurnBy is what takes turns at a bucket: all sources of an AS or of a prefix, or each source.
type TurnBy uint8

// What takes turns, from the least to the most.
const (
	TurnSource   TurnBy = iota
	TurnPrefix24        // a /24 of IPv4, a /48 of IPv6
	TurnASN             // all of unknown AS are one
	numTurnBy
)

// MaxTurns is the maximum number of levels of turns.
const MaxTurns = int(numTurnBy)

func (t TurnBy) String() string { return enumName(t, "source", "prefix24", "asn") }

// TurnsBy returns the levels by which those that wait for a bucket of l take turns, the first one first.
func (l *Limit) TurnsBy() []TurnBy {
	if len(l.Turns) == 0 {
		return bySource
	}
	return l.Turns
}

var bySource = []TurnBy{TurnSource}

// takesTurnsBy reports whether a level of l is t.
func (l *Limit) takesTurnsBy(t TurnBy) bool { return slices.Contains(l.Turns, t) }

// validateTurns reports what is wrong with Turns.
func (l *Limit) validateTurns(bad func(key, format string, args ...any)) {
	switch n := len(l.Turns); {
	case n == 0:
	case l.InPacketPlane():
		bad("turns", "unsupported at attachments, where nothing takes turns")
	case l.Scheduling == ScheduleFIFO:
		bad("turns", "unsupported with scheduling = \"fifo\"")
	case l.Turns[0] >= numTurnBy:
		bad("turns", "invalid value %d", l.Turns[0])
	case l.Turns[n-1] != TurnSource || !slices.IsSortedFunc(l.Turns, func(a, b TurnBy) int { return int(b) - int(a) }) || len(slices.Compact(slices.Clone(l.Turns))) != n:
		bad("turns", "must be from the widest to the narrowest, and end with \"source\"")
	}
}
