package shaper

import (
	"net/netip"
	"reflect"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper/asn"
)

const (
	ordinaryUnit = 1500 // bytes
	smallUnit    = 1100 // bytes that a calendar slot holds at least: a sixtieth of a train
)

// planCharging decides how the limits of attachments charge their buckets when units are
// delayed. A unit is charged for its departure time. If all units of a bucket are delayed
// by the same other buckets they leave in order of arrival, and a bucket of one number is
// enough. Otherwise units that one limit delays must not hold up units that leave before
// them: the bucket is a calendar if the limit has only one. A limit with many buckets
// charges them on arrival, and so does one that hosts share.
func (p *Policy) planCharging() {
	p.slots = make([][2]leaky.Slots, len(p.limits))
	p.maxTotalDelay = make([]leaky.Time, len(p.limits))
	for i := range p.paced.All {
		s := &p.shapes[i]
		longest := s.MaxDelay
		for j := range p.paced.All {
			if i == j || !p.limits[i].InPacketPlane() || !p.overlap(i, j) {
				continue
			}
			longest = max(longest, p.shapes[j].MaxDelay)
			if !p.limits[j].covers(&p.limits[i]) {
				p.chargedOnArrival |= 1 << i
			}
		}
		p.maxTotalDelay[i] = longest
		if p.chargedOnArrival&(1<<i) == 0 {
			continue
		}
		if p.limits[i].Key == 0 && !p.limits[i].Shared {
			p.chargedOnArrival &^= 1 << i
			p.calendars |= 1 << i
		}
		byteCost, packetCost := s.Cost(ordinaryUnit, 1)
		small, _ := s.Cost(smallUnit, 1)
		p.slots[i] = [2]leaky.Slots{
			leaky.NewSlots(byteCost, small, longest.Add(s.BytesBurst)),
			leaky.NewSlots(packetCost, packetCost, longest.Add(s.PacketsBurst)),
		}
	}
}

// overlap reports whether a unit may be under both limits i and j, and both enforce or both
// observe.
func (p *Policy) overlap(i, j int) bool {
	a, b := &p.limits[i], &p.limits[j]
	both := Set(1<<i | 1<<j)
	return a.Observe == b.Observe &&
		slices.ContainsFunc(p.origins, func(o origin) bool { return o.set&both == both }) &&
		slices.ContainsFunc(p.direction[:], func(d Set) bool { return d&both == both }) &&
		slices.ContainsFunc(p.protocol[:], func(d Set) bool { return d&both == both }) &&
		overlaps(a.Match.Source, b.Match.Source, netip.Prefix.Overlaps) &&
		overlaps(a.Match.Destination, b.Match.Destination, netip.Prefix.Overlaps) &&
		overlaps(a.Match.ASN, b.Match.ASN, func(a, b uint32) bool { return a == b }) &&
		overlaps(a.Match.Country, b.Match.Country, func(a, b asn.Country) bool { return a == b }) &&
		overlaps(a.Match.Port, b.Match.Port, func(a, b PortRange) bool { return a.First <= b.Last && b.First <= a.Last }) &&
		overlaps(a.Match.DSCP, b.Match.DSCP, func(a, b DSCP) bool { return a == b }) &&
		overlaps(a.Match.Mark, b.Match.Mark, Mark.overlaps) &&
		overlaps(a.Match.Cgroup, b.Match.Cgroup, func(a, b string) bool { return inCgroup(a, b) || inCgroup(b, a) })
}

// overlaps reports whether a value may match both a and b. An empty list matches all.
func overlaps[T any](a, b []T, overlap func(a, b T) bool) bool {
	return len(a) == 0 || len(b) == 0 || slices.ContainsFunc(a, func(a T) bool {
		return slices.ContainsFunc(b, func(b T) bool { return overlap(a, b) })
	})
}

// covers reports whether all units of a bucket of o are in one bucket of l.
func (l *Limit) covers(o *Limit) bool {
	key := o.Key
	if key&KeyConnection != 0 {
		key |= KeySource | KeyPort | KeyDestination
	}
	if key&KeySource != 0 && (key&KeyConnection != 0 || o.IPv4Prefix >= 24 && o.IPv6Prefix >= 48) {
		key |= KeyASN | KeyCountry // what is announced is no longer: a prefix of two AS is rare, and shares a bucket then
	}
	m, n := &l.Match, &o.Match
	return l.Key&^key == 0 &&
		(l.Key&o.Key&keyAddress == 0 || l.IPv4Prefix <= o.IPv4Prefix && l.IPv6Prefix <= o.IPv6Prefix) &&
		(l.Direction == o.Direction || l.Direction == Both) &&
		(m.Protocol == AnyProtocol || m.Protocol == n.Protocol) &&
		covers(m.Listen, n.Listen, func(a, b string) bool { return a == b }) &&
		covers(m.Attach, n.Attach, func(a, b string) bool { return a == b }) &&
		covers(m.Source, n.Source, containsPrefix) && covers(m.Destination, n.Destination, containsPrefix) &&
		covers(m.ASN, n.ASN, func(a, b uint32) bool { return a == b }) &&
		covers(m.Country, n.Country, func(a, b asn.Country) bool { return a == b }) &&
		covers(m.Group, n.Group, func(a, b string) bool { return a == b }) &&
		(!l.Except.Any() || reflect.DeepEqual(l.Except, o.Except)) &&
		covers(m.DSCP, n.DSCP, func(a, b DSCP) bool { return a == b }) && covers(m.Mark, n.Mark, Mark.covers) && covers(m.Cgroup, n.Cgroup, inCgroup) &&
		covers(m.Port, n.Port, func(a, b PortRange) bool { return a.First <= b.First && b.Last <= a.Last })
}

func containsPrefix(a, b netip.Prefix) bool { return a.Bits() <= b.Bits() && a.Overlaps(b) }

// covers reports whether a matches all that b does, each value of b by one value of a. An
// empty list matches all.
func covers[T any](a, b []T, covers func(a, b T) bool) bool {
	if len(a) == 0 || len(b) == 0 {
		return len(a) == 0
	}
	return !slices.ContainsFunc(b, func(b T) bool {
		return !slices.ContainsFunc(a, func(a T) bool { return covers(a, b) })
	})
}

// Calendars returns the limits whose bucket is a [leaky.Calendar].
func (p *Policy) Calendars() Set { return p.calendars }

// ChargedOnArrival returns the limits that charge a unit on arrival although other limits
// may delay it longer. Their buckets may exceed their envelopes by that delay.
func (p *Policy) ChargedOnArrival() Set { return p.chargedOnArrival }

// Slots returns the time slots of the calendars of limit i, of bytes and of packets.
func (p *Policy) Slots(i int) *[2]leaky.Slots { return &p.slots[i] }

// MaxTotalDelay returns the longest MaxDelay of limit i and of all limits that a unit may
// be under at the same time. No unit under limit i waits longer.
func (p *Policy) MaxTotalDelay(i int) leaky.Time { return p.maxTotalDelay[i] }
