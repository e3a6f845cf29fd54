package shaper

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"shaperd.dev/shaperd/shaper/asn"
)

// Penalty blocks a source for a while that a limit has refused often. A source is a prefix, as in the key of the limit.
type Penalty struct {
	After  Frequency     // refusals: N within Per, which begins with the first of them
	Block  time.Duration // for how long
	Factor int           // by which each block is longer than the one before
	Most   time.Duration // longest block; after as long without another one a source begins at Block again
	Except Sources       // that are neither counted nor blocked

	Observe bool // count, and say whom it would block, and block none
}

// Bounds of a Penalty.
const (
	MaxPenaltyRefusals = 1_000_000
	MaxPenaltyPeriod   = time.Hour
	MinPenaltyBlock    = time.Second
	MaxPenaltyBlock    = 366 * 24 * time.Hour
	MaxPenaltyFactor   = 100
)

// BlockFor returns for how long a source is blocked that was blocked so often before.
func (y *Penalty) BlockFor(before int) time.Duration {
	d := y.Block
	for range before {
		if y.Factor == 1 || d >= y.Most {
			break
		}
		d *= time.Duration(y.Factor) // at most 100 times 366 days
	}
	return min(d, y.Most)
}

// PenaltyConflict returns why l cannot have a penalty, "" if it can: its refusals must be the doing of their source.
func (l *Limit) PenaltyConflict(listeners []Listener) string {
	udp := l.udpListener(listeners)
	switch {
	case l.InPacketPlane():
		return "is for attachments, where sources may be forged: a penalty needs a limit of listeners"
	case l.Match.Protocol == UDP:
		return "is for UDP, where sources may be forged: only TCP connections count"
	case udp != nil: // which would use up the bucket of a source
		return fmt.Sprintf("is for UDP too, which listener %q proxies, where sources may be forged: match protocol \"tcp\"", udp.Name)
	case !l.CountsConnections():
		return "has no max_connections or new_connections, and so refuses no connections"
	case l.Key&KeySource == 0:
		return "has no \"source\" in key: other sources could cause its refusals"
	case l.Key&KeyConnection != 0:
		return "has \"connection\" in key, and so refuses no connections"
	case l.Shared:
		return "is shared: a host that is alone may refuse every source"
	case l.SlotFor.InTurns():
		return "has slots for turns, for which open connections wait"
	}
	return ""
}

// validatePenalty reports what is wrong with the penalty of l.
func (l *Limit) validatePenalty(listeners []Listener, bad func(key, format string, args ...any)) {
	y := l.Penalty
	if why := l.PenaltyConflict(listeners); why != "" {
		bad("penalty", "the limit %s", why)
	}
	if y.After.N < 1 || y.After.N > MaxPenaltyRefusals || y.After.Per <= 0 || y.After.Per > MaxPenaltyPeriod {
		bad("penalty", "%d refusals in %v: must be 1 to %d in at most %v", y.After.N, y.After.Per, MaxPenaltyRefusals, MaxPenaltyPeriod)
	}
	if y.Block < MinPenaltyBlock || y.Block > y.Most || y.Most > MaxPenaltyBlock {
		bad("penalty", "blocks of %v to %v: must be from %v to %v", y.Block, y.Most, MinPenaltyBlock, MaxPenaltyBlock)
	}
	if y.Factor < 1 || y.Factor > MaxPenaltyFactor {
		bad("penalty", "factor %d: must be from 1 to %d", y.Factor, MaxPenaltyFactor)
	}
}

// buildPenalties classifies sources by the penalties that except them.
func (p *Policy) buildPenalties(groups []Group, table *asn.Table) {
	stand := Policy{limits: make([]Limit, len(p.limits))} // limits that apply to the sources of a limit that its penalty does not except
	for i := range p.limits {
		l, s := &p.limits[i], &stand.limits[i]
		if y := l.Penalty; y != nil {
			p.penalties |= 1 << i
			s.Match = Match{Source: l.Match.Source, ASN: l.Match.ASN, Group: l.Match.Group}
			s.Except = Sources{
				Group:  slices.Concat(l.Except.Group, y.Except.Group),
				Source: slices.Concat(l.Except.Source, y.Except.Source),
				ASN:    slices.Concat(l.Except.ASN, y.Except.ASN),
			}
		}
	}
	if p.penalties != 0 {
		_ = stand.buildSources(groups, table) // without values of sources there is no conflict
		p.penalized = stand.sources
	}
}

// Penalized returns how many sources the penalty of limit i blocks, and how many it would block if nothing observed.
func (p *Policy) Penalized(i int) (blocked, would int64) {
	l, state := &p.limits[i], p.states[i]
	blocked, would = state.Penalties.Active.Load(), state.ObservedPenalties.Active.Load()
	if l.Observe || l.Penalty.Observe {
		return 0, blocked + would
	}
	return blocked, would
}

// Penalties returns the limits with a penalty.
func (p *Policy) Penalties() Set { return p.penalties }

// Penalizes returns the limits of which the penalty does not except a source.
func (p *Policy) Penalizes(source netip.Addr) Set {
	if p.penalties == 0 {
		return 0
	}
	return p.penalties & p.penalized.class(source).Set
}
