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
		doc: "Settings of the whole daemon. Each key may be set once in all files.",
	},
	{
		name: "transparent", typ: tableType(transparentKeys), needs: []condition{{doc: "a listener with `transparent = true`"}},
		shown: when(hasTransparent),
		doc:   "Packet interception for transparent listeners. Each key may be set once in all files.",
	},
	{
		name: "shared", typ: tableType(sharedKeys), needs: []condition{{doc: "a limit with `shared = true`"}},
		shown: when(func(c *Config) bool { return c.Shared.Hosts > 0 }),
		doc: "The group of hosts that share limits. Each key may be set once in all files. Files are paths, relative " +
			"to the configuration file, or without a `/` names of systemd credentials.",
	},
	{
		name: "asn", typ: tableType(asnKeys),
		doc: "Data that maps addresses to autonomous systems (AS).",
	},
	{
		name: "listen", typ: tablesType(listenKeys),
		field: elementsOf(func(c *Config) []shaper.Listener { return c.Listen }),
		doc: "A listener: addresses to accept traffic on, and the downstreams to forward it to. A configuration " +
			"needs at least one `[[listen]]` or `[[attach]]`. All listeners together have at most 1024 addresses.",
	},
	{
		name: "attach", typ: tablesType(attachKeys),
		field: elementsOf(func(c *Config) []shaper.Attachment { return c.Attach }),
		doc:   "An attachment: interfaces at which packets meet the limits, in one direction. At most 64.",
	},
	{
		name: "group", typ: tablesType(groupKeys),
		field: elementsOf(func(c *Config) []Group { return c.Groups }),
		doc: "A group of sources, which limits name in `match.group`, `except.group` or `for`, classes in `match.group`, and penalties in `except.group`: those of its prefixes, and those of its AS. " +
			"At most 64.",
	},
	{
		name: "class", typ: tablesType(classKeys),
		field: elementsOf(func(c *Config) []shaper.TrafficClass { return c.Classes }),
		doc: "A class of connections and UDP flows at listeners: by its weight their sources share a bucket with those of other classes, and " +
			"by its priority they are admitted. Traffic is of the first class that matches it, in the order of the file, then of " +
			"those in `conf.d`. At most 16.",
	},
	{
		name: "limit", typ: tablesType(limitKeys),
		field: elementsOf(func(c *Config) []shaper.Limit { return c.Limits }),
		doc: "A limit matches traffic, splits it by `key` into buckets, and sets the rates and caps of each " +
			"bucket. At most 62. All limits that match apply, in any order; the most restrictive wins. A limit " +
			"needs at least one of `rate`, `packets`, `max_connections` and `new_connections`, or `block = true`; " +
			"a key without effect is an error. A limit with `match.attach` applies to packets at those " +
			"attachments, any other to listeners.",
	},
	{
		name: "penalty", typ: tablesType(penaltyKeys),
		field: elementsOf(func(c *Config) []Penalty { return c.Penalties }),
		doc: "A penalty blocks a source for a while that a limit has refused often. Only TCP connections count, whose sources " +
			"have answered: those of datagrams may be forged. Each limit may have one.",
	},
	{
		name: "override", typ: tablesType(overrideKeys),
		doc: "Values that replace those of a limit, which may be in any file. `shaperd set limit NAME --save` " +
			"writes one to `conf.d`. A key of a limit may be overridden once.",
	},
}

var daemonKeys = keys{
	{
		name: "observe", typ: booleanType, def: "false",
		field: fieldOf(func(c *Config) *bool { return &c.Daemon.Observe }),
		doc:   "A dry run of all limits: everything is computed and counted, and nothing is delayed or refused.",
	},
	{
		name: "metrics", typ: endpointType("127.0.0.1:9464"), def: `"127.0.0.1:9464"`,
		field: fieldOf(func(c *Config) *string { return &c.Daemon.Metrics }),
		text:  on(func(c *Config) string { return cmp.Or(c.Daemon.Metrics, "off") }),
		doc:   "Address of the Prometheus endpoint, at `/metrics`, and of `/healthz` and `/ready` for probes. `\"\"` disables it. A change needs a restart.",
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
		doc: "Capacity of the bucket table: the number of keys, of all limits together, that can have a backlog at " +
			"once. An idle key needs no bucket. A change needs a restart.",
	},
	{
		name: "loops", typ: integerType(1, 256), defText: "as many as the process may use processors",
		field:    fieldOf(func(c *Config) *int { return &c.Daemon.Loops }),
		omitZero: true,
		doc: "Maximum of threads that move the bytes of listeners. Listeners that have no bucket, no slots and no waiting places in common " +
			"run on threads of their own, so that a flood at one does not delay the others. Those that a limit joins are on one: " +
			"see [several threads](operation.md#several-threads). A change needs a restart.",
	},
	{
		name: "pin_path", typ: textType("absolute path", "/sys/fs/bpf/shaperd", "^/", parsePins), def: `"/sys/fs/bpf/shaperd"`,
		field: fieldOf(func(c *Config) *string { return &c.Daemon.PinPath }),
		shown: when(func(c *Config) bool { return len(c.Attach) > 0 }),
		doc: "Directory on a BPF file system for what attachments keep in the kernel: programs, and the state of " +
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
		doc: "Installation of the nftables rules and the routing: by the daemon, which needs CAP_NET_ADMIN, or by an " +
			"administrator with the commands that `shaperd rules` prints. The rules stay when the daemon stops; " +
			"`shaperd rules --remove` removes them.",
	},
	{
		name: "mark", typ: integerType(1, 1<<31-1), def: "21320",
		field: fieldOf(func(c *Config) *int { return &c.Transparent.Mark }),
		doc: "Firewall mark of intercepted packets, and number of their routing table, except 253 to 255. Each " +
			"daemon on a host needs its own.",
	},
}

var asnKeys = keys{
	{
		name: "files", typ: arrayType(`string such as "asn.csv"`, stringType("path", "asn.csv", ""), notEmpty, asIs), def: "[]",
		field: fieldOf(func(c *Config) *[]string { return &c.ASN.Files }),
		doc: "CSV or TSV of \"first,last,asn[,name]\", \"prefix asn\" (pfx2as) or MMDB, detected by content. Where a limit has " +
			"to do with countries, they are those in the records of MMDBs, which need not have an AS then. Paths are relative to the " +
			"configuration file.",
	},
}

func hasTransparent(c *Config) bool {
	return slices.ContainsFunc(c.Listen, func(l shaper.Listener) bool { return l.Transparent })
}
