package cluster

import (
	"maps"
	"slices"
)

// Clone returns a copy of l, to which tests return as a store does that has lost what was written
// last.
func (l *Ledger) Clone() *Ledger {
	if l.state == nil {
		return &Ledger{Run: l.Run}
	}
	s := *l.state
	s.members, s.buckets, s.gone = maps.Clone(s.members), maps.Clone(s.buckets), maps.Clone(s.gone)
	for name, m := range s.members {
		c := *m
		c.marked = maps.Clone(m.marked)
		s.members[name] = &c
	}
	for key, b := range s.buckets {
		c := *b
		c.holders = maps.Clone(b.holders)
		for host, h := range c.holders {
			holder := *h
			c.holders[host] = &holder
		}
		s.buckets[key] = &c
	}
	log := &s.log
	log.hot, log.cold = slices.Clone(log.hot), slices.Clone(log.cold)
	log.hotVersion, log.coldVersion = maps.Clone(log.hotVersion), maps.Clone(log.coldVersion)
	return &Ledger{Run: l.Run, state: &s}
}
