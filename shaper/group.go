package shaper

import (
	"fmt"
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/leaky"
)

// MaxGroups is the maximum number of groups of a policy.
const MaxGroups = 64

// Group is a set of sources with a name: those of a prefix, or of an AS.
type Group struct {
	Name   string
	Source []netip.Prefix
	ASN    []uint32
}

// Sources is a set of sources: those of a group, of a prefix, or of an AS. The zero Sources is empty.
type Sources struct {
	Group  []string // names of groups
	Source []netip.Prefix
	ASN    []uint32
}

// Any reports whether s names anything.
func (s *Sources) Any() bool { return len(s.Group)+len(s.Source)+len(s.ASN) > 0 }

// Values are what a limit sets for each bucket, and may set otherwise for some.
type Values struct {
	Rate             uint64
	Packets          Frequency
	Burst            uint64
	BurstPackets     uint64
	MaxConnections   int
	NewConnections   Frequency
	BurstConnections uint64
}

// Values returns those of l.
func (l *Limit) Values() Values {
	return Values{l.Rate, l.Packets, l.Burst, l.BurstPackets, l.MaxConnections, l.NewConnections, l.BurstConnections}
}

// With returns l with other values.
func (l *Limit) With(v *Values) Limit {
	c := *l
	c.Rate, c.Packets, c.Burst, c.BurstPackets = v.Rate, v.Packets, v.Burst, v.BurstPackets
	c.MaxConnections, c.NewConnections, c.BurstConnections = v.MaxConnections, v.NewConnections, v.BurstConnections
	return c
}

// Tier has the values of a limit for the buckets of a group.
type Tier struct {
	Group string
	Values
}

// SourceValues has the values of a limit for the buckets of a prefix.
type SourceValues struct {
	Source netip.Prefix
	Values
}

// HasTiers reports whether some buckets of l have other values than l.
func (l *Limit) HasTiers() bool { return len(l.For)+len(l.BySource) > 0 }

// PrefixOf returns the bits of a source address that are in the key of l, and their name in configuration.
func (l *Limit) PrefixOf(a netip.Addr) (bits int, key string) {
	if a.Is4() {
		return l.IPv4Prefix, "ipv4_prefix"
	}
	return l.IPv6Prefix, "ipv6_prefix"
}

// tier is the values of some buckets of a limit, compiled. The first one of a limit has the limit's own.
type tier struct {
	values          Values
	shape, newConns leaky.Shape
}

// addTier returns the index of the tier of limit i with these values, and adds it if it is new.
func (p *Policy) addTier(i int, v Values, index map[Values]uint32) uint32 {
	n, ok := index[v]
	if !ok {
		n = uint32(len(p.tiers[i]))
		index[v] = n
		l := p.limits[i].With(&v)
		p.tiers[i] = append(p.tiers[i], tier{v, l.shape(), l.newConnsShape()})
	}
	return n
}

// tierOf returns the tier of a key of limit i, which has tiers.
func (p *Policy) tierOf(i int, k *Key) *tier {
	row := p.sources.class(netip.AddrFrom16(k.Address).Unmap()).Row
	return &p.tiers[i][p.sources.tier(row, p.tiered.rank(i))]
}

// ShapeOf returns the shape of the bucket of k, a key of limit i.
func (p *Policy) ShapeOf(i int, k *Key) *leaky.Shape {
	if p.tiered&(1<<i) == 0 {
		return &p.shapes[i]
	}
	return &p.tierOf(i, k).shape
}

// NewConnectionsOf returns the shape of the bucket of new connections of k, a key of limit i, which counts them as packets.
func (p *Policy) NewConnectionsOf(i int, k *Key) *leaky.Shape {
	if p.tiered&(1<<i) == 0 {
		return &p.newConns[i]
	}
	return &p.tierOf(i, k).newConns
}

// LimitFor returns limit i as it is for k, one of its keys. It must not be changed.
func (p *Policy) LimitFor(i int, k *Key) *Limit {
	if p.tiered&(1<<i) == 0 {
		return &p.limits[i]
	}
	l := p.limits[i].With(&p.tierOf(i, k).values)
	return &l
}

// shapeAt returns the shape of the bucket of a flow under limit i, whose key is k and which was routed as r.
func (p *Policy) shapeAt(i int, k *Key, r Route) *leaky.Shape {
	switch {
	case p.tiered&(1<<i) == 0:
		return &p.shapes[i]
	case p.tieredByKey&(1<<i) != 0:
		return &p.tierOf(i, k).shape
	}
	return &p.tiers[i][p.sources.tier(r.row, p.tiered.rank(i))].shape
}

// keyedShapes are the shapes of the buckets of a limit with tiers, by key.
type keyedShapes struct {
	policy   *Policy
	limit    int
	newConns bool // the buckets are those of new connections
}

func (s *keyedShapes) of(k *Key) *leaky.Shape {
	if s.newConns {
		return s.policy.NewConnectionsOf(s.limit, k)
	}
	return s.policy.ShapeOf(s.limit, k)
}

// validateSources reports what is wrong with the sources that l names, and with its tiers.
func (l *Limit) validateSources(groups []Group, bad func(key, format string, args ...any)) {
	find := func(key, name string) *Group {
		i := slices.IndexFunc(groups, func(g Group) bool { return g.Name == name })
		if i < 0 {
			bad(key, "unknown group %q", name)
			return nil
		}
		return &groups[i]
	}
	for _, name := range l.Match.Group {
		find("match.group", name)
	}
	except := func(key string, s *Sources) {
		for _, name := range s.Group {
			find(key+".group", name)
		}
		for _, p := range s.Source {
			if !validSource(p) {
				bad(key+".source", "%v: invalid, or IPv4 in the form of IPv6", p)
			}
		}
	}
	except("except", &l.Except)
	if l.Penalty != nil {
		except("penalty.except", &l.Penalty.Except)
	}
	for i := range l.BySource {
		if p := l.BySource[i].Source; !validSource(p) {
			bad("values", "%v: invalid, or IPv4 in the form of IPv6", p)
		}
	}
	if !l.HasTiers() {
		return
	}
	switch {
	case l.Key&KeySource == 0 || l.Key&KeyConnection != 0:
		bad("for", "needs \"source\" in key, and not \"connection\": each bucket has one value")
	case l.InPacketPlane():
		bad("for", "unsupported for attachments")
	case l.Shared:
		bad("for", "unsupported with shared")
	case l.Adapt != AdaptOff:
		bad("for", "unsupported with adapt")
	}
	check := func(key string, p netip.Prefix) {
		if !validSource(p) {
			return // reported elsewhere
		}
		if bits, name := l.PrefixOf(p.Addr()); p.Bits() > bits {
			bad(key, "%v is longer than %s = %d: a bucket has one value", p, name, bits)
		}
	}
	var seen []string
	for i := range l.For {
		t := &l.For[i]
		key := "for." + t.Group
		if slices.Contains(seen, t.Group) {
			bad(key, "duplicate")
		}
		seen = append(seen, t.Group)
		if g := find(key, t.Group); g != nil {
			for _, p := range g.Source {
				check(key, p)
			}
		}
		if err := l.CheckValues(&t.Values); err != nil {
			bad(key, "%v", err)
		}
	}
	for i := range l.BySource {
		check("values", l.BySource[i].Source)
		if err := l.CheckValues(&l.BySource[i].Values); err != nil {
			bad("values", "%v: %v", l.BySource[i].Source, err)
		}
	}
}

// validSource reports whether p is a prefix in the form in which addresses of sources are.
func validSource(p netip.Prefix) bool { return p.IsValid() && !(p.Addr().Is4In6() && p.Bits() >= 96) }

// CheckValues returns an error if a tier of l cannot have these values.
func (l *Limit) CheckValues(v *Values) (err error) {
	for _, e := range []struct {
		key     string
		is, has bool
	}{
		{"rate", l.Rate != 0, v.Rate != 0},
		{"packets", l.Packets.N != 0, v.Packets.N != 0},
		{"max_connections", l.MaxConnections != 0, v.MaxConnections != 0},
		{"new_connections", l.NewConnections.N != 0, v.NewConnections.N != 0},
	} {
		if e.has && !e.is {
			return fmt.Errorf("%s: has no effect without %s in the limit", e.key, e.key)
		}
		if e.is && !e.has {
			return fmt.Errorf("%s: missing", e.key)
		}
	}
	tiered := l.With(v)
	tiered.validateValues(func(key, format string, args ...any) {
		if err == nil {
			err = fmt.Errorf(key+": "+format, args...)
		}
	})
	return err
}

// validateValues reports what is wrong with the values of l.
func (l *Limit) validateValues(bad func(key, format string, args ...any)) {
	if l.Rate != 0 && (l.Rate < MinRate || l.Rate > MaxRate) {
		bad("rate", "%d bit/s: must be from %d to 1e12", l.Rate, MinRate)
	}
	for _, f := range []struct {
		key  string
		freq Frequency
	}{{"packets", l.Packets}, {"new_connections", l.NewConnections}} {
		if f.freq.N != 0 && (f.freq.Per <= 0 || f.freq.Per > MaxPer) {
			bad(f.key, "%d every %v: period must be from 1ns to %v", f.freq.N, f.freq.Per, MaxPer)
		}
		if f.freq.N > MaxRate {
			bad(f.key, "%d every %v: must be at most 1e12", f.freq.N, f.freq.Per)
		}
	}
	switch {
	case l.BurstConnections == 0:
	case l.NewConnections.N == 0:
		bad("burst_connections", "needs new_connections")
	case l.Shared && l.BurstConnections > 1:
		bad("burst_connections", "unsupported with shared")
	case leaky.NewRate(l.NewConnections.N, l.NewConnections.Per).Cost(l.BurstConnections) > leaky.FromDuration(MaxBurstTime):
		bad("burst_connections", "takes more than %v at the rate", MaxBurstTime)
	}
	if l.MaxConnections < 0 {
		bad("max_connections", "%d: must not be negative", l.MaxConnections)
	}
	if shape, longest := l.shape(), leaky.FromDuration(MaxBurstTime); shape.BytesBurst > longest || shape.PacketsBurst > longest {
		bad("burst", "takes more than %v at the rate", MaxBurstTime)
	}
	if class, percent := l.Unreserved(); class != "" {
		bad("max_connections", "%d: the %d%% reserved for class %q is less than one slot", l.MaxConnections, percent, class)
	}
	l.validateAlgorithm(bad)
}
