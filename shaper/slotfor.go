package shaper

import "time"

// SlotFor is what a slot of a limit is for.
type SlotFor uint8

// The values, with their names in configuration.
const (
	PerConnection  SlotFor = iota // "connection": a connection holds it until it ends
	PerTurn                       // "turn": a connection holds it from a question of its client until after the answer
	PerTransaction                // "transaction": the same, and until the end of a transaction that PostgreSQL tells of
)

func (f SlotFor) String() string { return enumName(f, "connection", "turn", "transaction") }

// InTurns reports whether connections hold slots for f only while they are in use.
func (f SlotFor) InTurns() bool { return f != PerConnection }

// MaxTurnGap is the maximum of Limit.TurnGap.
const MaxTurnGap = time.Minute

// validateSlotFor reports what keeps l from counting turns.
func (l *Limit) validateSlotFor(listeners []Listener, bad func(key, format string, args ...any)) {
	switch {
	case l.MaxConnections == 0:
		bad("slot_for", "needs max_connections")
	case l.InPacketPlane():
		bad("slot_for", "unsupported at attachments, where nothing waits for a slot")
	case l.Match.Protocol == UDP:
		bad("slot_for", "unsupported for UDP")
	case l.udpListener(listeners) != nil:
		bad("slot_for", "unsupported for UDP, which listener %q proxies: match protocol \"tcp\"", l.udpListener(listeners).Name)
	case l.NewConnections.N != 0:
		bad("new_connections", "unsupported with slots for turns: use a second limit")
	case l.YieldAfter != 0:
		bad("yield_after", "has no effect with slots for turns: idle connections hold none")
	case l.TurnGap < 0 || l.TurnGap > MaxTurnGap:
		bad("turn_gap", "%v: must be from 0 to %v", l.TurnGap, MaxTurnGap)
	}
}
