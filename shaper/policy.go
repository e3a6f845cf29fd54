package shaper

import (
	"cmp"
	"errors"
	"math/bits"
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper/asn"
)

// Set is a set of the limits of one policy, limit i in bit i.
type Set uint64

// All yields the limits of s, the most specific first.
func (s Set) All(yield func(int) bool) {
	for ; s != 0; s &= s - 1 {
		if !yield(bits.TrailingZeros64(uint64(s))) {
			return
		}
	}
}

// Len returns the number of limits in s.
func (s Set) Len() int { return bits.OnesCount64(uint64(s)) }

// rank returns the number of limits in s before limit i.
func (s Set) rank(i int) int { return (s & (1<<i - 1)).Len() }

// Country is [asn.Country].
type Country = asn.Country

// Flow is one connection, or the datagrams between one pair of sockets.
type Flow struct {
	Source      netip.Addr // without a zone; IPv4, not IPv4-mapped IPv6
	Destination netip.Addr // in the form of Source; as the source sees it
	Port        uint16     // destination port, as the source sees it; 0 if the protocol has none
	Origin      uint16     // index of the listener or attachment
	Protocol    Protocol
	DSCP        DSCP   // packet plane only
	Mark        uint32 // packet plane only
	Downstream  uint16 // DownstreamID, or 0 while none is chosen; proxy plane only
	Cgroup      string // control group of the process that sends, "" if it is not local; packet plane only
	TLVs        []TLV  // up to MaxTLVs, of the PROXY header; proxy plane only
	Connection  uint64 // unique ID
}

// Route is the classification of a flow: its limits in each direction, and the ASN of
// its source.
type Route struct {
	ASN            uint32
	Country        asn.Country // 0 unless a limit has to do with countries
	ToDownstream   Set
	FromDownstream Set
	row            uint32 // of tiers and classes, see addresses
}

// Limits returns the limits of both directions.
func (r Route) Limits() Set { return r.ToDownstream | r.FromDownstream }

// Policy is an immutable set of compiled limits. Limits are ordered from the
// most to the least specific key, and a unit passes them in that order.
//
// Classification is bit-vector matching (Lakshman and Stiliadis, SIGCOMM 1998):
// one lookup for each field of a flow returns the limits that match that field,
// and the result is the intersection. It costs the same for 1 limit and for 64.
type Policy struct {
	limits           []Limit
	shapes           []leaky.Shape
	newConns         []leaky.Shape // in packets
	states           []*LimitState
	downstreams      *names
	tlvNames         *tlvNames
	asns             *asn.Table
	sources          addresses
	destinations     addresses
	ports            []uint16 // starts of segments
	portSets         []Set
	portClasses      []Set // classes, by segment
	dscp             [NumDSCP]Set
	marks            []MarkMask // by mask
	origins          []origin
	listeners        []*ListenerState // states of the first origins
	listenerIndex    map[string]uint16
	attachmentIndex  map[string]uint16
	protocol         [numProtocols]Set
	direction        [2]Set
	paced            Set       // limits with Rate or Packets; the others have no bucket of units
	withDestination  Set       // limits that match destinations
	withDSCP         Set       // limits that match DSCPs
	withMark         Set       // limits that match marks
	withCgroup       Set       // limits that match control groups
	blocks           Set       // limits that refuse all
	shared           Set       // limits that hosts share
	quotas           Set       // limits with a quota
	perTurn          Set       // limits whose slots are for turns
	sheds            Set       // limits that refuse while this host is short of something
	always           Set       // limits that are enforced in every mode
	calendars        Set       // limits whose bucket is a calendar
	chargedOnArrival Set       // limits that charge on arrival, see ChargedOnArrival
	tiered           Set       // limits with tiers
	tieredByKey      Set       // of these, those whose tiers a flow's route does not tell
	penalties        Set       // limits with a penalty
	penalized        addresses // sources, by the penalties that do not except them
	tiers            [MaxLimits][]tier
	slots            [][2]leaky.Slots
	maxTotalDelay    []leaky.Time
	classes          []TrafficClass // the default class last
	classStates      []*ClassState
	classProtocol    [numProtocols]Set
	classAnySource   Set // classes that match any source
}

// origin is the listener or the attachment of flows, or neither.
type origin struct {
	name string // "" if neither
	id   uint16 // ID in keys; 0 if neither
	set  Set    // limits of its flows

	classes Set // of its flows
}

// CompileRules validates rules and compiles them to a policy.
//
// The error joins a *LimitError for each mistake in a limit, and a *ClassError for each in a class. It also fails if the policies
// of s have had more than some 65,000 distinct names of listeners and attachments.
func (s *Shaper) CompileRules(r Rules) (*Policy, error) {
	limits, listeners, attachments, table, observe, groups := r.Limits, r.Listeners, r.Attachments, r.ASNs, r.Observe, r.Groups
	if err := errors.Join(validate(&r), errors.Join(r.validateClasses()...)); err != nil {
		return nil, err
	}
	if err := s.checkOrigins(listeners, attachments); err != nil {
		return nil, err
	}
	p := &Policy{limits: slices.Clone(limits), asns: table, downstreams: s.downstreams, tlvNames: s.tlvNames, listenerIndex: map[string]uint16{}, attachmentIndex: map[string]uint16{}}
	slices.SortFunc(p.limits, func(a, b Limit) int {
		return cmp.Or(cmp.Compare(b.specificity(), a.specificity()), cmp.Compare(a.Name, b.Name))
	})
	p.addClasses(s, r.Classes)
	p.addOrigins(s, listeners, attachments)
	for i := range p.limits {
		l := &p.limits[i]
		l.Observe = (l.Observe || observe) && !l.Always
		bit := Set(1) << i
		for protocol := range p.protocol {
			if l.Match.Protocol == AnyProtocol || l.Match.Protocol == Protocol(protocol) {
				p.protocol[protocol] |= bit
			}
		}
		if len(l.Match.Destination) > 0 {
			p.withDestination |= bit
		}
		if l.Block {
			p.blocks |= bit
		}
		if l.Shared {
			p.shared |= bit
		}
		if l.Quota.Amount > 0 {
			p.quotas |= bit
		}
		if l.SlotFor.InTurns() {
			p.perTurn |= bit
		}
		if l.Shed.Any() {
			p.sheds |= bit
		}
		if l.Always {
			p.always |= bit
		}
		if l.Direction != FromDownstream {
			p.direction[ToDownstream] |= bit
		}
		if l.Direction != ToDownstream {
			p.direction[FromDownstream] |= bit
		}
		p.shapes = append(p.shapes, l.shape())
		if l.Paces() {
			p.paced |= bit
		}
		p.newConns = append(p.newConns, l.newConnsShape())
		p.states = append(p.states, s.state(l.Name))
	}
	if err := p.buildSources(groups, table); err != nil {
		err.Limit = slices.IndexFunc(limits, func(l Limit) bool { return l.Name == err.Name })
		return nil, err
	}
	p.buildPenalties(groups, table)
	p.destinations = buildDestinations(p.limits)
	p.buildPorts()
	p.buildMarks()
	p.planCharging()
	return p, nil
}

// addOrigins assigns indexes: listeners from 0, then flows whose listener is gone, then
// attachments, then flows whose attachment is gone.
func (p *Policy) addOrigins(s *Shaper, listeners []Listener, attachments []Attachment) {
	add := func(name string, id uint16, matches func(*Match) bool) {
		o := origin{name: name, id: id}
		for i := range p.limits {
			if matches(&p.limits[i].Match) {
				o.set |= 1 << i
			}
		}
		for c := range p.classes {
			if matches(&p.classes[c].Match) {
				o.classes |= 1 << c
			}
		}
		p.origins = append(p.origins, o)
	}
	for _, l := range listeners {
		state := s.Listener(l.Name)
		p.listenerIndex[l.Name] = uint16(len(p.origins))
		p.listeners = append(p.listeners, state)
		for _, d := range l.Downstream {
			s.DownstreamID(d.Name())
		}
		add(l.Name, state.ID, func(m *Match) bool { return m.matchesListener(l.Name) })
	}
	add("", 0, func(m *Match) bool { return m.matchesListener("") })
	for _, a := range attachments {
		p.attachmentIndex[a.Name] = uint16(len(p.origins))
		add(a.Name, s.AttachmentID(a.Name), func(m *Match) bool { return slices.Contains(m.Attach, a.Name) })
	}
	add("", 0, func(*Match) bool { return false })
}

// matchesListener reports whether m matches the listener named name.
func (m *Match) matchesListener(name string) bool {
	return len(m.Attach) == 0 && (len(m.Listen) == 0 || slices.Contains(m.Listen, name))
}

// specificity orders limits: it is higher for a narrower key, and among equal keys for a
// narrower match.
func (l *Limit) specificity() int {
	n := 0
	if l.Key&KeyConnection != 0 {
		n += 1 << 14
	}
	if l.Key&KeySource != 0 {
		n += 1 << 12
	}
	if l.Key&KeyDestination != 0 {
		n += 1 << 11
	}
	if l.Key&keyAddress != 0 {
		n += (l.IPv4Prefix + l.IPv6Prefix) << 3
	}
	for _, f := range []Fields{KeyPort, KeyASN, KeyListen, KeyAttach, KeyDownstream, KeyCountry, KeyTLV} {
		if l.Key&f != 0 {
			n += 1 << 8
		}
	}
	m := &l.Match
	for _, narrows := range []bool{
		m.Protocol != AnyProtocol, len(m.Listen) > 0, len(m.Attach) > 0,
		len(m.Source) > 0, len(m.Destination) > 0, len(m.ASN) > 0, len(m.Country) > 0, len(m.Group) > 0, len(m.Port) > 0, len(m.DSCP) > 0, len(m.Mark) > 0, len(m.Cgroup) > 0,
	} {
		if narrows {
			n++
		}
	}
	return n
}

// Len returns the number of limits.
func (p *Policy) Len() int { return len(p.limits) }

// Find returns the index of the limit named name, or -1.
func (p *Policy) Find(name string) int {
	return slices.IndexFunc(p.limits, func(l Limit) bool { return l.Name == name })
}

// Limit returns limit i, which must not be changed.
func (p *Policy) Limit(i int) *Limit { return &p.limits[i] }

// Shape returns the shape of the buckets of limit i.
func (p *Policy) Shape(i int) *leaky.Shape { return &p.shapes[i] }

// NewConnections returns the shape of the buckets of new connections of limit i, which
// counts them as packets.
func (p *Policy) NewConnections(i int) *leaky.Shape { return &p.newConns[i] }

// State returns the state of limit i.
func (p *Policy) State(i int) *LimitState { return p.states[i] }

// ListenerIndex returns the index of the listener named name. If there is none, as a flow
// may outlive its listener, it returns an index with the limits that match any listener.
func (p *Policy) ListenerIndex(name string) uint16 {
	if i, ok := p.listenerIndex[name]; ok {
		return i
	}
	return uint16(len(p.listeners))
}

// AttachmentIndex returns the index of the attachment named name. If there is none it
// returns an index without limits.
func (p *Policy) AttachmentIndex(name string) uint16 {
	if i, ok := p.attachmentIndex[name]; ok {
		return i
	}
	return uint16(len(p.origins) - 1)
}

// Observed returns the limits of set that pace or block traffic and only observe.
func (p *Policy) Observed(set Set) Set {
	var observed Set
	for i := range set.All {
		if p.limits[i].Observe && (p.paced|p.blocks)&(1<<i) != 0 {
			observed |= 1 << i
		}
	}
	return observed
}

// Blocks returns the limits that block, including those that only observe.
func (p *Policy) Blocks() Set { return p.blocks }

// Shared returns the limits that hosts share.
func (p *Policy) Shared() Set { return p.shared }

// Quotas returns the limits with a quota.
func (p *Policy) Quotas() Set { return p.quotas }

// Sheds returns the limits that refuse while this host is short of something.
func (p *Policy) Sheds() Set { return p.sheds }

// PerTurn returns the limits whose slots are for turns.
func (p *Policy) PerTurn() Set { return p.perTurn }

// Always returns the limits that block in every mode.
func (p *Policy) Always() Set { return p.always }

// EnforcedBlock returns the first limit of set that blocks and is enforced, or -1.
func (p *Policy) EnforcedBlock(set Set) int {
	for i := range (set & p.blocks).All {
		if !p.limits[i].Observe {
			return i
		}
	}
	return -1
}

// Route classifies f.
func (p *Policy) Route(f *Flow) Route {
	c := p.sources.class(f.Source)
	set := p.narrow(c.Set, f)
	return Route{
		ASN:            c.ASN,
		Country:        c.Country,
		ToDownstream:   set & p.direction[ToDownstream],
		FromDownstream: set & p.direction[FromDownstream],
		row:            c.Row,
	}
}

// narrow returns the limits of set that match f apart from its source.
func (p *Policy) narrow(set Set, f *Flow) Set {
	set &= p.portSet(f.Port) & p.origins[f.Origin].set & p.protocol[f.Protocol]
	if set&p.withDestination != 0 {
		set &= p.destinations.class(f.Destination).Set
	}
	if set&p.withDSCP != 0 {
		set &= p.DSCPSet(f.DSCP)
	}
	if set&p.withMark != 0 {
		set &= p.markSet(f.Mark)
	}
	if set&p.withCgroup != 0 {
		set = p.matchCgroup(set, f.Cgroup)
	}
	return set
}

// Exempt returns the limits that except the source of f, and match it otherwise.
func (p *Policy) Exempt(f *Flow) Set { return p.narrow(p.sources.class(f.Source).excepted, f) }

// ASName returns the name of an AS, see [asn.Table.Name], or "" if there is no table or
// no name in it.
func (p *Policy) ASName(asn uint32) string { return p.asns.Name(asn) }

// ASN returns the AS number of a source, even if no limit uses it; 0 if it is unknown.
func (p *Policy) ASN(source netip.Addr) uint32 {
	if p.asns == nil {
		return 0
	}
	return p.asns.Lookup(source)
}

// Country returns the country of a source, even if no limit uses it; 0 if it is unknown.
func (p *Policy) Country(source netip.Addr) asn.Country { return p.asns.Country(source) }

// Listeners returns the states of the policy's listeners, by index.
func (p *Policy) Listeners() []*ListenerState { return p.listeners }

// AtListener returns the limits that match the listener named name, whatever else they match, and the Origin in keys of its flows. If
// there is none, these are the limits that match any listener, and 0, as [Policy.ListenerIndex] has it.
func (p *Policy) AtListener(name string) (limits Set, origin uint16) {
	o := &p.origins[p.ListenerIndex(name)]
	return o.set, o.id
}
