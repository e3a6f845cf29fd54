package config

import (
	"net/netip"

	"shaperd.dev/shaperd/shaper"
)

var groupKeys = keys{
	{
		name: "name", typ: nameType, required: true,
		field: fieldOf(func(g *Group) *string { return &g.Name }),
		text:  noText,
		doc:   "Unique among groups.",
	},
	{
		name: "source", typ: prefixesType, defText: "none",
		field:   fieldOf(func(g *Group) *[]netip.Prefix { return &g.Source }),
		ifEmpty: ": remove the key",
		doc:     "Source addresses or prefixes.",
	},
	{
		name: "asn", typ: asnsType, defText: "none",
		field:   fieldOf(func(g *Group) *[]uint32 { return &g.ASN }),
		ifEmpty: ": remove the key",
		doc:     "AS numbers of source addresses; needs `[asn]` files.",
	},
	{
		name: "file", typ: dataFileType("gold.txt"), defText: "none",
		field: fieldOf(func(g *Group) *string { return &g.File }),
		doc: "File with more addresses and prefixes, one per line; `#` begins a comment. A change to the file takes effect " +
			"within two seconds, without a reload. If a line is invalid, the previous list stays effective. The path is " +
			"relative to the configuration file.",
	},
}

// dataFileType is the type of a file with sources.
func dataFileType(example string) valueType {
	return textType("path", example, "", func(s string, _ any) (any, error) { return notEmpty(s) })
}

var (
	prefixesType = arrayType(`prefix or address such as "192.0.2.0/24"`, stringType("prefix", "192.0.2.0/24", prefixPattern), parsePrefix, asText)
	asnsType     = arrayType(`AS number such as 64500 or "AS64500"`, stringType("AS number", "AS64500", `^([aA][sS])?[0-9]+$`).orInteger(1, 1<<32-1), parseASN, asIs)
	groupsType   = arrayType(`name of a group, such as "gold"`, stringType("name", "gold", ""), identity, asIs)
)

var exceptKeys = sourcesKeys(func(l *shaper.Limit) *shaper.Sources { return &l.Except })

// sourcesKeys are the keys of sources in a table that becomes a T.
func sourcesKeys[T any](of func(*T) *shaper.Sources) keys {
	return keys{
		{
			name: "group", typ: groupsType, defText: "none",
			field:   fieldOf(func(t *T) *[]string { return &of(t).Group }),
			ifEmpty: ": remove the key",
			doc:     "Names of groups.",
		},
		{
			name: "source", typ: prefixesType, defText: "none",
			field:   fieldOf(func(t *T) *[]netip.Prefix { return &of(t).Source }),
			ifEmpty: ": remove the key",
			doc:     "Source addresses or prefixes.",
		},
		{
			name: "asn", typ: asnsType, defText: "none",
			field:   fieldOf(func(t *T) *[]uint32 { return &of(t).ASN }),
			ifEmpty: ": remove the key",
			doc:     "AS numbers of source addresses; needs `[asn]` files.",
		},
	}
}
