// Owner: the loop's thread.

package conn

import (
	"net/netip"

	"shaperd.dev/shaperd/shaper"
)

// memberKey identifies what takes turns in a queue or at a gate: a source, or all sources of a prefix or of an AS, of one class.
// Flows of different classes are of different members, whatever their sources are.
type memberKey struct {
	class *shaper.ClassState // nil in a FIFO, where all flows are of one member
	by    uint32             // kinds of the levels down to this one
	asn   uint32             // where a level is by AS
	addr  netip.Addr         // the source, or the first address of its prefix; invalid for an AS
}

// wholeClass is memberKey.by of the member that a class with a floor is in a queue, above all others of the class.
const wholeClass = 1<<4 - 1

// members are the members of a flow, from the first level to the last.
type members struct {
	keys [1 + shaper.MaxTurns]memberKey
	n    int
}

func (m *members) all() []memberKey { return m.keys[:m.n] }

// last is the member that a flow is of itself. It tells the others.
func (m *members) last() memberKey { return m.keys[m.n-1] }

// unverifiedSource is the source that unverified flows count as, a multicast address: no flow has it. The unspecified one is the /64 of ::1.
var unverifiedSource = netip.MustParseAddr("ff00::")

// membersOf returns the members of a flow of a source at the buckets of l. Unverified flows, whose sources may be forged, are of one
// member in each class, whatever the levels are.
func membersOf(l *shaper.Limit, class *shaper.ClassState, source netip.Addr, asn uint32, unverified bool) (m members) {
	m.add(memberKey{class: class}, l, source, asn, unverified)
	return m
}

// add adds the members below k.
func (m *members) add(k memberKey, l *shaper.Limit, source netip.Addr, asn uint32, unverified bool) {
	if unverified {
		k.addr = unverifiedSource
		m.keys[m.n] = k
		m.n++
		return
	}
	for _, by := range l.TurnsBy() {
		k.by = k.by<<4 | uint32(by+1)
		switch by {
		case shaper.TurnASN:
			k.asn = asn
		case shaper.TurnPrefix24:
			k.addr = prefix24(source)
		case shaper.TurnSource:
			k.addr = sourceKey(source)
		}
		m.keys[m.n] = k
		m.n++
	}
}

// precedence is the class of a connection or flow, and its priority under the current policy.
type precedence struct {
	class    *shaper.ClassState
	priority int
}

// name is the name of the class, or "" before a connection has one.
func (st precedence) name() string {
	if st.class == nil {
		return ""
	}
	return st.class.Name
}

// precedenceOf returns the precedence of f, routed as r under the current policy.
func (a *admission) precedenceOf(f *shaper.Flow, r shaper.Route, unverified bool) precedence {
	c := a.policy.ClassOf(f, r, unverified)
	return precedence{a.policy.ClassState(c), a.policy.Class(c).Priority}
}

// counterBits are the bits of a ticket that count. Those above are less for a higher priority.
const counterBits = 56

// nextTicket issues a ticket: later than all others of a priority, and earlier than all of lower ones.
func (a *admission) nextTicket(priority int) uint64 {
	return uint64(shaper.MaxPriority-priority)<<counterBits | a.lastTicket.Add(1)
}

// lastTicket is later than all that nextTicket issues for a priority.
func lastTicket(priority int) uint64 {
	return uint64(shaper.MaxPriority-priority+1)<<counterBits - 1
}

// priorityOf returns the priority for which a ticket was issued.
func priorityOf(ticket uint64) int { return shaper.MaxPriority - int(ticket>>counterBits) }

// sourceKey is the source for fairness: the IPv4 address, or the IPv6 /64, the least that one
// subscriber has.
func sourceKey(a netip.Addr) netip.Addr {
	if a.Is4() {
		return a
	}
	return netip.PrefixFrom(a, 64).Masked().Addr()
}

// prefix24 is the first address of the /24 of an IPv4 source, or of the /48 of one of IPv6, the most that one site has.
func prefix24(a netip.Addr) netip.Addr {
	bits := 48
	if a.Is4() {
		bits = 24
	}
	return netip.PrefixFrom(a, bits).Masked().Addr()
}
