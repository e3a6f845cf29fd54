package shaper

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"shaperd.dev/shaperd/shaper/asn"
	"shaperd.dev/shaperd/shaper/segments"
)

// world generates random policies and flows from few addresses and ports, so that
// prefixes nest and flows are at their edges.
type world struct {
	*rand.Rand
	sources     []netip.Addr
	ports       []uint16
	listeners   []Listener
	attachments []Attachment
	groups      []Group
}

func newWorld(rnd *rand.Rand) *world {
	w := &world{Rand: rnd, ports: []uint16{0, 1, 2, 53, 65534, 65535}}
	for _, s := range []string{"0.0.0.0", "255.255.255.255", "10.0.0.0", "10.255.255.255", "127.255.255.255", "128.0.0.0", "::", "::1", "2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"} {
		w.sources = append(w.sources, netip.MustParseAddr(s))
	}
	for range 8 {
		w.sources = append(w.sources, ipv4Addr(rnd.Uint32()), ipv4Addr(10<<24|rnd.Uint32()&0xffff), w.address6())
		w.ports = append(w.ports, uint16(rnd.Uint32()))
	}
	for i := range 1 + rnd.IntN(5) {
		w.listeners = append(w.listeners, Listener{Name: fmt.Sprint("listener", i), Addresses: []Address{{Protocol: UDP}, {Protocol: [...]Protocol{TCP, UDP}[i%2]}}})
	}
	for i := range 1 + rnd.IntN(3) {
		w.attachments = append(w.attachments, Attachment{Name: fmt.Sprint("attachment", i)})
	}
	return w
}

// addGroups makes groups for limits to name.
func (w *world) addGroups() {
	for i := range w.IntN(5) {
		w.groups = append(w.groups, Group{
			Name:   fmt.Sprint("group", i),
			Source: some(w, 5, w.prefix), ASN: some(w, 3, func() uint32 { return 1 + w.Uint32N(12) }),
		})
	}
}

// originNames returns the names of the listener and of the attachment of f, "" if none.
func (w *world) originNames(f *Flow) (listener, attachment string) {
	i := int(f.Origin)
	if i < len(w.listeners) {
		listener = w.listeners[i].Name
	}
	if i -= len(w.listeners) + 1; i >= 0 && i < len(w.attachments) {
		attachment = w.attachments[i].Name
	}
	return listener, attachment
}

func (w *world) address6() netip.Addr {
	b := [16]byte{0x20, 0x01, 0x0d, 0xb8}
	for i := 4 + w.IntN(12); i < 16; i++ {
		b[i] = byte(w.Uint32())
	}
	return netip.AddrFrom16(b)
}

// source draws an address in a prefix of a policy, at its edges, or next to them.
func (w *world) source() netip.Addr {
	a := w.sources[w.IntN(len(w.sources))]
	switch w.IntN(8) {
	case 0:
		a = ipv4Addr(w.Uint32())
	case 1:
		a = w.address6()
	case 2, 3:
		p := w.prefix()
		a = p.Addr()
		if w.IntN(2) == 0 {
			a = segments.LastAddr(p)
		}
	}
	switch w.IntN(4) {
	case 0:
		if n := a.Next(); n.IsValid() {
			a = n
		}
	case 1:
		if n := a.Prev(); n.IsValid() {
			a = n
		}
	}
	return a.Unmap()
}

func (w *world) prefix() netip.Prefix {
	a := w.sources[w.IntN(len(w.sources))]
	bits := w.IntN(a.BitLen() + 1)
	switch w.IntN(4) {
	case 0:
		bits = a.BitLen()
	case 1:
		bits = bits / 8 * 8
	}
	p, _ := a.Prefix(bits)
	return p
}

func (w *world) port() uint16 {
	p := w.ports[w.IntN(len(w.ports))]
	switch w.IntN(4) {
	case 0:
		return p + 1
	case 1:
		return p - 1
	}
	return p
}

// some draws 0 to n values, and at least half of the time none.
func some[T any](w *world, n int, draw func() T) (values []T) {
	if w.IntN(2) == 0 {
		return nil
	}
	for range w.IntN(n + 1) {
		values = append(values, draw())
	}
	return values
}

func (w *world) limit(i int) Limit {
	l := Limit{
		Name: fmt.Sprint("limit", i), Rate: 8e6,
		Match: Match{
			Listen:   some(w, 2, func() string { return w.listeners[w.IntN(len(w.listeners))].Name }),
			Protocol: Protocol(w.IntN(int(ICMP))),
			Source:   some(w, 5, w.prefix),
			ASN:      some(w, 4, func() uint32 { return w.Uint32N(12) }),
			Country:  some(w, 1, func() asn.Country { return asn.Country(w.IntN(4)) }),
			Group:    some(w, 2, w.group),
			Port: some(w, 4, func() PortRange {
				a, b := w.port(), w.port()
				if w.IntN(3) == 0 {
					b = a
				}
				return PortRange{min(a, b), max(a, b)}
			}),
		},
		Key:        Fields(w.IntN(1 << len(fieldNames))),
		IPv4Prefix: 1 + w.IntN(32), IPv6Prefix: 1 + w.IntN(128),
		Direction: Direction(w.IntN(3)),
	}
	if w.IntN(3) == 0 {
		l.Except = Sources{some(w, 2, w.group), some(w, 3, w.prefix), some(w, 3, func() uint32 { return 1 + w.Uint32N(12) })}
	}
	l.Except.Group = slices.DeleteFunc(l.Except.Group, func(name string) bool { return name == "" })
	l.Match.Group = slices.DeleteFunc(l.Match.Group, func(name string) bool { return name == "" })
	l.Key &^= KeyAttach
	if l.Key&KeyTLV != 0 {
		l.TLV = uint8(1 + w.IntN(3))
	}
	if l.Key&keyAddress == keyAddress {
		l.Key &^= []Fields{KeySource, KeyDestination}[w.IntN(2)]
	}
	if w.IntN(2) == 0 {
		if w.IntN(2) == 0 {
			w.addTiers(&l)
		}
		return l
	}
	l.Match.Attach = []string{w.attachments[w.IntN(len(w.attachments))].Name}
	if w.IntN(2) == 0 {
		l.Match.Attach = append(l.Match.Attach, w.attachments[w.IntN(len(w.attachments))].Name)
	}
	l.Match.Listen, l.Direction = nil, ToDownstream
	l.Match.Destination = some(w, 5, w.prefix)
	if w.IntN(3) == 0 {
		l.Match.DSCP = some(w, 3, func() DSCP { return DSCP(w.IntN(3)) })
		l.Match.Mark = some(w, 3, func() Mark {
			mask := []uint32{AnyMark, 1, 0xf0, 0xff}[w.IntN(4)]
			return Mark{w.mark() & mask, mask}
		})
	}
	if w.IntN(4) == 0 {
		l.Match.Cgroup = some(w, 2, func() string { return cgroups[1+w.IntN(len(cgroups)-1)] })
	}
	if w.IntN(4) == 0 {
		l.Match.Protocol, l.Match.Port = ICMP, nil
	}
	l.Key &^= KeyListen | KeyDownstream | KeyTLV
	l.TLV = 0
	l.Key |= Fields(w.IntN(2)) * KeyAttach
	return l
}

var cgroups = []string{"", "/", "/a", "/a/b", "/a/b/c", "/ab"}

func (w *world) mark() uint32 { return []uint32{0, 1, 0x10, 0x11, AnyMark - 1, AnyMark}[w.IntN(6)] }

// group draws the name of a group, or "" without groups.
func (w *world) group() string {
	if len(w.groups) == 0 {
		return ""
	}
	return w.groups[w.IntN(len(w.groups))].Name
}

// addTiers gives l, of the proxy plane, values for some groups and prefixes.
func (w *world) addTiers(l *Limit) {
	l.Key = l.Key&^(KeyConnection|KeyDestination) | KeySource
	values := func() Values { return Values{Rate: 8e6 * (1 + w.Uint64N(3))} }
	for _, g := range w.groups {
		fits := !slices.ContainsFunc(g.Source, func(p netip.Prefix) bool {
			return p.Addr().Is4() && p.Bits() > l.IPv4Prefix || p.Addr().Is6() && p.Bits() > l.IPv6Prefix
		})
		if fits && w.IntN(2) == 0 {
			l.For = append(l.For, Tier{g.Name, values()})
		}
	}
	for range w.IntN(6) {
		p := w.prefix()
		if p.Addr().Is4() && p.Bits() <= l.IPv4Prefix || p.Addr().Is6() && !p.Addr().Is4In6() && p.Bits() <= l.IPv6Prefix {
			l.BySource = append(l.BySource, SourceValues{p, values()})
		}
	}
}

func (w *world) limits(n int) (limits []Limit) {
	for i := range n {
		limits = append(limits, w.limit(i))
	}
	return limits
}

// table cuts prefixes at each other's edges and gives the pieces AS numbers.
func (w *world) table(t testing.TB) *asn.Table {
	var ranges []asn.Range
	var countries []asn.CountryRange
	for _, is4 := range []bool{true, false} {
		var edges []netip.Addr
		for range 20 {
			if p := w.prefix(); p.Addr().Is4() == is4 {
				edges = append(edges, p.Addr(), segments.LastAddr(p))
			}
		}
		edges = slices.DeleteFunc(edges, netip.Addr.Is4In6) // ::/80 ends in one
		slices.SortFunc(edges, netip.Addr.Compare)
		edges = slices.Compact(edges)
		for i := 0; i+1 < len(edges); i += 2 {
			ranges = append(ranges, asn.Range{First: edges[i], Last: edges[i+1], ASN: 1 + w.Uint32N(10)})
			if w.IntN(2) == 0 {
				countries = append(countries, asn.CountryRange{First: edges[i], Last: edges[i+1], Country: 1 + asn.Country(w.IntN(3))})
			}
		}
	}
	table, err := asn.New(ranges, countries...)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func (w *world) flow() *Flow {
	f := &Flow{
		Source: w.source(), Destination: w.source(), Port: w.port(), Origin: uint16(w.IntN(len(w.listeners) + 1)),
		Protocol: TCP + Protocol(w.IntN(2)), Downstream: uint16(w.IntN(3)), Connection: w.Uint64(),
	}
	for range w.IntN(3) {
		f.TLVs = append(f.TLVs, TLV{uint8(1 + w.IntN(3)), 1 + w.Uint64N(3)})
	}
	if w.IntN(2) == 0 {
		f.Origin = uint16(len(w.listeners) + 1 + w.IntN(len(w.attachments)+1))
		f.Protocol, f.DSCP, f.Mark, f.Cgroup = Protocol(w.IntN(int(numProtocols))), DSCP(w.IntN(3)), w.mark(), cgroups[w.IntN(len(cgroups))]
	}
	return f
}
