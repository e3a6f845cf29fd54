package config

import (
	"time"

	"shaperd/shaper"
)

const frequencyPattern = `^[0-9]+ ?(pps|/s|/min|/h)$`

var limitKeys = keys{
	{
		name: "name", typ: nameType, required: true,
		doc: "Unique. Buckets keep their state across a reload under this name.",
	},
	{
		name: "match", typ: tableType(matchKeys), defText: "all at listeners",
		doc: "What the limit is for. What is left out matches all.",
	},
	{
		name: "key", typ: arrayType(`string such as "source"`, valueType{enumNames: shaper.FieldNames()}), def: "[]",
		doc: "What splits the traffic: each combination has a bucket of its own; `[]` is one for all. `\"listen\"` is " +
			"for listeners, `\"attach\"` for attachments. `\"asn\"` needs `[asn]` files; all addresses that they do " +
			"not know share AS 0. At attachments a connection is what has the same addresses, ports and protocol.",
	},
	{
		name: "ipv4_prefix", typ: integerType(1, 32), def: "32", needs: "`\"source\"` in `key`",
		doc: "How many bits of an IPv4 source make the key.",
	},
	{
		name: "ipv6_prefix", typ: integerType(1, 128), def: "64", needs: "`\"source\"` in `key`",
		doc: "How many bits of an IPv6 source make the key; 64 are what one site has.",
	},
	{
		name: "direction", typ: enumType(shaper.ToDownstream, shaper.FromDownstream, shaper.Both), def: `"to-downstream"`, needs: "`rate` or `packets`",
		doc: "Which way traffic counts; `\"both\"` has one bucket for the sum. At listeners.",
	},
	{
		name: "rate", typ: rateType("10Mbit/s"), defText: "none", overridable: true,
		doc: "How fast data may pass, counted without packet headers.",
	},
	{
		name: "packets", typ: stringType("count a second, minute or hour", "5000pps", frequencyPattern), defText: "none", overridable: true,
		doc: "How many packets may pass; at listeners datagrams, where UDP alone is matched.",
	},
	{
		name: "burst", typ: sizeType("64KiB"), def: `"0B"`, needs: "`rate`", overridable: true,
		doc: "How much may pass at once after a pause: at most what passes in 30 days. `\"0B\"` is strict smoothing.",
	},
	{
		name: "burst_packets", typ: integerType(0, 1e12), def: "0", needs: "`packets`", overridable: true,
		doc: "How many may pass at once after a pause. 0 is strict smoothing.",
	},
	{
		name: "overhead", typ: stringType("size to `1kB`", "38B", sizePattern), def: `"0B"`, needs: "`rate`", overridable: true,
		doc: "What each packet counts for beside its payload: headers, and on Ethernet the gaps between frames. Where " +
			"`packets` can be counted.",
	},
	{
		name: "max_delay", typ: durationType(0, shaper.MaxMaxDelay), def: `"200ms"`, needs: "`rate` or `packets`", overridable: true,
		doc: "How long data may wait in the queue of its bucket. What would wait longer is dropped; at listeners a TCP " +
			"source is held back.",
	},
	{
		name: "scheduling", typ: enumType(shaper.ShareFair, shaper.ShareFIFO), def: `"fair"`, needs: "`rate` or `packets`, at listeners", overridable: true,
		doc: "How those share a bucket who wait for it: with `\"fair\"` sources take turns, and the connections or " +
			"flows of a source; `\"fifo\"` is first come, first served.",
	},
	{
		name: "ecn_mark", typ: stringType("percentage from `1%` to `100%`", "50%", `^[0-9]+ ?%$`), def: `"50%"`, needs: "`rate` or `packets`, at attachments", overridable: true,
		doc: "The part of `max_delay` beyond which packets that can carry a mark of congestion (ECN) get it. " +
			"`\"100%\"` is never.",
	},
	{
		name: "max_connections", typ: integerType(1, 1<<20), defText: "no bound", overridable: true,
		doc: "Connections in flight, for each key. A UDP flow is one until its `udp_idle_timeout` has passed, or until " +
			"somebody needs its place and it is idle; a new one waits as a connection does, and those of sources that have none " +
			"that was answered take turns as one source. At attachments only TCP has connections, and at most 4 limits with this key may match one.",
	},
	{
		name: "new_connections", typ: stringType("count a second, minute or hour", "50/s", `^[0-9]+ ?/(s|min|h)$`), defText: "no bound", overridable: true,
		doc: "New connections, for each key.",
	},
	{
		name: "queue_timeout", typ: durationType(0, time.Hour), def: `"2s"`, needs: "`max_connections` or `new_connections`", overridable: true,
		doc: "How long a connection may wait for its turn, counted from when it came. At attachments, how long its " +
			"first packet may wait for `new_connections`.",
	},
	{
		name: "max_queue", typ: integerType(0, 1<<20), def: "1000", needs: "`max_connections` or `new_connections`, at listeners", overridable: true,
		doc: "How many connections may wait at once, over all keys. Sources take turns.",
	},
	{
		name: "block", typ: booleanType, def: "false",
		doc: "Whether all that is matched is refused. Beside it only `name`, `match`, `refuse_with`, `reply` and " +
			"`observe` have an effect.",
	},
	{
		name: "refuse_with", typ: enumType(shaper.ExcessReset, shaper.ExcessClose, shaper.ExcessDrop, shaper.ExcessReply, shaper.ExcessReject), defText: "`\"reset\"`; `\"drop\"` at listeners where `match.protocol` is `\"udp\"`", needs: "`max_connections`, `new_connections`, `block` or UDP at listeners",
		doc: "What a refused connection gets: `\"reset\"`, `\"close\"` or `\"reply\"` at listeners, `\"reset\"` or " +
			"`\"drop\"` (nothing) at attachments. A refused datagram gets nothing, or with `\"reject\"` an ICMP " +
			"message that its port cannot be reached, at most 1,000 of them a second, which takes CAP_NET_RAW; " +
			"`\"reject\"` resets TCP connections.",
	},
	{
		name: "reply", typ: stringType("`\"http-429\"`, or a text of at most 4096 bytes", "http-429", ""), defText: "none", needs: "`refuse_with = \"reply\"`",
		doc: "What a refused connection is told. `{retry_after}` in it becomes the seconds after which the client may " +
			"try again.",
	},
	{
		name: "observe", typ: booleanType, def: "false", overridable: true,
		doc: "Whether the limit only counts what it would do: a dry run. It observes as well where `[daemon]` or the " +
			"attachment does.",
	},
}

var matchKeys = keys{
	{
		name: "listen", typ: arrayType(`name of a listener, such as "db"`, stringType("name", "db", "")), defText: "all",
		doc: "Names of listeners.",
	},
	{
		name: "attach", typ: arrayType(`name of an attachment, such as "uplink"`, stringType("name", "uplink", "")), defText: "the limit is for listeners",
		doc: "Names of attachments; not together with `listen`.",
	},
	{
		name: "protocol", typ: enumType(shaper.TCP, shaper.UDP, shaper.ICMP), defText: "all",
		doc: "`\"icmp\"`, which is that of IPv6 too, is for attachments.",
	},
	{
		name: "source", typ: arrayType(`prefix or address such as "192.0.2.0/24"`, stringType("prefix", "192.0.2.0/24", prefixPattern)), defText: "all",
		doc: "Source addresses, or prefixes of them.",
	},
	{
		name: "destination", typ: arrayType(`prefix or address such as "10.0.0.5"`, stringType("prefix", "10.0.0.5", prefixPattern)), defText: "all",
		doc: "Destination addresses, or prefixes of them; at attachments.",
	},
	{
		name: "asn", typ: arrayType(`AS number such as 64500 or "AS64500"`, stringType("AS number", "AS64500", `^([aA][sS])?[0-9]+$`).orInteger(1, 1<<32-1)), defText: "all",
		doc: "AS numbers of source addresses; needs `[asn]` files.",
	},
	{
		name: "port", typ: arrayType(`port such as 5432, or range such as "8000-8010"`, stringType("port", "5432", `^[0-9]+(-[0-9]+)?$`).orInteger(1, 65535)), defText: "all",
		doc: "Destination ports and ranges, as the source sees them; at most 1024.",
	},
}

// overrideKeys are the name of a limit, and what may be set in it.
var overrideKeys = func() keys {
	all := keys{{name: "limit", typ: stringType("name of a limit", "db", ""), required: true, doc: "Which limit."}}
	for _, k := range limitKeys {
		if k.overridable {
			k.def, k.defText = "", "what stands in the limit"
			all = append(all, k)
		}
	}
	return all
}()
