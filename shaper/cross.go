package shaper

import (
	"net/netip"
	"slices"

	"shaperd/leaky"
)

const (
	ordinary = 1500 // bytes of an ordinary unit
	part     = 1100 // bytes that fit into a slot of a calendar at least: a sixtieth of a train
)

// cross finds out how the buckets of each limit of attachments are charged, where units are held. A unit is charged for the
// instant at which it leaves. Where all units of a bucket are held by the same other
// buckets they leave in the order in which they came, and one number is enough. Else what
// one limit holds must not hold up what others let through before: the bucket is a
// calendar, where there is one of the limit. A limit with many buckets charges them on
// arrival.
func (p *Policy) cross() {
	p.slots = make([][2]leaky.Slots, len(p.limits))
	p.longest = make([]leaky.Time, len(p.limits))
	for i := range p.paced.All {
		s := &p.shapes[i]
		longest := s.MaxDelay
		for j := range p.paced.All {
			if i == j || !p.limits[i].OfAttachments() || !p.meet(i, j) {
				continue
			}
			longest = max(longest, p.shapes[j].MaxDelay)
			if !p.limits[j].covers(&p.limits[i]) {
				p.crossed |= 1 << i
			}
		}
		p.longest[i] = longest
		if p.crossed&(1<<i) == 0 {
			continue
		}
		if p.limits[i].Key == 0 {
			p.crossed &^= 1 << i
			p.calendars |= 1 << i
		}
		ofBytes, ofPackets := s.Cost(ordinary, 1)
		small, _ := s.Cost(part, 1)
		p.slots[i] = [2]leaky.Slots{
			leaky.NewSlots(ofBytes, small, longest.Add(s.BytesBurst)),
			leaky.NewSlots(ofPackets, ofPackets, longest.Add(s.PacketsBurst)),
		}
	}
}

// meet reports whether a unit may be under limits i and j at once, of which both enforce or
// both observe.
func (p *Policy) meet(i, j int) bool {
	a, b := &p.limits[i], &p.limits[j]
	both := Set(1<<i | 1<<j)
	return a.Observe == b.Observe &&
		slices.ContainsFunc(p.places, func(at site) bool { return at.set&both == both }) &&
		slices.ContainsFunc(p.direction[:], func(d Set) bool { return d&both == both }) &&
		slices.ContainsFunc(p.protocol[:], func(d Set) bool { return d&both == both }) &&
		meet(a.Match.Source, b.Match.Source, netip.Prefix.Overlaps) &&
		meet(a.Match.Destination, b.Match.Destination, netip.Prefix.Overlaps) &&
		meet(a.Match.ASN, b.Match.ASN, func(a, b uint32) bool { return a == b }) &&
		meet(a.Match.Port, b.Match.Port, func(a, b PortRange) bool { return a.First <= b.Last && b.First <= a.Last })
}

// meet reports whether something may be selected by a and by b. Nothing selects all.
func meet[T any](a, b []T, meet func(a, b T) bool) bool {
	return len(a) == 0 || len(b) == 0 || slices.ContainsFunc(a, func(a T) bool {
		return slices.ContainsFunc(b, func(b T) bool { return meet(a, b) })
	})
}

// covers reports whether all units of a bucket of o are in one bucket of l.
func (l *Limit) covers(o *Limit) bool {
	key := o.Key
	if key&KeyConnection != 0 {
		key |= KeySource | KeyPort
	}
	if key&KeySource != 0 {
		key |= KeyASN // a prefix of two systems is rare, and shares what it has then
	}
	m, n := &l.Match, &o.Match
	return l.Key&^key == 0 &&
		(l.Key&o.Key&KeySource == 0 || l.IPv4Prefix <= o.IPv4Prefix && l.IPv6Prefix <= o.IPv6Prefix) &&
		(l.Direction == o.Direction || l.Direction == Both) &&
		(m.Protocol == AnyProtocol || m.Protocol == n.Protocol) &&
		covers(m.Listen, n.Listen, func(a, b string) bool { return a == b }) &&
		covers(m.Attach, n.Attach, func(a, b string) bool { return a == b }) &&
		covers(m.Source, n.Source, contains) && covers(m.Destination, n.Destination, contains) &&
		covers(m.ASN, n.ASN, func(a, b uint32) bool { return a == b }) &&
		covers(m.Port, n.Port, func(a, b PortRange) bool { return a.First <= b.First && b.Last <= a.Last })
}

func contains(a, b netip.Prefix) bool { return a.Bits() <= b.Bits() && a.Overlaps(b) }

// covers reports whether all that b selects a does, by one of its own. Nothing selects all.
func covers[T any](a, b []T, covers func(a, b T) bool) bool {
	if len(a) == 0 || len(b) == 0 {
		return len(a) == 0
	}
	return !slices.ContainsFunc(b, func(b T) bool {
		return !slices.ContainsFunc(a, func(a T) bool { return covers(a, b) })
	})
}

// Calendars returns the limits whose bucket is a calendar: see [leaky.Calendar].
func (p *Policy) Calendars() Set { return p.calendars }

// Crossed returns the limits that charge a unit on arrival, though others may hold it for
// longer: what leaves one of their buckets may exceed its envelope by as much.
func (p *Policy) Crossed() Set { return p.crossed }

// Slots returns how the calendars of limit i, of bytes and of packets, divide time.
func (p *Policy) Slots(i int) *[2]leaky.Slots { return &p.slots[i] }

// Longest returns the longest MaxDelay of limit i and of those that a unit may be under
// beside it: so long it waits at most.
func (p *Policy) Longest(i int) leaky.Time { return p.longest[i] }
