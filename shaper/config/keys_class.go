package config

import (
	"fmt"
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/shaper"
)

var classKeys = keys{
	{
		name: "name", typ: nameType, required: true,
		field: fieldOf(func(c *shaper.TrafficClass) *string { return &c.Name }),
		text:  noText,
		doc:   "Unique among classes. `default` is reserved for traffic that no class matches; it has weight 1 and priority 0.",
	},
	{
		name: "match", typ: tableType(classMatchKeys), defText: "all",
		doc: "Traffic of the class. A missing key matches everything. Until the downstream of a UDP flow has answered, the " +
			"source of the flow may be forged, so no class that matches by `source`, `asn` or `group` applies to it.",
	},
	{
		name: "weight", typ: integerType(1, shaper.MaxWeight), def: "1",
		field: fieldOf(func(c *shaper.TrafficClass) *int { return &c.Weight }),
		doc: "Weight of each source of the class where sources share the `rate` or `packets` of a bucket. While both have " +
			"something to send, a source of weight 5 gets five times as much as a source of weight 1. A source with " +
			"connections of two classes counts as one source in each.",
	},
	{
		name: "priority", typ: integerType(0, shaper.MaxPriority), def: "0",
		field: fieldOf(func(c *shaper.TrafficClass) *int { return &c.Priority }),
		doc: "Priority of admission. Waiting connections of the highest priority are admitted first, and are refused last " +
			"when `max_queue` is reached. A class that demands everything starves the classes of lower priority.",
	},
}

var classMatchKeys = keys{
	{
		name: "listen", typ: arrayType(`name of a listener, such as "db"`, stringType("name", "db", ""), identity, asIs), defText: "all",
		field:   fieldOf(func(c *shaper.TrafficClass) *[]string { return &c.Match.Listen }),
		ifEmpty: ": remove the key to match all",
		doc:     "Names of listeners.",
	},
	{
		name: "protocol", typ: enumType(shaper.TCP, shaper.UDP), defText: "all",
		field: fieldOf(func(c *shaper.TrafficClass) *shaper.Protocol { return &c.Match.Protocol }),
		doc:   "Transport protocol.",
	},
	{
		name: "source", typ: prefixesType, defText: "all",
		field:   fieldOf(func(c *shaper.TrafficClass) *[]netip.Prefix { return &c.Match.Source }),
		ifEmpty: ": remove the key to match all",
		doc:     "Source addresses or prefixes.",
	},
	{
		name: "asn", typ: asnsType, defText: "all",
		field:   fieldOf(func(c *shaper.TrafficClass) *[]uint32 { return &c.Match.ASN }),
		ifEmpty: ": remove the key to match all",
		doc:     "AS numbers of source addresses; needs `[asn]` files.",
	},
	{
		name: "group", typ: groupsType, defText: "all",
		field:   fieldOf(func(c *shaper.TrafficClass) *[]string { return &c.Match.Group }),
		ifEmpty: ": remove the key to match all",
		doc:     "Names of groups. A source matches if it is in any of them.",
	},
	{
		name: "port", typ: arrayType(`port such as 5432, or range such as "8000-8010"`, stringType("port", "5432", `^[0-9]+(-[0-9]+)?$`).orInteger(1, 65535), parsePorts, showPorts), defText: "all",
		field:   fieldOf(func(c *shaper.TrafficClass) *[]shaper.PortRange { return &c.Match.Port }),
		ifEmpty: ": remove the key to match all",
		doc:     "Destination ports, or ranges of them, to which the source connects; at most 1024.",
	},
}

func (l *loader) class(t table) {
	c := shaper.TrafficClass{Weight: 1}
	elems := t.decode(&c)
	if c.Name == shaper.DefaultClass {
		t.errorf("name", "%s is reserved for traffic that no class matches", quote(c.Name))
	}
	for _, name := range located(c.Match.Group, elems["match.group"]) {
		l.named = append(l.named, place{-1, "group", name})
	}
	l.c.Classes = append(l.c.Classes, c)
	l.c.classAt = append(l.c.classAt, t.at)
	l.classes = append(l.classes, t)
	l.classListens = append(l.classListens, located(c.Match.Listen, elems["match.listen"]))
}

// checkClasses reports what keeps classes from having traffic.
func (l *loader) checkClasses(listeners []string) {
	l.checkNames(l.classes)
	if len(l.classes) > shaper.MaxClasses {
		l.add(l.classes[shaper.MaxClasses].at, fmt.Sprintf("too many classes: %d, of at most %d", len(l.classes), shaper.MaxClasses))
	}
	names := []string{shaper.DefaultClass}
	for i := range l.c.Classes {
		names = append(names, l.c.Classes[i].Name)
	}
	l.checkKnown(l.reserved, "reserve", "class", names)
	all := "" // the name of a class that matches everything
	for i, t := range l.classes {
		m, match := &l.c.Classes[i].Match, t.at.child("match")
		l.checkKnown(l.classListens[i], "listen", "listener", listeners)
		if len(l.asnFiles) == 0 && len(m.ASN) > 0 {
			l.add(match.child("asn"), "asn: missing [asn] files")
		}
		if len(m.Port) > maxPorts {
			l.add(match.child("port").elem(maxPorts), fmt.Sprintf("port: too many ports and ranges: %d, of at most %d", len(m.Port), maxPorts))
		}
		switch {
		case len(listeners) == 0:
			l.add(t.at, "[[class]] has no effect without a [[listen]]: at attachments nothing takes turns by class")
		case all != "":
			l.add(t.at, fmt.Sprintf("[[class]] has no effect: class %s before it matches everything", quote(all)))
		case !slices.ContainsFunc(classMatchKeys, func(k key) bool { return !isZero(k.field.get(&l.c.Classes[i])) }) && len(l.mistakes) == 0:
			all = l.c.Classes[i].Name
		}
	}
}
