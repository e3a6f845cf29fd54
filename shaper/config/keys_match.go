package config

import (
	"net/netip"

	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/asn"
)

var matchKeys = keys{
	{
		name: "listen", typ: arrayType(`name of a listener, such as "db"`, stringType("name", "db", ""), identity, asIs), defText: "all",
		field:   fieldOf(func(l *shaper.Limit) *[]string { return &l.Match.Listen }),
		ifEmpty: matchNone,
		doc:     "Names of listeners.",
	},
	{
		name: "attach", typ: arrayType(`name of an attachment, such as "uplink"`, stringType("name", "uplink", ""), identity, asIs), defText: "none: the limit applies to listeners",
		field:   fieldOf(func(l *shaper.Limit) *[]string { return &l.Match.Attach }),
		ifEmpty: ": name attachments, or remove the key for listeners",
		doc:     "Names of attachments. Cannot be combined with `listen`.",
	},
	{
		name: "protocol", typ: protocolType, defText: "all",
		field: fieldOf(func(l *shaper.Limit) *shaper.Protocol { return &l.Match.Protocol }),
		doc:   "Protocol. `\"icmp\"` includes ICMPv6, and is for attachments only.",
	},
	{
		name: "source", typ: prefixesType, defText: "all",
		field:   fieldOf(func(l *shaper.Limit) *[]netip.Prefix { return &l.Match.Source }),
		ifEmpty: matchNone,
		doc:     "Source addresses or prefixes.",
	},
	{
		name: "destination", typ: arrayType(`prefix or address such as "10.0.0.5"`, stringType("prefix", "10.0.0.5", prefixPattern), parsePrefix, asText), defText: "all",
		field:   fieldOf(func(l *shaper.Limit) *[]netip.Prefix { return &l.Match.Destination }),
		ifEmpty: matchNone,
		doc:     "Destination addresses or prefixes. Attachments only.",
	},
	{
		name: "asn", typ: asnsType, defText: "all",
		field:   fieldOf(func(l *shaper.Limit) *[]uint32 { return &l.Match.ASN }),
		ifEmpty: matchNone,
		doc:     "AS numbers of source addresses; needs `[asn]` files.",
	},
	{
		name: "country", typ: arrayType(`country code such as "DE"`, stringType("code", "DE", `^([A-Za-z]{2}|unknown)$`), asn.ParseCountry, asText), defText: "all",
		field:   fieldOf(func(l *shaper.Limit) *[]asn.Country { return &l.Match.Country }),
		ifEmpty: matchNone,
		doc:     "Countries of source addresses (ISO 3166-1), or `\"unknown\"`. Needs an `[asn]` file with countries.",
	},
	{
		name: "group", typ: groupsType, defText: "all",
		field:   fieldOf(func(l *shaper.Limit) *[]string { return &l.Match.Group }),
		ifEmpty: matchNone,
		doc:     "Names of groups. A source matches if it is in any of them.",
	},
	{
		name: "port", typ: arrayType(`port such as 5432, or range such as "8000-8010"`, stringType("port", "5432", `^[0-9]+(-[0-9]+)?$`).orInteger(1, 65535), parsePorts, showPorts), defText: "all",
		field:   fieldOf(func(l *shaper.Limit) *[]shaper.PortRange { return &l.Match.Port }),
		ifEmpty: matchNone,
		doc:     "Destination ports, or ranges of them, to which the source connects; at most 1024.",
	},
	{
		name: "dscp", typ: arrayType(`DSCP such as "ef" or 46`, stringType("DSCP", "ef", `^([a-z][a-z0-9-]*|[0-9]+)$`).orInteger(0, shaper.NumDSCP-1), shaper.ParseDSCP, asText), defText: "all",
		field:   fieldOf(func(l *shaper.Limit) *[]shaper.DSCP { return &l.Match.DSCP }),
		ifEmpty: matchNone,
		doc: "Differentiated services codepoints (DSCP) of packets, by number or name: `\"ef\"`, `\"af11\"` to `\"af43\"`, " +
			"`\"cs0\"` (the default) to `\"cs7\"`, `\"le\"`, `\"nqb\"`, `\"voice-admit\"`. Attachments only, for limits " +
			"that do not count connections.",
	},
	{
		name: "mark", typ: arrayType(`mark such as "0x10", or with a mask such as "0x10/0xff"`, stringType("mark", "0x10/0xff", `^[0-9a-fA-Fx]+(/[0-9a-fA-Fx]+)?$`).orInteger(0, 1<<32-1), shaper.ParseMark, asText), defText: "all",
		field:   fieldOf(func(l *shaper.Limit) *[]shaper.Mark { return &l.Match.Mark }),
		ifEmpty: matchNone,
		doc: "Marks of packets (`SO_MARK`, or `meta mark` of nftables), compared as a whole or under a mask. All limits " +
			"together may use at most 4 different masks. Attachments only, with a hook other than `\"xdp\"`, for limits " +
			"that do not count connections. At ingress, nftables has not set marks yet.",
	},
	{
		name: "cgroup", typ: arrayType(`path such as "/system.slice/nginx.service"`, stringType("path", "/system.slice/nginx.service", "^/"), shaper.ParseCgroup, asIs), defText: "all",
		field:   fieldOf(func(l *shaper.Limit) *[]string { return &l.Match.Cgroup }),
		ifEmpty: matchNone,
		doc: "Control groups (version 2) of local processes, as in `/proc/PID/cgroup`, including their descendants; at most " +
			"16 different ones. Attachments at egress only, for limits that do not count connections. A control group that " +
			"does not exist matches nothing; `status` shows it, and shaperd looks for it every two seconds. A packet " +
			"belongs to the control group in which its socket was created; the socket of an accepted connection belongs to " +
			"the group of the listening socket. With systemd socket activation, add `\"/system.slice/nginx.socket\"`. " +
			"Sockets do not follow a process that moves to another group. Packets without a socket, such as forwarded " +
			"packets, do not match.",
	},
}

// protocolType is the type of match.protocol. "" is any protocol.
var protocolType = func() valueType {
	v := enumType(shaper.TCP, shaper.UDP, shaper.ICMP)
	parse := v.parse
	v.parse = func(key string, v, current any) (any, error) {
		if v == "" {
			return shaper.AnyProtocol, nil
		}
		return parse(key, v, current)
	}
	return v
}()

// matchNone says how to match all or none. An empty list does not match everything:
// generated from an empty list of sources to block, it would block all.
const matchNone = ": remove the key to match all, or the limit to match none"

func showPorts(p shaper.PortRange) any { return p.String() }
