package config

import "time"

// fileKeys are the tables of a file.
var fileKeys = keys{
	{
		name: "daemon", typ: tableType(daemonKeys),
		doc: "What concerns the whole daemon. Each of its keys may be set once in all files.",
	},
	{
		name: "transparent", typ: tableType(transparentKeys), needs: "a listener with `transparent = true`",
		doc: "How packets come to transparent listeners. Each of its keys may be set once in all files.",
	},
	{
		name: "asn", typ: tableType(asnKeys),
		doc: "The data that says which autonomous system (AS) announces an address.",
	},
	{
		name: "listen", typ: tablesType(listenKeys),
		doc: "A listener: where traffic enters to be proxied, and where it goes. A configuration needs at least one of " +
			"these or one `[[attach]]`. All of them together have at most 1024 addresses.",
	},
	{
		name: "attach", typ: tablesType(attachKeys),
		doc: "An attachment: the interfaces at which packets meet the limits, in one direction. At most 64 of them.",
	},
	{
		name: "limit", typ: tablesType(limitKeys),
		doc: "A limit matches traffic, splits it by `key` into buckets, and says what each bucket is held to. At most " +
			"64 of them. Traffic is under every limit that matches it, in whatever order they stand; the most " +
			"restrictive wins. A limit needs at least one of `rate`, `packets`, `max_connections` and `new_connections`, " +
			"or `block = true`; a key that would have no effect is an error. One that names attachments in " +
			"`match.attach` is for the packets there, any other is for the listeners.",
	},
	{
		name: "override", typ: tablesType(overrideKeys),
		doc: "Values that go before those of a limit, which may stand in any file. It is what `shaperd set limit NAME " +
			"--save` writes to `conf.d`. A key of a limit may be overridden once.",
	},
}

var daemonKeys = keys{
	{
		name: "observe", typ: booleanType, def: "false",
		doc: "Whether all limits only count what they would do: a dry run. Everything is computed, and nothing is " +
			"delayed or refused.",
	},
	{
		name: "metrics", typ: endpointType("127.0.0.1:9464"), def: `"127.0.0.1:9464"`,
		doc: "Where Prometheus may fetch metrics, at `/metrics`. `\"\"` turns it off. A change takes a restart.",
	},
	{
		name: "dashboard", typ: endpointType("127.0.0.1:9465"), def: `"127.0.0.1:9465"`,
		doc: "Where a browser finds the page that shows all this live; nothing can be changed there. `\"\"` turns it " +
			"off. A change takes a restart.",
	},
	{
		name: "max_buckets", typ: integerType(1<<10, 1<<26), def: "1048576",
		doc: "Capacity of the bucket table: how many keys, of all limits together, may have a backlog at once. An idle " +
			"key needs no bucket. A change takes a restart.",
	},
	{
		name: "pin_path", typ: stringType("absolute path", "/sys/fs/bpf/shaperd", "^/"), def: `"/sys/fs/bpf/shaperd"`,
		doc: "Folder on a BPF file system for what attachments leave in the kernel: programs, and the state of buckets " +
			"and connections. A change takes a restart.",
	},
}

func endpointType(example string) valueType {
	return stringType("`host:port` or `\"\"`", example, `^(.*:[0-9]{1,5})?$`)
}

var transparentKeys = keys{
	{
		name: "rules", typ: enumType(RulesInstall, RulesManual), def: `"install"`,
		doc: "Who sees to the nftables rules and the routing: the daemon, which needs CAP_NET_ADMIN for it, or whoever " +
			"runs the commands that `shaperd rules` prints. The rules stay when the daemon stops; `shaperd rules " +
			"--remove` takes them away.",
	},
	{
		name: "mark", typ: integerType(1, 1<<31-1), def: "21320",
		doc: "The firewall mark of such packets, and the number of their routing table, but for 253 to 255. Another " +
			"daemon on the host needs another one.",
	},
}

var asnKeys = keys{
	{
		name: "files", typ: arrayType(`string such as "asn.csv"`, stringType("path", "asn.csv", "")), def: "[]",
		doc: "CSV or TSV of \"first,last,asn[,name]\", \"prefix asn\" (pfx2as) or MMDB, told apart by their content. A " +
			"relative path starts at the folder of the file it stands in.",
	},
}

// Of TCP connections that get nowhere.
var timeoutType = durationType(10*time.Millisecond, 8760*time.Hour)

var downstreamType = arrayType(`string such as "10.0.0.5:5432", or table such as { address = "10.0.0.5:5432", weight = 2 }`,
	valueType{kind: kindStringOrTable, example: "10.0.0.5:5432", keys: downstreamKeys})

var nameType = stringType("1 to 64 letters, digits, `-`, `_` and `.`", "db", `^[A-Za-z0-9._-]{1,64}$`)

var listenKeys = keys{
	{
		name: "name", typ: nameType, required: true,
		doc: "Unique among listeners and attachments; it labels metrics and log lines.",
	},
	{
		name: "address", typ: arrayType(`string such as "tcp://0.0.0.0:5432"`, stringType("address", "tcp://0.0.0.0:5432", `^(tcp|udp)://.+:[0-9]+(-[0-9]+)?$`)), required: true,
		doc: "Protocol, IP address and port or range of ports. `[::]` takes IPv6 alone, so that `0.0.0.0` may stand " +
			"beside it.",
	},
	{
		name: "downstream", typ: downstreamType, required: true,
		doc: "Hosts to forward to, as an address or a name. Without a port, the port that the source asked for; a " +
			"range of ports always maps to the same ports.",
	},
	{
		name: "balance", typ: enumType(RoundRobin, LeastConnections, SourceHash), def: `"round-robin"`, needs: "a second downstream",
		doc: "How a connection's downstream is chosen, by weight. `\"source-hash\"` sends a source to the same one as " +
			"long as it is there. One that has as many connections as it may is passed over; when all have, a " +
			"connection waits for up to `connect_timeout`, and sources take turns.",
	},
	{
		name: "slow_start", typ: durationType(0, time.Hour), def: `"0s"`, needs: "a second downstream",
		doc: "For how long a downstream that has come back gets less than its share.",
	},
	{
		name: "check", typ: tableType(checkKeys), defText: "none", needs: "a tcp address",
		doc: "A check connects to each downstream, and closes. It is one of the `max_connections` of the downstream, and left out while that has as many as it may; limits do not count it. Intervals vary by a tenth.",
	},
	{
		name: "eject", typ: tableType(ejectKeys), defText: "after 3, for 10s", needs: "a second downstream",
		doc: "After how many failed dials, one after the other, a downstream gets no connections, and for how long, " +
			"unless there is no other.",
	},
	{
		name: "accept_proxy_from", typ: arrayType(`prefix or address such as "10.0.0.0/24"`, stringType("prefix", "10.0.0.0/24", prefixPattern)), def: "[]", needs: "a tcp address",
		doc: "Who begins each TCP connection with a header of the PROXY protocol, version 1 or 2. Limits see the " +
			"source that it announces. A connection from there without one is reset after 5 s at the latest.",
	},
	{
		name: "send_proxy", typ: enumType(NoProxy, ProxyV1, ProxyV2), def: `"off"`,
		doc: "What tells the downstream of the source: a version of the PROXY protocol, before the first byte, and " +
			"with `\"v2\"` before each UDP datagram too. Limits count it. `\"v1\"` is for TCP alone.",
	},
	{
		name: "transparent", typ: booleanType, def: "false",
		doc: "Whether downstreams see the addresses of sources, and not this host's, with no change to the protocol. " +
			"Their answers have to come back through this host.",
	},
	{
		name: "access_log", typ: booleanType, def: "false",
		doc: "Whether each TCP connection and UDP flow has a line in the log when it ends: its source, downstream, " +
			"bytes, waits, and how it ended.",
	},
	{
		name: "connect_timeout", typ: durationType(time.Millisecond, time.Hour), def: `"5s"`, needs: "a tcp address",
		doc: "How long a TCP connection to the downstream may take to come about.",
	},
	{
		name: "first_byte_timeout", typ: timeoutType, defText: "never", needs: "a tcp address",
		doc: "When a TCP connection ends whose client sends nothing once it has a downstream. Leave it out where the " +
			"downstream speaks first.",
	},
	{
		name: "tcp_idle_timeout", typ: timeoutType, defText: "never", needs: "a tcp address",
		doc: "When a TCP connection ends in which no byte moves either way. While shaperd itself holds bytes back, " +
			"time stands still.",
	},
	{
		name: "half_close_timeout", typ: timeoutType, defText: "never", needs: "a tcp address",
		doc: "The same, for one of which one side has ended.",
	},
	{
		name: "max_lifetime", typ: timeoutType, defText: "never", needs: "a tcp address",
		doc: "When any TCP connection ends.",
	},
	{
		name: "min_throughput", typ: rateType("100B/s"), defText: "none", needs: "a tcp address",
		doc: "What a TCP connection has to move in each 10 s in which shaperd held nothing back, both ways together.",
	},
	{
		name: "udp_idle_timeout", typ: durationType(10*time.Millisecond, 24*time.Hour), def: `"1m"`, needs: "a udp address",
		doc: "A UDP flow without a datagram for this long is forgotten.",
	},
	{
		name: "max_flows", typ: integerType(1, 1<<20), def: "4096", needs: "a udp address",
		doc: "UDP flows at once. Each takes a local port of this host, of which there are 28,000 by default. When " +
			"there is no room, an idle flow makes some: one that was never answered, else one whose source has sent " +
			"nothing since the answer, else one that was idle for a quarter of `udp_idle_timeout`; never one with datagrams queued.",
	},
	{
		name: "max_flows_per_source", typ: integerType(1, 1<<20), defText: "a quarter of `max_flows`", needs: "a udp address",
		doc: "UDP flows at once of one IPv4 address, or IPv6 prefix of 64 bits. A source that has so many makes room " +
			"for its next one itself.",
	},
	{
		name: "amplification", typ: integerType(0, 1000), def: "3", needs: "a udp address",
		doc: "What a UDP flow's source, which may be forged, is sent comes to at most so many times the bytes that it " +
			"sent, as long as the flow lasts. 0 is no bound: for protocols that send much more than they are asked, " +
			"such as DNS, QUIC, tunnels and streams.",
	},
}

var downstreamKeys = keys{
	{
		name: "address", typ: stringType("address or name, with a port or without", "10.0.0.5:5432", ""), required: true,
		doc: "What a string would say that stands in the place of the table.",
	},
	{
		name: "weight", typ: integerType(1, 256), def: "1",
		doc: "Its part among several.",
	},
	{
		name: "max_connections", typ: integerType(1, 1<<20), defText: "no bound",
		doc: "Connections at once, with UDP flows.",
	},
}

var checkKeys = keys{
	{
		name: "interval", typ: durationType(10*time.Millisecond, time.Hour), def: `"2s"`,
		doc: "From one check to the next.",
	},
	{
		name: "timeout", typ: durationType(10*time.Millisecond, time.Hour), def: `"1s"`,
		doc: "When a check has failed that has not connected.",
	},
	{
		name: "rise", typ: integerType(1, 1000), def: "2",
		doc: "Checks that succeed, one after the other, before a downstream is up.",
	},
	{
		name: "fall", typ: integerType(1, 1000), def: "3",
		doc: "Checks that fail before it is down.",
	},
}

var ejectKeys = keys{
	{
		name: "after", typ: integerType(0, 1000), def: "3",
		doc: "Failed dials; 0 is never.",
	},
	{
		name: "for", typ: durationType(10*time.Millisecond, 24*time.Hour), def: `"10s"`,
		doc: "How long it gets no connections.",
	},
}

var attachKeys = keys{
	{
		name: "name", typ: nameType, required: true,
		doc: "Unique among attachments and listeners.",
	},
	{
		name: "interface", typ: arrayType(`string such as "eth0"`, stringType("name", "eth0", "")), required: true,
		doc: "Names of interfaces, or patterns of names with `*`, `?` and sets such as `[0-9]`. Interfaces that appear " +
			"later are picked up.",
	},
	{
		name: "direction", typ: enumType(Egress, Ingress), def: `"egress"`,
		doc: "What leaves through the interface, or what comes in. For both make two attachments.",
	},
	{
		name: "mode", typ: enumType(Shape, Police), def: `"shape"`,
		doc: "`\"shape\"` holds packets until they may leave, and drops those that would wait longer than `max_delay`; " +
			"`\"police\"` drops the same ones, and the others pass at once.",
	},
	{
		name: "observe", typ: booleanType, def: "false",
		doc: "Whether the limits there only count what they would do. A limit that matches this attachment matches no " +
			"other that enforces, unless the limit itself observes.",
	},
	{
		name: "hook", typ: enumType(HookAuto, HookTCX, HookClsact, HookXDP), def: `"auto"`,
		doc: "Where in the kernel: `\"tcx\"` (from Linux 6.6), `\"clsact\"`, `\"auto\"`, which is the first of those " +
			"that the kernel has, or `\"xdp\"` in the driver, for direction `\"ingress\"` with mode `\"police\"` or " +
			"`observe = true`.",
	},
	{
		name: "on_stop", typ: enumType(StopOpen, StopKeep), def: `"open"`,
		doc: "While no daemon runs, traffic passes without limits, or the limits last in force stay so.",
	},
	{
		name: "queue", typ: integerType(1000, 10_000_000), def: "100000", needs: "mode `\"shape\"` and `observe = false`",
		doc: "How many packets may wait in each interface's queue (fq). One key gets three quarters of it at the least where no " +
			"other waits, and an equal share beside others.",
	},
	{
		name: "tcp_idle_timeout", typ: durationType(time.Second, 240*time.Hour), def: `"1h"`, needs: "a limit with `max_connections` that matches the attachment",
		doc: "A TCP connection that is counted is forgotten after so long without a packet.",
	},
}
