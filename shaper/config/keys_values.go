package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// valueKeys are the keys of a limit that may differ from source to source.
var valueKeys = keys{
	{
		name: "rate", typ: rateType("10Mbit/s"), defText: "none", overridable: true,
		field: fieldOf(func(l *shaper.Limit) *uint64 { return &l.Rate }),
		doc:   "Rate of payload, without packet headers.",
	},
	{
		name: "packets", typ: quantityType("count per second, minute or hour", "5000pps", frequencyPattern, ParseFrequency, showPackets), defText: "none", overridable: true,
		field: fieldOf(func(l *shaper.Limit) *shaper.Frequency { return &l.Packets }),
		doc:   "Rate of packets. At listeners, the rate of datagrams; the limit must match UDP only.",
	},
	{
		name: "burst", typ: sizeType("64KiB"), def: `"0B"`, needs: []condition{rateFor(func(l *shaper.Limit) bool { return l.Burst == 0 })}, overridable: true,
		field: fieldOf(func(l *shaper.Limit) *uint64 { return &l.Burst }),
		shown: when(func(l *shaper.Limit) bool { return l.Rate > 0 }), after: "rate",
		doc: "Bytes that may leave at once after a pause; at most the amount that the rate passes in 30 days. `\"0B\"` is " +
			"strict smoothing.",
	},
	{
		name: "burst_packets", typ: integerType[uint64](0, 1e12), def: "0", needs: []condition{anyOf("packets")}, overridable: true,
		field: fieldOf(func(l *shaper.Limit) *uint64 { return &l.BurstPackets }),
		doc:   "Packets that may leave at once after a pause. 0 is strict smoothing.",
	},
	{
		name: "max_connections", typ: integerType(1, 1<<20), defText: "no maximum", overridable: true,
		field: fieldOf(func(l *shaper.Limit) *int { return &l.MaxConnections }),
		doc: "Maximum number of connections in flight, for each key value. A UDP flow counts until its `udp_idle_timeout`, " +
			"or until it is evicted while idle. A new flow waits for a slot like a connection; all unverified sources take " +
			"turns as one source. At attachments only TCP connections count, and at most 4 limits with this key may match " +
			"one attachment.",
	},
	{
		name: "new_connections", typ: quantityType("count per second, minute or hour, or per several of them", "50/s", `^[0-9]+ ?/[0-9]*(s|min|h)$`, parseConnectionFrequency, showFrequency), defText: "no maximum", overridable: true,
		field: fieldOf(func(l *shaper.Limit) *shaper.Frequency { return &l.NewConnections }),
		doc: "Rate of new connections, for each key value. Without a burst, connections are spaced: with `\"10/15min\"`, one " +
			"every 90 s.",
	},
	{
		name: "burst_connections", typ: integerType[uint64](0, 1e6), def: "0", needs: []condition{anyOf("new_connections")}, overridable: true,
		field:    fieldOf(func(l *shaper.Limit) *uint64 { return &l.BurstConnections }),
		omitZero: true,
		doc: "New connections that may come at once after a pause, as from a token bucket of this size. With 0 or 1 all " +
			"connections are spaced. In any interval t, at most `burst_connections` + t × `new_connections` come. Cannot be " +
			"combined with `shared = true`.",
	},
}

// tierKeys are these keys in for.NAME of a limit.
var tierKeys = func() (all keys) {
	for _, k := range valueKeys {
		k.def, k.defText, k.needs, k.after, k.shown, k.omitZero = "", "the value in the limit", nil, "", nil, true
		all = append(all, k)
	}
	return all
}()

const noTiers = "unsupported at attachments, where all buckets of a limit have the same values: write a limit for each, with match.group and except"

// baseOfValue returns the key without which a value of the same limit has no effect.
func baseOfValue(key string) string {
	switch key {
	case "burst":
		return "rate"
	case "burst_packets":
		return "packets"
	case "burst_connections":
		return "new_connections"
	}
	return key
}

// tiersText describes the values that groups have in l.
func tiersText(l *shaper.Limit) string {
	var all []string
	for i := range l.For {
		tier := l.With(&l.For[i].Values)
		all = append(all, l.For[i].Group+" "+differences(l, &tier))
	}
	return strings.Join(all, "; ")
}

// differences describes the values of tier that are not those of l.
func differences(l, tier *shaper.Limit) string {
	var values []string
	for i := range tierKeys {
		if k := &tierKeys[i]; k.field.get(l) != k.field.get(tier) {
			values = append(values, k.name+" "+k.textOf(tier))
		}
	}
	if len(values) == 0 {
		return "as all"
	}
	return strings.Join(values, ", ")
}

// place is where a group is named in a limit, by its index, or in a class or a penalty, by -1.
type place struct {
	limit int
	key   string
	item[string]
}

// tiers decodes the tables for.NAME of a limit, and reports mistakes in them.
func (l *loader) tiers(t table, limit *shaper.Limit) {
	all, ok := t.namedTables("for")
	if !ok {
		return
	}
	names := slices.SortedFunc(maps.Keys(all.values), func(a, b string) int { return all.at.child(a).offset - all.at.child(b).offset })
	if len(names) == 0 {
		t.errorf("for", "must not be empty: name groups in it, as in for.gold = { rate = \"100Mbit/s\" }")
	}
	for _, name := range names {
		sub, ok := all.namedTable(name)
		if !ok {
			continue
		}
		if len(sub.values) == 0 {
			all.errorf(name, "must not be empty: set %s", strings.Join(tierKeys.names(), ", "))
		}
		tier := *limit
		tier.For = nil
		sub.decode(&tier)
		for _, key := range sub.keys.names() {
			if base := baseOfValue(key); sub.has(key) && !t.has(base) {
				sub.errorf(key, "has no effect without %s in the limit", base)
			}
		}
		checkBursts(sub, &tier)
		checkAlgorithm(sub, &tier)
		if sub.has("max_connections") {
			checkReserved(sub, &tier)
		}
		limit.For = append(limit.For, shaper.Tier{Group: name, Values: tier.Values()})
		l.named = append(l.named, place{len(l.c.Limits), "for", item[string]{name, all.at.child(name)}})
	}
}

// checkTiers reports what keeps the buckets of a limit from having values of their own.
func (l *loader) checkTiers(t table, limit *shaper.Limit) {
	for _, key := range []string{"for", "values"} {
		switch {
		case !t.has(key):
		case limit.Shared:
			t.errorf(key, "unsupported with shared = true: hosts share the same values")
		case limit.Adapt != shaper.AdaptOff:
			t.errorf(key, "unsupported with adapt: a downstream has one capacity")
		case limit.Key&shaper.KeyConnection != 0:
			t.errorf(key, "unsupported with \"connection\" in key: a source has one value")
		}
	}
}

// checkGroups reports groups that nothing names, and what keeps those that are named in for from deciding.
func (l *loader) checkGroups() {
	var names []string
	for i := range l.c.Groups {
		names = append(names, l.c.Groups[i].Name)
	}
	l.checkNames(l.groups)
	if len(l.groups) > shaper.MaxGroups {
		l.add(l.groups[shaper.MaxGroups].at, fmt.Sprintf("too many groups: %d, of at most %d", len(l.groups), shaper.MaxGroups))
	}
	used := map[string]bool{}
	for _, n := range l.named {
		l.checkKnown([]item[string]{n.item}, n.key, "group", names)
		used[n.value] = true
	}
	for i, t := range l.groups {
		g := &l.c.Groups[i]
		switch {
		case !t.has("source") && !t.has("asn") && !t.has("file") && len(t.unknownKeys()) == 0:
			l.add(t.at, "[[group]] has no effect: set source, asn or file")
		case !used[g.Name] && t.has("name"):
			l.add(t.at, fmt.Sprintf("[[group]] has no effect: no limit names %s in match.group, except.group or for, and no class or penalty", quote(g.Name)))
		}
		if len(l.asnFiles) == 0 && len(g.ASN) > 0 {
			t.errorf("asn", "missing [asn] files")
		}
	}
	if len(l.mistakes) == 0 {
		l.checkTierSources()
	}
}

// checkTierSources reports prefixes of groups in for that are longer than those of buckets, or that two groups have.
func (l *loader) checkTierSources() {
	for _, n := range l.named {
		if n.key != "for" {
			continue
		}
		limit := &l.c.Limits[n.limit]
		g := l.group(n.value)
		for _, p := range g.Source {
			if bits, name := limit.PrefixOf(p.Addr()); p.Bits() > bits {
				l.add(n.at, fmt.Sprintf("for: group %s has %v, which is longer than %s = %d: a bucket has one value", quote(g.Name), p, name, bits))
				break
			}
		}
		for i := range limit.For {
			o := l.group(limit.For[i].Group)
			if o == g {
				break
			}
			own := limit.For[slices.IndexFunc(limit.For, func(t shaper.Tier) bool { return t.Group == g.Name })]
			if limit.For[i].Values == own.Values {
				continue
			}
			if what := inCommon(o, g); what != "" {
				l.add(n.at, fmt.Sprintf("for: groups %s and %s both have %s: a source has one value", quote(o.Name), quote(g.Name), what))
			}
		}
	}
}

// group returns the group with a name, which exists.
func (l *loader) group(name string) *Group {
	return &l.c.Groups[slices.IndexFunc(l.c.Groups, func(g Group) bool { return g.Name == name })]
}

// inCommon returns a prefix or an AS that two groups have, or "".
func inCommon(a, b *Group) string {
	for _, p := range a.Source {
		if slices.Contains(b.Source, p) {
			return p.String()
		}
	}
	for _, n := range a.ASN {
		if slices.Contains(b.ASN, n) {
			return fmt.Sprint("AS ", n)
		}
	}
	return ""
}
