package shaper

import (
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"sort"
	"strings"

	"shaperd/leaky"
	"shaperd/shaper/asn"
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

// Flow is one connection, or the datagrams between one pair of sockets.
type Flow struct {
	Source      netip.Addr // without a zone; IPv4, not IPv4-mapped IPv6
	Destination netip.Addr // in the same form; of flows at attachments alone
	Port        uint16     // destination port, as the source sees it; 0 when it has none
	Listen      uint16     // index of the listener or attachment
	Protocol    Protocol
	Connection  uint64 // tells flows apart
}

// Route is what a policy says of a flow: the limits it is under in each
// direction, and its source's ASN.
type Route struct {
	ASN            uint32
	ToDownstream   Set
	FromDownstream Set
}

// Limits returns the limits of both directions.
func (r Route) Limits() Set { return r.ToDownstream | r.FromDownstream }

// Policy is an immutable set of compiled limits. Limits are ordered from the
// most to the least specific key; in that order a unit passes them.
//
// Classification is bit-vector matching (Lakshman and Stiliadis, SIGCOMM 1998):
// one lookup for each property of a flow gives the limits that property allows,
// and the answer is the intersection. It costs the same for 1 limit and for 64.
type Policy struct {
	limits       []Limit
	shapes       []leaky.Shape
	newConns     []leaky.Shape // in packets
	states       []*State
	asns         *asn.Table
	sources      addresses
	destinations addresses
	ports        []uint16 // starts of segments
	portSets     []Set
	places       []site
	listeners    []*ListenerState // the first of places
	byListen     map[string]uint16
	byAttach     map[string]uint16
	protocol     [numProtocols]Set
	direction    [2]Set
	paced        Set // limits with a rate or packets; the others have no buckets of bytes
	destined     Set // limits that name destinations
	blocks       Set // limits that refuse all
	always       Set // limits that are enforced in every mode
	calendars    Set // limits whose bucket is a calendar
	crossed      Set // limits that charge on arrival what others may hold for longer
	slots        [][2]leaky.Slots
	longest      []leaky.Time
}

// site is where flows are met: at a listener, at an attachment, or at neither.
type site struct {
	name string // "" is neither
	id   uint16 // marks it in keys; 0 is neither
	set  Set    // the limits of its flows
}

// Compile checks limits and builds a policy of them. listeners and attachments
// name the places where traffic is met. table may be nil; then every ASN is 0.
// With observe no limit is enforced but those with Always.
//
// The error holds a *LimitError for each limit at fault. It is another one when the policies
// of s have had more than some 65,000 listeners and attachments, by name.
func (s *Shaper) Compile(limits []Limit, listeners []Listener, attachments []Attachment, table *asn.Table, observe bool) (*Policy, error) {
	if err := validate(limits, listeners, attachments); err != nil {
		return nil, err
	}
	if err := s.room(listeners, attachments); err != nil {
		return nil, err
	}
	p := &Policy{limits: slices.Clone(limits), asns: table, byListen: map[string]uint16{}, byAttach: map[string]uint16{}}
	slices.SortFunc(p.limits, func(a, b Limit) int {
		return cmp.Or(cmp.Compare(b.specificity(), a.specificity()), cmp.Compare(a.Name, b.Name))
	})
	p.addPlaces(s, listeners, attachments)
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
			p.destined |= bit
		}
		if l.Block {
			p.blocks |= bit
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
		if l.Rate != 0 || l.Packets.N != 0 {
			p.paced |= bit
		}
		p.newConns = append(p.newConns, leaky.Shape{
			Packets:  leaky.NewRate(l.NewConnections.N, l.NewConnections.Per),
			MaxDelay: leaky.FromDuration(l.MaxWait),
		})
		p.states = append(p.states, s.state(l.Name))
	}
	p.sources = buildSources(p.limits, table)
	p.destinations = buildDestinations(p.limits)
	p.buildPorts()
	p.cross()
	return p, nil
}

// addPlaces gives listeners the indexes from 0, what has no listener any more the
// next one, attachments those that follow, and what has no attachment the last.
func (p *Policy) addPlaces(s *Shaper, listeners []Listener, attachments []Attachment) {
	add := func(name string, id uint16, matches func(*Match) bool) {
		at := site{name: name, id: id}
		for i := range p.limits {
			if matches(&p.limits[i].Match) {
				at.set |= 1 << i
			}
		}
		p.places = append(p.places, at)
	}
	for _, l := range listeners {
		state := s.Listener(l.Name)
		p.byListen[l.Name] = uint16(len(p.places))
		p.listeners = append(p.listeners, state)
		add(l.Name, state.ID, func(m *Match) bool { return m.listener(l.Name) })
	}
	add("", 0, func(m *Match) bool { return m.listener("") })
	for _, a := range attachments {
		p.byAttach[a.Name] = uint16(len(p.places))
		add(a.Name, s.Attachment(a.Name), func(m *Match) bool { return slices.Contains(m.Attach, a.Name) })
	}
	add("", 0, func(*Match) bool { return false })
}

// listener reports whether m selects the listener named name.
func (m *Match) listener(name string) bool {
	return len(m.Attach) == 0 && (len(m.Listen) == 0 || slices.Contains(m.Listen, name))
}

// specificity orders limits: a narrower key has a higher one, and of equal keys a
// narrower match.
func (l *Limit) specificity() int {
	n := 0
	if l.Key&KeyConnection != 0 {
		n += 1 << 14
	}
	if l.Key&KeySource != 0 {
		n += 1<<12 + (l.IPv4Prefix+l.IPv6Prefix)<<3
	}
	for _, f := range []Fields{KeyPort, KeyASN, KeyListen, KeyAttach} {
		if l.Key&f != 0 {
			n += 1 << 8
		}
	}
	m := &l.Match
	for _, narrows := range []bool{
		m.Protocol != AnyProtocol, len(m.Listen) > 0, len(m.Attach) > 0,
		len(m.Source) > 0, len(m.Destination) > 0, len(m.ASN) > 0, len(m.Port) > 0,
	} {
		if narrows {
			n++
		}
	}
	return n
}

func (p *Policy) buildPorts() {
	starts := []int{0}
	for i := range p.limits {
		for _, r := range p.limits[i].Match.Port {
			starts = append(starts, int(r.First), int(r.Last)+1)
		}
	}
	slices.Sort(starts)
	for _, start := range slices.Compact(starts) {
		if start > 65535 {
			break
		}
		var set Set
		for i := range p.limits {
			m := &p.limits[i].Match
			if len(m.Port) == 0 || slices.ContainsFunc(m.Port, func(r PortRange) bool {
				return int(r.First) <= start && start <= int(r.Last)
			}) {
				set |= 1 << i
			}
		}
		if n := len(p.portSets); n > 0 && p.portSets[n-1] == set {
			continue
		}
		p.ports = append(p.ports, uint16(start))
		p.portSets = append(p.portSets, set)
	}
}

// Len returns the number of limits.
func (p *Policy) Len() int { return len(p.limits) }

// Find returns which limit has a name, or -1.
func (p *Policy) Find(name string) int {
	return slices.IndexFunc(p.limits, func(l Limit) bool { return l.Name == name })
}

// Limit returns limit i, which must not be changed.
func (p *Policy) Limit(i int) *Limit { return &p.limits[i] }

// Shape returns what a bucket of limit i is held to.
func (p *Policy) Shape(i int) *leaky.Shape { return &p.shapes[i] }

// NewConnections returns what new connections of limit i are held to, as
// packets.
func (p *Policy) NewConnections(i int) *leaky.Shape { return &p.newConns[i] }

// State returns what limit i has counted.
func (p *Policy) State(i int) *State { return p.states[i] }

// ListenIndex returns the index of the listener named name. A flow may outlive
// its listener: it is then under the limits that name none, by an index of their
// own.
func (p *Policy) ListenIndex(name string) uint16 {
	if i, ok := p.byListen[name]; ok {
		return i
	}
	return uint16(len(p.listeners))
}

// AttachIndex returns the index of the attachment named name. Flows of one that is
// not the policy's are under no limit, by an index of their own.
func (p *Policy) AttachIndex(name string) uint16 {
	if i, ok := p.byAttach[name]; ok {
		return i
	}
	return uint16(len(p.places) - 1)
}

// Observed returns the limits of set that pace or block traffic, but only observe.
func (p *Policy) Observed(set Set) Set {
	var observed Set
	for i := range set.All {
		if p.limits[i].Observe && (p.paced|p.blocks)&(1<<i) != 0 {
			observed |= 1 << i
		}
	}
	return observed
}

// Blocks returns the limits that refuse all they match, those that only observe too.
func (p *Policy) Blocks() Set { return p.blocks }

// Always returns the limits that refuse all they match in every mode.
func (p *Policy) Always() Set { return p.always }

// Blocked returns the limit of set that refuses all, and is enforced, or -1.
func (p *Policy) Blocked(set Set) int {
	for i := range (set & p.blocks).All {
		if !p.limits[i].Observe {
			return i
		}
	}
	return -1
}

// Route classifies f.
func (p *Policy) Route(f *Flow) Route {
	c := p.sources.lookup(f.Source)
	set := c.Set & p.portSet(f.Port) & p.places[f.Listen].set & p.protocol[f.Protocol]
	if set&p.destined != 0 {
		set &= p.destinations.lookup(f.Destination).Set
	}
	return Route{
		ASN:            c.ASN,
		ToDownstream:   set & p.direction[ToDownstream],
		FromDownstream: set & p.direction[FromDownstream],
	}
}

// ASName returns the name of an autonomous system, as [asn.Table.Name] has it, or "" when
// there is no table or no name in it.
func (p *Policy) ASName(asn uint32) string { return p.asns.Name(asn) }

// ASN returns the autonomous system of a source, whether a limit asks for it or not; 0
// when it is not known.
func (p *Policy) ASN(source netip.Addr) uint32 {
	if p.asns == nil {
		return 0
	}
	return p.asns.Lookup(source)
}

func (p *Policy) portSet(port uint16) Set {
	if len(p.ports) == 1 {
		return p.portSets[0]
	}
	i := sort.Search(len(p.ports), func(i int) bool { return p.ports[i] > port })
	return p.portSets[i-1]
}

// Key identifies a bucket: a limit and the properties of a flow that its key
// names, the others zero. Keys may be compared; they stay the same over reloads.
type Key struct {
	Source     [16]byte // masked; IPv4 as IPv4-mapped
	Connection uint64
	Limit      uint32 // State.ID of the limit
	ASN        uint32
	Port       uint16
	Listen     uint16 // ID of the listener, or of the attachment
}

// Key returns the key of f, routed as r, under limit i.
func (p *Policy) Key(i int, f *Flow, r Route) Key {
	l := &p.limits[i]
	k := Key{Limit: p.states[i].ID}
	if l.Key&KeySource != 0 {
		k.Source = maskSource(f.Source, l.IPv4Prefix, l.IPv6Prefix)
	}
	if l.Key&KeyASN != 0 {
		k.ASN = r.ASN
	}
	if l.Key&KeyPort != 0 {
		k.Port = f.Port
	}
	if l.Key&(KeyListen|KeyAttach) != 0 {
		k.Listen = p.places[f.Listen].id
	}
	if l.Key&KeyConnection != 0 {
		k.Connection = f.Connection
	}
	return k
}

// Listeners returns the states of the policy's listeners, by index.
func (p *Policy) Listeners() []*ListenerState { return p.listeners }

func maskSource(a netip.Addr, bits4, bits6 int) [16]byte {
	b := a.As16()
	bits := bits6
	if a.Is4() {
		bits = 96 + bits4
	}
	if bits < 128 {
		i := bits / 8
		b[i] &= ^byte(0xff >> (bits % 8))
		clear(b[i+1:])
	}
	return b
}

// SourcePrefix returns the source that k stands for under limit i, or false when
// sources are not part of the key.
func (p *Policy) SourcePrefix(i int, k Key) (netip.Prefix, bool) {
	l := &p.limits[i]
	if l.Key&KeySource == 0 {
		return netip.Prefix{}, false
	}
	if a := netip.AddrFrom16(k.Source); a.Is4In6() {
		return netip.PrefixFrom(a.Unmap(), l.IPv4Prefix), true
	}
	return netip.PrefixFrom(netip.AddrFrom16(k.Source), l.IPv6Prefix), true
}

// Describe writes the key of f under limit i for people.
func (p *Policy) Describe(i int, f *Flow, r Route) string {
	return p.DescribeKey(i, p.Key(i, f, r))
}

// DescribeKey writes a key of limit i for people. Connection 0 is "this" one.
func (p *Policy) DescribeKey(i int, k Key) string {
	l := &p.limits[i]
	if l.Key == 0 {
		return "all"
	}
	var parts []string
	add := func(field Fields, format string, arg any) {
		if l.Key&field != 0 {
			parts = append(parts, fmt.Sprintf(format, arg))
		}
	}
	prefix, _ := p.SourcePrefix(i, k)
	add(KeySource, "source %v", prefix)
	add(KeyASN, "asn %d", k.ASN)
	add(KeyPort, "port %d", k.Port)
	at := p.placeName(l, k.Listen)
	add(KeyListen, "listen %s", at)
	add(KeyAttach, "attach %s", at)
	switch {
	case l.Key&KeyConnection == 0:
	case k.Connection == 0:
		parts = append(parts, "this connection")
	default:
		add(KeyConnection, "connection %d", k.Connection)
	}
	return strings.Join(parts, ", ")
}

// placeName returns the name of the listener or attachment that marks keys of l with id.
func (p *Policy) placeName(l *Limit, id uint16) string {
	for i, at := range p.places {
		if at.id == id && i < len(p.listeners) != l.OfAttachments() {
			return cmp.Or(at.name, "none")
		}
	}
	return "none"
}
