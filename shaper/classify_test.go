package shaper

import (
	"errors"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper/asn"
	"shaperd.dev/shaperd/shaper/segments"
)

// naiveRoute compares every field of every limit with the flow.
func (w *world) naiveRoute(p *Policy, table *asn.Table, f *Flow) (r Route, exempt Set) {
	listener, attachment := w.originNames(f)
	r.ASN, r.Country = w.asn(p, table, f.Source), w.country(p, table, f.Source)
	for i := range p.Len() {
		l := p.Limit(i)
		m := &l.Match
		switch {
		case (len(m.Attach) > 0) != (int(f.Origin) > len(w.listeners)),
			len(m.Listen) > 0 && !slices.Contains(m.Listen, listener),
			len(m.Attach) > 0 && !slices.Contains(m.Attach, attachment),
			m.Protocol != AnyProtocol && m.Protocol != f.Protocol,
			len(m.Source) > 0 && !slices.ContainsFunc(m.Source, func(p netip.Prefix) bool { return p.Contains(f.Source) }),
			len(m.Destination) > 0 && !slices.ContainsFunc(m.Destination, func(p netip.Prefix) bool { return p.Contains(f.Destination) }),
			len(m.ASN) > 0 && !slices.Contains(m.ASN, r.ASN),
			len(m.Country) > 0 && !slices.Contains(m.Country, r.Country),
			len(m.Group) > 0 && !w.inGroups(m.Group, f.Source, r.ASN),
			len(m.Port) > 0 && !slices.ContainsFunc(m.Port, func(r PortRange) bool { return r.First <= f.Port && f.Port <= r.Last }),
			len(m.DSCP) > 0 && !slices.Contains(m.DSCP, f.DSCP),
			len(m.Mark) > 0 && !slices.ContainsFunc(m.Mark, func(m Mark) bool { return f.Mark&m.Mask == m.Value }),
			len(m.Cgroup) > 0 && !slices.ContainsFunc(m.Cgroup, func(group string) bool {
				return f.Cgroup != "" && strings.HasPrefix(f.Cgroup+"/", strings.TrimSuffix(group, "/")+"/")
			}):
			continue
		case w.inGroups(l.Except.Group, f.Source, r.ASN), slices.Contains(l.Except.ASN, r.ASN),
			slices.ContainsFunc(l.Except.Source, func(p netip.Prefix) bool { return p.Contains(f.Source) }):
			exempt |= 1 << i
			continue
		}
		if l.Direction == ToDownstream || l.Direction == Both {
			r.ToDownstream |= 1 << i
		}
		if l.Direction == FromDownstream || l.Direction == Both {
			r.FromDownstream |= 1 << i
		}
	}
	return r, exempt
}

// asn returns the AS of a source, or 0 if nothing in p depends on it.
func (w *world) asn(p *Policy, table *asn.Table, source netip.Addr) uint32 {
	used := func(names []string) bool {
		return slices.ContainsFunc(w.groups, func(g Group) bool { return len(g.ASN) > 0 && slices.Contains(names, g.Name) })
	}
	for i := range p.Len() {
		l := p.Limit(i)
		if len(l.Match.ASN)+len(l.Except.ASN) > 0 || l.Key&KeyASN != 0 || used(l.Match.Group) || used(l.Except.Group) ||
			slices.ContainsFunc(l.For, func(t Tier) bool { return used([]string{t.Group}) }) {
			return table.Lookup(source)
		}
	}
	return 0
}

// country returns the country of a source, or 0 if nothing in p depends on it.
func (w *world) country(p *Policy, table *asn.Table, source netip.Addr) asn.Country {
	for i := range p.Len() {
		if l := p.Limit(i); len(l.Match.Country) > 0 || l.Key&KeyCountry != 0 {
			return table.Country(source)
		}
	}
	return 0
}

// inGroups reports whether a source is in one of some groups.
func (w *world) inGroups(names []string, source netip.Addr, asn uint32) bool {
	return slices.ContainsFunc(w.groups, func(g Group) bool {
		return slices.Contains(names, g.Name) && (slices.Contains(g.ASN, asn) || slices.ContainsFunc(g.Source, func(p netip.Prefix) bool { return p.Contains(source) }))
	})
}

// naiveValues looks at all tiers of limit i for the longest prefix of the bucket of f.
func (w *world) naiveValues(p *Policy, table *asn.Table, i int, f *Flow) Values {
	l := p.Limit(i)
	bits := l.IPv6Prefix
	if f.Source.Is4() {
		bits = l.IPv4Prefix
	}
	masked, _ := f.Source.Prefix(bits)
	bucket, values, longest := masked.Addr(), l.Values(), -1
	for _, t := range l.For {
		for _, g := range w.groups {
			if g.Name != t.Group {
				continue
			}
			if longest < 0 && slices.Contains(g.ASN, w.asn(p, table, bucket)) {
				values = t.Values
			}
			for _, p := range g.Source {
				if p.Contains(bucket) && p.Bits() > longest {
					values, longest = t.Values, p.Bits()
				}
			}
		}
	}
	for _, v := range l.BySource {
		if v.Source.Contains(bucket) && v.Source.Bits() >= longest {
			values, longest = v.Values, v.Source.Bits()
		}
	}
	return values
}

func TestRouteAgainstNaive(t *testing.T) {
	rnd := testutil.Rand(t)
	policies, flows := 500, 250
	if shortRun() {
		policies = 50
	}
	var matched, missed, known, orphans, destined, excepted, tiered, collided int
	for n := range policies {
		w := newWorld(rnd)
		var table *asn.Table
		if n%4 != 0 {
			table = w.table(t)
		}
		w.addGroups()
		limits := w.limits(1 + rnd.IntN(MaxLimits))
		p, err := New(100).Compile(limits, w.listeners, w.attachments, table, false, w.groups...)
		for at := (*LimitError)(nil); errors.As(err, &at) && at.Key == "for"; collided++ { // two groups have the same prefix
			limits[at.Limit].For = limits[at.Limit].For[1:]
			p, err = New(100).Compile(limits, w.listeners, w.attachments, table, false, w.groups...)
		}
		if err != nil {
			t.Fatal(err)
		}
		for range flows {
			f := w.flow()
			got := p.Route(f)
			want, exempt := w.naiveRoute(p, table, f)
			if p.Exempt(f) != exempt {
				t.Fatalf("flow %+v: exempt from %b, want %b", *f, p.Exempt(f), exempt)
			}
			excepted += exempt.Len()
			for i := range got.Limits().All {
				key := p.Key(i, f, got)
				values := p.LimitFor(i, &key).Values()
				if want := w.naiveValues(p, table, i, f); values != want {
					t.Fatalf("flow %+v, %+v\n%+v: %s", *f, p.Limit(i), w.groups, cmp.Diff(want, values))
				}
				if shape := p.shapeAt(i, &key, got); *shape != *p.ShapeOf(i, &key) {
					t.Fatalf("flow %+v, %+v: a route gives another shape than a key", *f, p.Limit(i))
				}
				if values != p.Limit(i).Values() {
					tiered++
				}
			}
			if got.row = 0; got != want {
				t.Fatalf("flow %+v: %s", *f, cmp.Diff(want, got, cmpopts.IgnoreUnexported(Route{})))
			}
			matched += len(slices.Collect(got.Limits().All))
			missed += p.Len() - len(slices.Collect(got.Limits().All))
			if got.ASN != 0 {
				known++
			}
			if int(f.Origin) == len(w.listeners) && got.Limits() != 0 {
				orphans++
			}
			if got.Limits()&p.withDestination != 0 {
				destined++
			}
		}
	}
	if matched == 0 || missed == 0 || known == 0 || orphans == 0 || destined == 0 || excepted == 0 || tiered == 0 || collided == 0 && !shortRun() { // few collide
		t.Errorf("the test exercised nothing: %d matches, %d misses, %d with an ASN, %d without a listener, %d with a destination, %d with exceptions, %d in tiers, %d collisions",
			matched, missed, known, orphans, destined, excepted, tiered, collided)
	}
}

// A table of minIndexed or more segments is searched with an index.
func TestRouteInLargeTable(t *testing.T) {
	w := newWorld(testutil.Rand(t))
	var ranges []asn.Range
	for at := uint64(w.Uint32N(100)); at < 1<<32; {
		length := uint64(1) << w.IntN(20)
		last := min(at+length-1, 1<<32-1)
		ranges = append(ranges, asn.Range{First: ipv4Addr(uint32(at)), Last: ipv4Addr(uint32(last)), ASN: 1 + w.Uint32N(12)})
		at = last + 1
		if w.IntN(2) == 0 {
			at += uint64(w.Uint32N(1 << 18))
		}
	}
	table, err := asn.New(ranges)
	if err != nil {
		t.Fatal(err)
	}
	w.addGroups()
	limits := w.limits(MaxLimits)
	limits[0].Key |= KeyASN
	for i := range limits {
		limits[i].For = nil // groups may have prefixes in common
	}
	p, err := New(100).Compile(limits, w.listeners, w.attachments, table, false, w.groups...)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for range p.Sources4() {
		n++
	}
	if n < 4096 {
		t.Fatalf("only %d IPv4 segments", n)
	}
	for n := range 60000 {
		f := w.flow()
		if r := ranges[w.IntN(len(ranges))]; n%2 == 0 {
			f.Source = []netip.Addr{r.First, r.Last, r.First.Prev(), r.Last.Next()}[w.IntN(4)]
		}
		if !f.Source.IsValid() {
			continue
		}
		got := p.Route(f)
		want, _ := w.naiveRoute(p, table, f)
		if got.row = 0; got != want {
			t.Fatalf("flow %+v: %s", *f, cmp.Diff(want, got, cmpopts.IgnoreUnexported(Route{})))
		}
	}
}

func TestRouteTable(t *testing.T) {
	listeners := []Listener{{Name: "a", Addresses: []Address{{Protocol: TCP}}}, {Name: "b", Addresses: []Address{{Protocol: UDP}}}}
	prefixes := func(s ...string) (p []netip.Prefix) {
		for _, s := range s {
			p = append(p, netip.MustParsePrefix(s))
		}
		return p
	}
	for _, tt := range []struct {
		name   string
		match  Match
		source string
		port   uint16
		listen uint16
		want   bool
	}{
		{"empty match", Match{}, "192.0.2.1", 0, 0, true},
		{"empty match, no listener", Match{}, "192.0.2.1", 0, 2, true},
		{"all of IPv4", Match{Source: prefixes("0.0.0.0/0")}, "255.255.255.255", 1, 0, true},
		{"all of IPv4 is not IPv6", Match{Source: prefixes("0.0.0.0/0")}, "::1", 1, 0, false},
		{"all of IPv6 is not IPv4", Match{Source: prefixes("::/0")}, "192.0.2.1", 1, 0, false},
		{"all of IPv6", Match{Source: prefixes("::/0")}, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 1, 0, true},
		{"host", Match{Source: prefixes("192.0.2.1/32")}, "192.0.2.1", 1, 0, true},
		{"next to a host", Match{Source: prefixes("192.0.2.1/32")}, "192.0.2.2", 1, 0, false},
		{"unmasked prefix", Match{Source: prefixes("192.0.2.99/24")}, "192.0.2.1", 1, 0, true},
		{"IPv4-mapped prefix", Match{Source: prefixes("::ffff:192.0.2.0/120")}, "192.0.2.1", 1, 0, true},
		{"outside a nested prefix", Match{Source: prefixes("10.0.0.0/8", "10.1.0.0/16")}, "10.2.0.0", 1, 0, true},
		{"the same prefix twice", Match{Source: prefixes("10.0.0.0/8", "10.0.0.0/8")}, "11.0.0.0", 1, 0, false},
		{"port 0", Match{Port: []PortRange{{0, 0}}}, "192.0.2.1", 0, 0, true},
		{"port 65535", Match{Port: []PortRange{{65535, 65535}}}, "192.0.2.1", 65535, 0, true},
		{"above a range", Match{Port: []PortRange{{1, 65534}}}, "192.0.2.1", 65535, 0, false},
		{"adjacent ranges", Match{Port: []PortRange{{1, 5}, {6, 9}}}, "192.0.2.1", 6, 0, true},
		{"listener", Match{Listen: []string{"b"}}, "192.0.2.1", 1, 1, true},
		{"other listener", Match{Listen: []string{"b"}}, "192.0.2.1", 1, 0, false},
		{"named listener, no listener", Match{Listen: []string{"b"}}, "192.0.2.1", 1, 2, false},
		{"unknown ASN", Match{ASN: []uint32{0}}, "192.0.2.1", 1, 0, true},
		{"ASN without a table", Match{ASN: []uint32{64500}}, "192.0.2.1", 1, 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := mustCompile(t, New(1), []Limit{{Name: "l", Rate: 8, Match: tt.match}}, listeners)
			f := Flow{Source: netip.MustParseAddr(tt.source), Port: tt.port, Origin: tt.listen, Protocol: TCP}
			if got := p.Route(&f).ToDownstream == 1; got != tt.want {
				t.Errorf("matches = %v, want %v", got, tt.want)
			}
		})
	}
}

func TestEmptyPolicy(t *testing.T) {
	p := New(1).Policy()
	for _, source := range []string{"192.0.2.1", "2001:db8::1"} {
		f := Flow{Source: netip.MustParseAddr(source), Origin: p.ListenerIndex("gone"), Protocol: TCP}
		if got := p.Route(&f); got != (Route{}) {
			t.Errorf("%s: %+v, want no limits", source, got)
		}
	}
}

func TestRouteAtAttachments(t *testing.T) {
	uplink := []string{"uplink"}
	to := func(s string) []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix(s)} }
	listeners := []Listener{{Name: "a", Addresses: []Address{{Protocol: TCP}}}}
	for _, tt := range []struct {
		name        string
		match       Match
		at          func(*Policy) uint16
		protocol    Protocol
		destination string
		want        bool
	}{
		{"attachment", Match{Attach: uplink}, attachedTo("uplink"), TCP, "10.0.0.1", true},
		{"the rest of IP", Match{Attach: uplink}, attachedTo("uplink"), AnyProtocol, "10.0.0.1", true},
		{"the rest of IP is not TCP", Match{Attach: uplink, Protocol: TCP}, attachedTo("uplink"), AnyProtocol, "10.0.0.1", false},
		{"ICMP", Match{Attach: uplink, Protocol: ICMP}, attachedTo("uplink"), ICMP, "10.0.0.1", true},
		{"ICMP is not UDP", Match{Attach: uplink, Protocol: ICMP}, attachedTo("uplink"), UDP, "10.0.0.1", false},
		{"other attachment", Match{Attach: uplink}, attachedTo("downlink"), TCP, "10.0.0.1", false},
		{"attachment that is gone", Match{Attach: uplink}, attachedTo("gone"), TCP, "10.0.0.1", false},
		{"limit of listeners at an attachment", Match{}, attachedTo("uplink"), TCP, "10.0.0.1", false},
		{"limit of attachments at a listener", Match{Attach: uplink}, func(p *Policy) uint16 { return p.ListenerIndex("a") }, TCP, "", false},
		{"limit of attachments, no listener", Match{Attach: uplink}, func(p *Policy) uint16 { return p.ListenerIndex("gone") }, TCP, "", false},
		{"destination", Match{Attach: uplink, Destination: to("10.0.0.0/31")}, attachedTo("uplink"), TCP, "10.0.0.1", true},
		{"next to the destination", Match{Attach: uplink, Destination: to("10.0.0.0/31")}, attachedTo("uplink"), TCP, "10.0.0.2", false},
		{"IPv6 destination", Match{Attach: uplink, Destination: to("fd00::/8")}, attachedTo("uplink"), TCP, "fd00::1", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := mustCompile(t, New(1), []Limit{{Name: "l", Rate: 8, Match: tt.match}}, listeners, Attachment{Name: "uplink"}, Attachment{Name: "downlink"})
			f := Flow{Source: netip.MustParseAddr("192.0.2.1"), Port: 1, Origin: tt.at(p), Protocol: tt.protocol}
			if tt.destination != "" {
				f.Destination = netip.MustParseAddr(tt.destination)
			}
			if got := p.Route(&f).ToDownstream == 1; got != tt.want {
				t.Errorf("matches = %v, want %v", got, tt.want)
			}
		})
	}
}

func attachedTo(name string) func(*Policy) uint16 {
	return func(p *Policy) uint16 { return p.AttachmentIndex(name) }
}

// The segment tables for a plane that classifies by itself agree with Route.
func TestPolicy_SegmentTables(t *testing.T) {
	rnd := testutil.Rand(t)
	policies := 200
	if shortRun() {
		policies = 20
	}
	for range policies {
		w := newWorld(rnd)
		p, err := New(1).Compile(w.limits(1+rnd.IntN(20)), w.listeners, w.attachments, w.table(t), false)
		if err != nil {
			t.Fatal(err)
		}
		for range 50 {
			f := w.flow()
			c, destinations := Class{}, Set(0)
			if f.Source.Is4() {
				c = segment(t, p.Sources4(), uint32(segments.ToAddr4(f.Source)), number)
			} else {
				c = segment(t, p.Sources6(), segments.ToAddr6(f.Source), segments.Addr6.Compare)
			}
			if f.Destination.Is4() {
				destinations = segment(t, p.Destinations4(), uint32(segments.ToAddr4(f.Destination)), number)
			} else {
				destinations = segment(t, p.Destinations6(), segments.ToAddr6(f.Destination), segments.Addr6.Compare)
			}
			if p.withDestination == 0 && destinations != 1<<p.Len()-1 {
				t.Fatalf("without limits by destination, destinations have the set %b", destinations)
			}
			ports := segment(t, p.Ports(), f.Port, func(a, b uint16) int { return int(a) - int(b) })
			byMark, masks := p.Marks()
			marks := ^byMark
			for i := range masks {
				marks |= segment(t, masks[i].All(), f.Mark&masks[i].Mask, number)
			}
			country := Country(0)
			if f.Source.Is4() {
				country = segment(t, p.Countries4(), uint32(segments.ToAddr4(f.Source)), number)
			} else {
				country = segment(t, p.Countries6(), segments.ToAddr6(f.Source), segments.Addr6.Compare)
			}
			if r := p.Route(f); country != r.Country {
				t.Fatalf("flow %+v: tables have country %v, Route %v", *f, country, r.Country)
			}
			groups := ^p.withCgroup
			for _, group := range p.Cgroups() {
				if all, matched := p.CgroupSet(group); all != p.withCgroup {
					t.Fatalf("limits %b match control groups, want %b", all, p.withCgroup)
				} else if inCgroup(group, f.Cgroup) {
					groups |= matched
				}
			}
			set := groups & c.Set & destinations & ports & p.OriginSet(f.Origin) & p.ProtocolSet(f.Protocol) & p.DSCPSet(f.DSCP) & marks
			if r := p.Route(f); r.ASN != c.ASN || r.Limits() != set {
				t.Fatalf("flow %+v: tables have AS%d and %b, Route %+v", *f, c.ASN, set, r)
			}
		}
	}
	p := mustCompile(t, New(1), []Limit{{Name: "slots", MaxConnections: 1}, {Name: "rate", Rate: 8}}, udpOnly)
	if got := p.Paced(); got != 0b01 {
		t.Errorf("paced limits are %b", got)
	}
}

func number(a, b uint32) int { return int(max(-1, min(int64(a)-int64(b), 1))) }

// segment returns the value of the segment that contains at.
func segment[K, V comparable](t *testing.T, segments iter.Seq2[K, V], at K, compare func(a, b K) int) V {
	t.Helper()
	var value, last V
	var before K
	n := 0
	for start, v := range segments {
		if n == 0 && start != before || n > 0 && (compare(before, start) >= 0 || v == last) {
			t.Fatalf("segment %d starts at %v, after one at %v", n, start, before)
		}
		if compare(start, at) <= 0 {
			value = v
		}
		before, last = start, v
		n++
	}
	for range segments {
		return value // all segments can be abandoned early
	}
	t.Fatal("no segments")
	return value
}
