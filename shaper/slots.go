package shaper

import "shaperd.dev/shaperd/leaky"

// SlotPool divides a shared maximum of connections in flight, in slots, among hosts. Each host has own
// slots, which it never lends. The rest is a pool, lent in parts of which all hosts together have
// [Whole], and one more each at most. The zero value has no slots.
//
// While all are lent, Most may change at each host at a time of its own: with a lower one a host has no more slots for its
// parts, and needs no fewer parts for its slots. So all hosts together never have more than the highest.
type SlotPool struct {
	Most  int  // slots of all hosts
	Hosts int  // that may exist
	Lent  bool // all slots are lent, and no host has own ones
}

// Own returns how many slots a host always has: half of its share.
func (p SlotPool) Own() int {
	if p.Hosts == 0 || p.Lent {
		return 0
	}
	return p.Most / (2 * p.Hosts)
}

// size returns how many slots are lent: all others, but for those that parts beyond Whole would be.
func (p SlotPool) size() int64 {
	n := p.Most - p.Hosts*p.Own()
	if beyond := n * p.Hosts; beyond >= Whole {
		n -= beyond/Whole + 1
	}
	return int64(n)
}

// rounding is added to products of parts and slots. It is the most with which all hosts together never
// have a slot too many, and lets equal shares of the parts be equal shares of the slots.
func (p SlotPool) rounding() int64 { return max(0, (Whole-1)/int64(p.Hosts)-p.size()) }

// Slots returns how many slots a host with parts of the pool has.
func (p SlotPool) Slots(parts uint32) int {
	if p.Hosts == 0 {
		return 0
	}
	return p.Own() + int((int64(parts)*p.size()+p.rounding())/Whole)
}

// Parts returns the least parts of the pool with which a host has n slots, at most Whole.
func (p SlotPool) Parts(n int) uint32 {
	n -= p.Own()
	if p.Hosts == 0 || n <= 0 {
		return 0
	}
	parts := (int64(n)*Whole - p.rounding() + p.size() - 1) / p.size()
	return uint32(min(parts, Whole))
}

// Slots returns how many of the slots of p this host may use at now, with parts of the pool. They do
// not end with the lease: connections in flight cannot be taken back, so other hosts count on them.
func (l *Lease) Slots(p SlotPool, parts uint32, now leaky.Time) int {
	switch {
	case now < l.AloneAt:
	case l.Alone == 0:
		return 0
	case l.Alone == Whole && l.Hosts > 0:
		return p.Most
	}
	return p.Slots(parts)
}
