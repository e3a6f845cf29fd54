package shaper

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/shaper/asn"
)

// buildSources classifies source addresses by prefix, by ASN and by group, and finds the tiers of their buckets. The error is that a
// source has two.
func (p *Policy) buildSources(groups []Group, table *asn.Table) *LimitError {
	b := newAddressBuilder(len(p.limits))
	r := &sourceRules{all: b.all, groups: groups, asns: map[uint32]asnRules{}, countries: map[asn.Country]Set{}, rowIndex: map[string]uint32{}}
	b.sources = r
	used := r.useGroups(p.limits, groups)
	used |= r.useClasses(p.classes[:max(len(p.classes)-1, 0)], b)
	byASN, byCountry := r.classByASN != 0, false
	for i := range p.limits {
		l := &p.limits[i]
		bit := Set(1) << i
		byASN = byASN || len(l.Match.ASN)+len(l.Except.ASN) > 0 || l.Key&KeyASN != 0 || l.takesTurnsBy(TurnASN)
		byCountry = byCountry || len(l.Match.Country) > 0 || l.Key&KeyCountry != 0
		b.addPrefixes(l.Match.Source, edge{kind: ofMatch, index: uint32(i)})
		b.addPrefixes(l.Except.Source, edge{kind: ofExcept, index: uint32(i)})
		if len(l.Match.Source) > 0 {
			b.matched |= bit
		}
		if len(l.Match.ASN) > 0 {
			r.byASN |= bit
		}
		for _, n := range l.Match.ASN {
			r.change(n, func(a *asnRules) { a.match |= bit })
		}
		if len(l.Match.Country) > 0 {
			r.byCountry |= bit
		}
		for _, c := range l.Match.Country {
			r.countries[c] |= bit
		}
		for _, n := range l.Except.ASN {
			r.change(n, func(a *asnRules) { a.except |= bit })
		}
		p.addTiers(i, r, b, groups)
	}
	r.matched = b.matched
	for g := range groups {
		if used&(1<<g) == 0 {
			continue
		}
		b.addPrefixes(groups[g].Source, edge{kind: ofGroup, index: uint32(g)})
		for _, n := range groups[g].ASN {
			byASN = true
			r.change(n, func(a *asnRules) { a.groups |= 1 << g })
		}
	}
	if table != nil && byASN {
		for e := range table.All() {
			b.add(e.First, e.Last, edge{kind: ofASN, index: e.ASN})
		}
	}
	if table != nil && byCountry {
		for c := range table.Countries() {
			b.add(c.First, c.Last, edge{kind: ofCountry, index: uint32(c.Country)})
		}
	}
	p.sources = b.build()
	p.sources.rows, p.sources.width, p.sources.matching = r.rows, p.tiered.Len(), r.matching
	return r.conflict
}

// addTiers adds the tiers of limit i.
func (p *Policy) addTiers(i int, r *sourceRules, b *addressBuilder, groups []Group) {
	l := &p.limits[i]
	if !l.HasTiers() {
		return
	}
	p.tiered |= 1 << i
	rank := r.width
	r.width++
	r.limits = append(r.limits, l)
	index := map[Values]uint32{}
	p.addTier(i, l.Values(), index)
	for t := range l.For {
		g := slices.IndexFunc(groups, func(g Group) bool { return g.Name == l.For[t].Group })
		r.groupTiers[g] = append(r.groupTiers[g], tierOfLimit{rank, p.addTier(i, l.For[t].Values, index)})
		if len(groups[g].ASN) > 0 && (l.IPv4Prefix < 32 || l.IPv6Prefix < 128) {
			p.tieredByKey |= 1 << i // the addresses of a bucket may be of several AS
		}
	}
	for v := range l.BySource {
		n := uint32(len(r.values))
		r.values = append(r.values, tierOfLimit{rank, p.addTier(i, l.BySource[v].Values, index)})
		b.addPrefixes([]netip.Prefix{l.BySource[v].Source}, edge{kind: ofValues, index: n})
	}
}

// sourceRules say how sources are classified.
type sourceRules struct {
	all                     Set                 // limits
	matched, byASN, byGroup Set                 // limits that match some prefixes, some AS or some groups only
	byCountry               Set                 // limits that match some countries only
	countries               map[asn.Country]Set // limits by the countries that they match
	asns                    map[uint32]asnRules
	groupMatch, groupExcept [MaxGroups]Set // limits, by group

	classes                                Set // of the policy, without the default class
	classMatched, classByASN, classByGroup Set // those that match some prefixes, some AS or some groups only
	groupClasses                           [MaxGroups]Set

	groups     []Group
	limits     []*Limit // those with tiers, by rank
	width      int
	groupTiers [MaxGroups][]tierOfLimit
	values     []tierOfLimit // by index of their edges

	rowIndex map[string]uint32
	rows     []uint32
	matching []Set
	row      []byte // reused

	conflict *LimitError // nil if no source has two tiers
}

// asnRules are the limits that match an AS, and those that except it, and the groups that have it.
type asnRules struct {
	match, except Set
	classes       Set
	groups        uint64
}

type tierOfLimit struct {
	rank int
	tier uint32
}

// placedTier is a tier of a prefix around a place.
type placedTier struct {
	kind  edgeKind
	bits  uint8
	index uint32
	tier  uint32
}

func (r *sourceRules) change(asn uint32, f func(*asnRules)) {
	a := r.asns[asn]
	f(&a)
	r.asns[asn] = a
}

// useGroups records what limits have to do with groups, and returns those that they name.
func (r *sourceRules) useGroups(limits []Limit, groups []Group) (used uint64) {
	each := func(names []string, f func(g int)) {
		for _, name := range names {
			g := slices.IndexFunc(groups, func(g Group) bool { return g.Name == name })
			used |= 1 << g
			f(g)
		}
	}
	for i := range limits {
		l := &limits[i]
		if len(l.Match.Group) > 0 {
			r.byGroup |= 1 << i
		}
		each(l.Match.Group, func(g int) { r.groupMatch[g] |= 1 << i })
		each(l.Except.Group, func(g int) { r.groupExcept[g] |= 1 << i })
		for t := range l.For {
			each([]string{l.For[t].Group}, func(int) {})
		}
	}
	return used
}

// useClasses records which sources classes match, and returns the groups that they name.
func (r *sourceRules) useClasses(classes []TrafficClass, b *addressBuilder) (used uint64) {
	r.classes = 1<<len(classes) - 1
	for c := range classes {
		m, bit := &classes[c].Match, Set(1)<<c
		b.addPrefixes(m.Source, edge{kind: ofClass, index: uint32(c)})
		if len(m.Source) > 0 {
			r.classMatched |= bit
		}
		if len(m.ASN) > 0 {
			r.classByASN |= bit
		}
		for _, n := range m.ASN {
			r.change(n, func(a *asnRules) { a.classes |= bit })
		}
		if len(m.Group) > 0 {
			r.classByGroup |= bit
		}
		for _, name := range m.Group {
			g := slices.IndexFunc(r.groups, func(g Group) bool { return g.Name == name })
			used |= 1 << g
			r.groupClasses[g] |= bit
		}
	}
	return used
}

func (r *sourceRules) newPlace() (p place) {
	if r != nil {
		p.tiers = make([][]placedTier, r.width)
	}
	return p
}

// changeTiers records that a prefix begins or ends.
func (r *sourceRules) changeTiers(here *place, e *edge) {
	var one [1]tierOfLimit
	all := one[:]
	if e.kind == ofGroup {
		all = r.groupTiers[e.index]
	} else {
		one[0] = r.values[e.index]
	}
	for _, t := range all {
		around := &here.tiers[t.rank]
		placed := placedTier{e.kind, e.bits, e.index, t.tier}
		if e.delta > 0 {
			if n := len(*around); n > 0 && e.kind == ofGroup {
				if o := (*around)[n-1]; o.kind == ofGroup && o.bits == e.bits && o.tier != t.tier {
					r.collide(t.rank, o.index, e.index, r.inBoth(o.index, e.index, e.bits))
				}
			}
			*around = append(*around, placed)
			continue
		}
		for n := len(*around) - 1; n >= 0; n-- {
			if (*around)[n] == placed {
				*around = slices.Delete(*around, n, n+1)
				break
			}
		}
	}
}

// collide records that two groups have the same sources, for which a limit has two values.
func (r *sourceRules) collide(rank int, a, b uint32, what string) {
	if r.conflict == nil {
		msg := fmt.Sprintf("groups %q and %q both have %s: a source has one value", r.groups[a].Name, r.groups[b].Name, what)
		r.conflict = &LimitError{Name: r.limits[rank].Name, Key: "for", Msg: msg}
	}
}

// inBoth returns a prefix of so many bits that two groups have.
func (r *sourceRules) inBoth(a, b uint32, bits uint8) string {
	for _, p := range r.groups[a].Source {
		if p.Bits() == int(bits) && slices.Contains(r.groups[b].Source, p) {
			return p.String()
		}
	}
	return "a prefix" // written in two ways
}

// classify returns the class of the sources in one place.
func (r *sourceRules) classify(here *place) Class {
	a := r.asns[here.asn]
	groups := here.in[ofGroup] | a.groups
	match, except, classes := r.all&^r.byGroup, Set(here.in[ofExcept])|a.except, r.classes&^r.classByGroup
	for g := range Set(groups).All {
		match |= r.groupMatch[g]
		except |= r.groupExcept[g]
		classes |= r.groupClasses[g]
	}
	match &= (^r.matched | Set(here.in[ofMatch])) & (^r.byASN | a.match) & (^r.byCountry | r.countries[here.country])
	classes &= (^r.classMatched | Set(here.in[ofClass])) & (^r.classByASN | a.classes)
	return Class{ASN: here.asn, Country: here.country, Set: match &^ except, Row: r.rowOf(here, a.groups, classes), excepted: match & except}
}

// rowOf returns the index of the tiers of the sources in one place, of which the groups have the AS, and of the classes that match them.
func (r *sourceRules) rowOf(here *place, groups uint64, classes Set) uint32 {
	if r.width == 0 && r.classes == 0 {
		return 0
	}
	r.row = binary.LittleEndian.AppendUint64(r.row[:0], uint64(classes))
	for rank, around := range here.tiers {
		tier := uint32(0)
		if n := len(around); n > 0 {
			tier = around[n-1].tier
		} else {
			tier = r.tierOfAS(rank, groups, here.asn)
		}
		r.row = binary.LittleEndian.AppendUint32(r.row, tier)
	}
	i, ok := r.rowIndex[string(r.row)]
	if !ok {
		i = uint32(len(r.rowIndex))
		r.rowIndex[string(r.row)] = i
		r.matching = append(r.matching, classes)
		for n := range r.width {
			r.rows = append(r.rows, binary.LittleEndian.Uint32(r.row[8+4*n:]))
		}
	}
	return i
}

// tierOfAS returns the tier that a limit has for the groups of an AS, or 0.
func (r *sourceRules) tierOfAS(rank int, groups uint64, asn uint32) (tier uint32) {
	first := -1
	for g := range Set(groups).All {
		for _, t := range r.groupTiers[g] {
			if t.rank != rank {
				continue
			}
			if first >= 0 && t.tier != tier {
				r.collide(rank, uint32(first), uint32(g), fmt.Sprintf("AS %d", asn))
			}
			tier, first = t.tier, g
		}
	}
	return tier
}
