package config

import "time"

// fileKeys are the tables of a file.
var fileKeys = keys{
	{
		name: "daemon", takes: tableOf(daemonKeys),
		about: "What concerns the whole daemon. Each of its keys may be set once in all files.",
	},
	{
		name: "transparent", takes: tableOf(diversionKeys), needs: "a listener with `transparent = true`",
		about: "How packets come to transparent listeners. Each of its keys may be set once in all files.",
	},
	{
		name: "asn", takes: tableOf(asnKeys),
		about: "The data that says which autonomous system (AS) announces an address.",
	},
	{
		name: "listen", takes: tablesOf(listenKeys),
		about: "A listener: where traffic enters to be proxied, and where it goes. A configuration needs at least one of " +
			"these or one `[[attach]]`. All of them together have at most 1024 addresses.",
	},
	{
		name: "attach", takes: tablesOf(attachKeys),
		about: "An attachment: the interfaces at which packets meet the limits, in one direction. At most 64 of them.",
	},
	{
		name: "limit", takes: tablesOf(limitKeys),
		about: "A limit matches traffic, splits it by `key` into buckets, and says what each bucket is held to. At most " +
			"64 of them. Traffic is under every limit that matches it, in whatever order they stand; the most " +
			"restrictive wins. A limit needs at least one of `rate`, `packets`, `max_connections` and `new_connections`, " +
			"or `block = true`; a key that would have no effect is an error. One that names attachments in " +
			"`match.attach` is for the packets there, any other is for the listeners.",
	},
	{
		name: "override", takes: tablesOf(overrideKeys),
		about: "Values that go before those of a limit, which may stand in any file. It is what `shaperd set limit NAME " +
			"--save` writes to `conf.d`. A key of a limit may be overridden once.",
	},
}

var daemonKeys = keys{
	{
		name: "observe", takes: boolean, preset: "false",
		about: "Whether all limits only count what they would do: a dry run. Everything is computed, and nothing is " +
			"delayed or refused.",
	},
	{
		name: "metrics", takes: endpointLike("127.0.0.1:9464"), preset: `"127.0.0.1:9464"`,
		about: "Where Prometheus may fetch metrics, at `/metrics`. `\"\"` turns it off. A change takes a restart.",
	},
	{
		name: "dashboard", takes: endpointLike("127.0.0.1:9465"), preset: `"127.0.0.1:9465"`,
		about: "Where a browser finds the page that shows all this live; nothing can be changed there. `\"\"` turns it " +
			"off. A change takes a restart.",
	},
	{
		name: "max_buckets", takes: integer(1<<10, 1<<26), preset: "1048576",
		about: "Capacity of the bucket table: how many keys, of all limits together, may have a backlog at once. An idle " +
			"key needs no bucket. A change takes a restart.",
	},
	{
		name: "pin_path", takes: text("absolute path", "/sys/fs/bpf/shaperd", "^/"), preset: `"/sys/fs/bpf/shaperd"`,
		about: "Folder on a BPF file system for what attachments leave in the kernel: programs, and the state of buckets " +
			"and connections. A change takes a restart.",
	},
}

func endpointLike(example string) value {
	return text("`host:port` or `\"\"`", example, `^(.*:[0-9]{1,5})?$`)
}

var diversionKeys = keys{
	{
		name: "rules", takes: oneOf(RulesInstall, RulesManual), preset: `"install"`,
		about: "Who sees to the nftables rules and the routing: the daemon, which needs CAP_NET_ADMIN for it, or whoever " +
			"runs the commands that `shaperd rules` prints. The rules stay when the daemon stops; `shaperd rules " +
			"--remove` takes them away.",
	},
	{
		name: "mark", takes: integer(1, 1<<31-1), preset: "21320",
		about: "The firewall mark of such packets, and the number of their routing table, but for 253 to 255. Another " +
			"daemon on the host needs another one.",
	},
}

var asnKeys = keys{
	{
		name: "files", takes: listOf(`string such as "asn.csv"`, text("path", "asn.csv", "")), preset: "[]",
		about: "CSV or TSV of \"first,last,asn[,name]\", \"prefix asn\" (pfx2as) or MMDB, told apart by their content. A " +
			"relative path starts at the folder of the file it stands in.",
	},
}

// Of TCP connections that get nowhere.
var patience = duration(10*time.Millisecond, 8760*time.Hour)

var someDownstreams = listOf(`string such as "10.0.0.5:5432", or table such as { address = "10.0.0.5:5432", weight = 2 }`,
	value{kind: aStringOrTable, keys: downstreamKeys})

var aName = text("1 to 64 letters, digits, `-`, `_` and `.`", "db", `^[A-Za-z0-9._-]{1,64}$`)

var listenKeys = keys{
	{
		name: "name", takes: aName, required: true,
		about: "Unique among listeners and attachments; it labels metrics and log lines.",
	},
	{
		name: "address", takes: listOf(`string such as "tcp://0.0.0.0:5432"`, text("address", "tcp://0.0.0.0:5432", `^(tcp|udp)://.+:[0-9]+(-[0-9]+)?$`)), required: true,
		about: "Protocol, IP address and port or range of ports. `[::]` takes IPv6 alone, so that `0.0.0.0` may stand " +
			"beside it.",
	},
	{
		name: "downstream", takes: someDownstreams, required: true,
		about: "Hosts to forward to, as an address or a name. Without a port, the port that the source asked for; a " +
			"range of ports always maps to the same ports.",
	},
	{
		name: "balance", takes: oneOf(RoundRobin, LeastConnections, SourceHash), preset: `"round-robin"`, needs: "a second downstream",
		about: "How a connection's downstream is chosen, by weight. `\"source-hash\"` sends a source to the same one as " +
			"long as it is there. One that has as many connections as it may is passed over; when all have, a " +
			"connection waits for up to `connect_timeout`, and sources take turns.",
	},
	{
		name: "slow_start", takes: duration(0, time.Hour), preset: `"0s"`, needs: "a second downstream",
		about: "For how long a downstream that has come back gets less than its share.",
	},
	{
		name: "check", takes: tableOf(checkKeys), without: "none", needs: "a tcp address",
		about: "A check connects to each downstream, and closes. It is one of the `max_connections` of the downstream, and left out while that has as many as it may; limits do not count it. Intervals vary by a tenth.",
	},
	{
		name: "eject", takes: tableOf(ejectKeys), without: "after 3, for 10s", needs: "a second downstream",
		about: "After how many failed dials, one after the other, a downstream gets no connections, and for how long, " +
			"unless there is no other.",
	},
	{
		name: "accept_proxy_from", takes: listOf(`prefix or address such as "10.0.0.0/24"`, text("prefix", "10.0.0.0/24", prefixPattern)), preset: "[]", needs: "a tcp address",
		about: "Who begins each TCP connection with a header of the PROXY protocol, version 1 or 2. Limits see the " +
			"source that it announces. A connection from there without one is reset after 5 s at the latest.",
	},
	{
		name: "send_proxy", takes: oneOf(NoProxy, ProxyV1, ProxyV2), preset: `"off"`,
		about: "What tells the downstream of the source: a version of the PROXY protocol, before the first byte, and " +
			"with `\"v2\"` before each UDP datagram too. Limits count it. `\"v1\"` is for TCP alone.",
	},
	{
		name: "transparent", takes: boolean, preset: "false",
		about: "Whether downstreams see the addresses of sources, and not this host's, with no change to the protocol. " +
			"Their answers have to come back through this host.",
	},
	{
		name: "access_log", takes: boolean, preset: "false",
		about: "Whether each TCP connection and UDP flow has a line in the log when it ends: its source, downstream, " +
			"bytes, waits, and how it ended.",
	},
	{
		name: "connect_timeout", takes: duration(time.Millisecond, time.Hour), preset: `"5s"`, needs: "a tcp address",
		about: "How long a TCP connection to the downstream may take to come about.",
	},
	{
		name: "first_byte_timeout", takes: patience, without: "never", needs: "a tcp address",
		about: "When a TCP connection ends whose client sends nothing once it has a downstream. Leave it out where the " +
			"downstream speaks first.",
	},
	{
		name: "tcp_idle_timeout", takes: patience, without: "never", needs: "a tcp address",
		about: "When a TCP connection ends in which no byte moves either way. While shaperd itself holds bytes back, " +
			"time stands still.",
	},
	{
		name: "half_close_timeout", takes: patience, without: "never", needs: "a tcp address",
		about: "The same, for one of which one side has ended.",
	},
	{
		name: "max_lifetime", takes: patience, without: "never", needs: "a tcp address",
		about: "When any TCP connection ends.",
	},
	{
		name: "min_throughput", takes: rate("100B/s"), without: "none", needs: "a tcp address",
		about: "What a TCP connection has to move in each 10 s in which shaperd held nothing back, both ways together.",
	},
	{
		name: "udp_idle_timeout", takes: duration(10*time.Millisecond, 24*time.Hour), preset: `"1m"`, needs: "a udp address",
		about: "A UDP flow without a datagram for this long is forgotten.",
	},
	{
		name: "max_flows", takes: integer(1, 1<<20), preset: "4096", needs: "a udp address",
		about: "UDP flows at once. Each takes a local port of this host, of which there are 28,000 by default. When " +
			"there is no room, an idle flow makes some: one that was never answered, else one whose source has sent " +
			"nothing since the answer, else one that was idle for a quarter of `udp_idle_timeout`; never one with datagrams queued.",
	},
	{
		name: "max_flows_per_source", takes: integer(1, 1<<20), without: "a quarter of `max_flows`", needs: "a udp address",
		about: "UDP flows at once of one IPv4 address, or IPv6 prefix of 64 bits. A source that has so many makes room " +
			"for its next one itself.",
	},
	{
		name: "amplification", takes: integer(0, 1000), preset: "3", needs: "a udp address",
		about: "What a UDP flow's source, which may be forged, is sent comes to at most so many times the bytes that it " +
			"sent, as long as the flow lasts. 0 is no bound: for protocols that send much more than they are asked, " +
			"such as DNS, QUIC, tunnels and streams.",
	},
}

var downstreamKeys = keys{
	{
		name: "address", takes: text("address or name, with a port or without", "10.0.0.5:5432", ""), required: true,
		about: "What a string would say that stands in the place of the table.",
	},
	{
		name: "weight", takes: integer(1, 256), preset: "1",
		about: "Its part among several.",
	},
	{
		name: "max_connections", takes: integer(1, 1<<20), without: "no bound",
		about: "Connections at once, with UDP flows.",
	},
}

var checkKeys = keys{
	{
		name: "interval", takes: duration(10*time.Millisecond, time.Hour), preset: `"2s"`,
		about: "From one check to the next.",
	},
	{
		name: "timeout", takes: duration(10*time.Millisecond, time.Hour), preset: `"1s"`,
		about: "When a check has failed that has not connected.",
	},
	{
		name: "rise", takes: integer(1, 1000), preset: "2",
		about: "Checks that succeed, one after the other, before a downstream is up.",
	},
	{
		name: "fall", takes: integer(1, 1000), preset: "3",
		about: "Checks that fail before it is down.",
	},
}

var ejectKeys = keys{
	{
		name: "after", takes: integer(0, 1000), preset: "3",
		about: "Failed dials; 0 is never.",
	},
	{
		name: "for", takes: duration(10*time.Millisecond, 24*time.Hour), preset: `"10s"`,
		about: "How long it gets no connections.",
	},
}

var attachKeys = keys{
	{
		name: "name", takes: aName, required: true,
		about: "Unique among attachments and listeners.",
	},
	{
		name: "interface", takes: listOf(`string such as "eth0"`, text("name", "eth0", "")), required: true,
		about: "Names of interfaces, or patterns of names with `*`, `?` and sets such as `[0-9]`. Interfaces that appear " +
			"later are picked up.",
	},
	{
		name: "direction", takes: oneOf(Egress, Ingress), preset: `"egress"`,
		about: "What leaves through the interface, or what comes in. For both make two attachments.",
	},
	{
		name: "mode", takes: oneOf(Shape, Police), preset: `"shape"`,
		about: "`\"shape\"` holds packets until they may leave, and drops those that would wait longer than `max_delay`; " +
			"`\"police\"` drops the same ones, and the others pass at once.",
	},
	{
		name: "observe", takes: boolean, preset: "false",
		about: "Whether the limits there only count what they would do. A limit that matches this attachment matches no " +
			"other that enforces, unless the limit itself observes.",
	},
	{
		name: "hook", takes: oneOf(HookAuto, HookTCX, HookClsact, HookXDP), preset: `"auto"`,
		about: "Where in the kernel: `\"tcx\"` (from Linux 6.6), `\"clsact\"`, `\"auto\"`, which is the first of those " +
			"that the kernel has, or `\"xdp\"` in the driver, for direction `\"ingress\"` with mode `\"police\"` or " +
			"`observe = true`.",
	},
	{
		name: "on_stop", takes: oneOf(StopOpen, StopKeep), preset: `"open"`,
		about: "While no daemon runs, traffic passes without limits, or the limits last in force stay so.",
	},
	{
		name: "queue", takes: integer(1000, 10_000_000), preset: "100000", needs: "mode `\"shape\"` and `observe = false`",
		about: "How many packets may wait in each interface's queue (fq). One key gets three quarters of it at the least where no " +
			"other waits, and an equal share beside others.",
	},
	{
		name: "tcp_idle_timeout", takes: duration(time.Second, 240*time.Hour), preset: `"1h"`, needs: "a limit with `max_connections` that matches the attachment",
		about: "A TCP connection that is counted is forgotten after so long without a packet.",
	},
}
