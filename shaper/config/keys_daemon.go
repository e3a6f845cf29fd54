package config

import (
	"cmp"
	"slices"

	"shaperd.dev/shaperd/shaper"
)

// fileKeys are the tables of a file.
var fileKeys = keys{
	{
		name: "daemon", typ: tableType(daemonKeys),
		doc: "Settings of the whole daemon. Each key may be set only once in all files.",
	},
	{
		name: "transparent", typ: tableType(transparentKeys), needs: []condition{{doc: "a listener with `transparent = true`"}},
		shown: when(hasTransparent),
		doc:   "Interception of packets for transparent listeners. Each key may be set only once in all files.",
	},
	{
		name: "shared", typ: tableType(sharedKeys), needs: []condition{{doc: "a limit with `shared = true`"}},
		shown: when(func(c *Config) bool { return c.Shared.Hosts > 0 }),
		doc: "The group of hosts that share limits; see [several hosts](cluster.md). Each key may be set only once in all " +
			"files. A file is a path relative to the configuration file, or the name of a systemd credential if it contains " +
			"no `/`.",
	},
	{
		name: "asn", typ: tableType(asnKeys),
		doc: "Files that map addresses to autonomous systems (AS).",
	},
	{
		name: "listen", typ: tablesType(listenKeys),
		field: elementsOf(func(c *Config) []shaper.Listener { return c.Listen }),
		doc: "A listener: the addresses on which shaperd accepts traffic, and the downstreams to which it forwards this " +
			"traffic. A configuration needs at least one `[[listen]]` or `[[attach]]`. All listeners together may have at " +
			"most 1024 addresses.",
	},
	{
		name: "attach", typ: tablesType(attachKeys),
		field: elementsOf(func(c *Config) []shaper.Attachment { return c.Attach }),
		doc:   "An attachment: the interfaces, and the direction, in which limits apply to packets. At most 64.",
	},
	{
		name: "group", typ: tablesType(groupKeys),
		field: elementsOf(func(c *Config) []Group { return c.Groups }),
		doc: "A named group of sources: the addresses in its prefixes and in its ASes. Limits refer to a group in " +
			"`match.group`, `except.group` and `for`, classes in `match.group`, and penalties in `except.group`. At most " +
			"64.",
	},
	{
		name: "class", typ: tablesType(classKeys),
		field: elementsOf(func(c *Config) []shaper.TrafficClass { return c.Classes }),
		doc: "A class of connections and UDP flows at listeners. Its weight sets the share of its sources where they compete " +
			"with other classes for a bucket; its priority sets the order of admission. Traffic belongs to the first class " +
			"that matches it: classes are tried in the order of the file, then in the order of `conf.d`. At most 16.",
	},
	{
		name: "limit", typ: tablesType(limitKeys),
		field: elementsOf(func(c *Config) []shaper.Limit { return c.Limits }),
		doc: "A limit matches traffic, splits it by `key` into buckets, and sets the rates and caps of each bucket. At most " +
			"62. All limits that match apply, whatever their order in the file; the most restrictive one wins. A limit " +
			"needs at least one of `rate`, `packets`, `max_connections`, `new_connections` and `quota`, or else `block = " +
			"true` or `shed`. A key without effect is an error. A limit with `match.attach` applies to packets at these " +
			"attachments; any other limit applies to listeners.",
	},
	{
		name: "penalty", typ: tablesType(penaltyKeys),
		field: elementsOf(func(c *Config) []Penalty { return c.Penalties }),
		doc: "A penalty blocks a source temporarily after a limit has refused it often. Only refused TCP connections count, " +
			"because their sources have completed a handshake; the source of a datagram may be forged. A limit may have one " +
			"penalty.",
	},
	{
		name: "override", typ: tablesType(overrideKeys),
		doc: "Values that replace those of a limit. The limit may be in any file. `shaperd set limit NAME --save` writes an " +
			"override to `conf.d`. Without `when`, a key of a limit may be overridden only once.",
	},
}

var daemonKeys = keys{
	{
		name: "observe", typ: booleanType, def: "false",
		field: fieldOf(func(c *Config) *bool { return &c.Daemon.Observe }),
		doc:   "A dry run of all limits: shaperd computes and counts every decision, but delays and refuses nothing.",
	},
	{
		name: "metrics", typ: endpointType("127.0.0.1:9464"), def: `"127.0.0.1:9464"`,
		field: fieldOf(func(c *Config) *string { return &c.Daemon.Metrics }),
		text:  on(func(c *Config) string { return cmp.Or(c.Daemon.Metrics, "off") }),
		doc: "Address of the Prometheus endpoint `/metrics` and of the probes `/healthz` and `/ready`. `\"\"` disables them. " +
			"A change needs a restart.",
	},
	{
		name: "dashboard", typ: endpointType("127.0.0.1:9465"), def: `"127.0.0.1:9465"`,
		field: fieldOf(func(c *Config) *string { return &c.Daemon.Dashboard }),
		text:  on(func(c *Config) string { return cmp.Or(c.Daemon.Dashboard, "off") }),
		doc:   "Address of the read-only dashboard for browsers. `\"\"` disables it. A change needs a restart.",
	},
	{
		name: "max_buckets", typ: integerType(1<<10, 1<<26), def: "1048576",
		field: fieldOf(func(c *Config) *int { return &c.Daemon.MaxBuckets }),
		doc: "Capacity of the bucket table: the number of key values, over all limits, that can have a backlog at the same " +
			"time. An idle key value needs no bucket. A change needs a restart.",
	},
	{
		name: "loops", typ: integerType(1, 256), defText: "the number of processors that the process may use",
		field:    fieldOf(func(c *Config) *int { return &c.Daemon.Loops }),
		omitZero: true,
		doc: "Maximum number of loops, the threads that move the bytes of listeners. Listeners that have no bucket, no slot " +
			"and no waiting place in common run on separate loops, so a flood at one of them does not delay the others. " +
			"Listeners that a limit joins run on one loop; see [several threads](operation.md#several-threads). A change " +
			"needs a restart.",
	},
	{
		name: "pin_path", typ: textType("absolute path", "/sys/fs/bpf/shaperd", "^/", parsePins), def: `"/sys/fs/bpf/shaperd"`,
		field: fieldOf(func(c *Config) *string { return &c.Daemon.PinPath }),
		shown: when(func(c *Config) bool { return len(c.Attach) > 0 }),
		doc: "Directory on a BPF file system in which attachments keep their kernel objects: programs, and the state of " +
			"buckets and connections. A change needs a restart.",
	},
}

func endpointType(example string) valueType {
	return textType("`host:port` or `\"\"`", example, `^(.*:[0-9]{1,5})?$`, func(s string, _ any) (any, error) {
		if err := checkEndpoint(s, example); err != nil {
			return nil, err
		}
		return s, nil
	})
}

var transparentKeys = keys{
	{
		name: "rules", typ: enumType(RulesInstall, RulesManual), def: `"install"`,
		field: fieldOf(func(c *Config) *Rules { return &c.Transparent.Rules }),
		doc: "Installation of the nftables rules and of the routing. With `\"install\"` the daemon installs them, which " +
			"needs CAP_NET_ADMIN. With `\"manual\"` an administrator installs them with the commands that `shaperd rules` " +
			"prints. The rules remain when the daemon stops; `shaperd rules --remove` removes them.",
	},
	{
		name: "mark", typ: integerType(1, 1<<31-1), def: "21320",
		field: fieldOf(func(c *Config) *int { return &c.Transparent.Mark }),
		doc: "Firewall mark of intercepted packets, and the number of their routing table; 253 to 255 are reserved. Each " +
			"daemon on a host needs its own mark.",
	},
}

var asnKeys = keys{
	{
		name: "files", typ: arrayType(`string such as "asn.csv"`, stringType("path", "asn.csv", ""), notEmpty, asIs), def: "[]",
		field: fieldOf(func(c *Config) *[]string { return &c.ASN.Files }),
		doc: "CSV or TSV of \"first,last,asn[,name]\", \"prefix asn\" (pfx2as) or MMDB; the format is detected by content. " +
			"If a limit matches or splits by country, the countries come from the MMDB files, whose records then need no " +
			"AS. Paths are relative to the configuration file.",
	},
}

func hasTransparent(c *Config) bool {
	return slices.ContainsFunc(c.Listen, func(l shaper.Listener) bool { return l.Transparent })
}
