package config

import (
	"time"

	"shaperd.dev/shaperd/shaper"
)

const frequencyPattern = `^[0-9]+ ?(pps|/s|/min|/h)$`

var limitKeys = keys{
	{
		name: "name", typ: nameType, required: true,
		doc: "Unique. Buckets keep their state across a reload under this name.",
	},
	{
		name: "match", typ: tableType(matchKeys), defText: "all at listeners",
		doc: "Traffic that the limit applies to. A key that is missing matches everything.",
	},
	{
		name: "key", typ: arrayType(`string such as "source"`, valueType{enumNames: shaper.FieldNames()}), def: "[]",
		doc: "Attributes that split the traffic: each combination of their values has its own bucket; `[]` is one " +
			"bucket for all. `\"listen\"` is for listeners, `\"attach\"` for attachments. `\"asn\"` needs `[asn]` " +
			"files; addresses that are not in them share AS 0. At attachments a connection is the packets with " +
			"the same addresses, ports and protocol.",
	},
	{
		name: "ipv4_prefix", typ: integerType(1, 32), def: "32", needs: "`\"source\"` in `key`",
		doc: "Bits of an IPv4 source that make the key.",
	},
	{
		name: "ipv6_prefix", typ: integerType(1, 128), def: "64", needs: "`\"source\"` in `key`",
		doc: "Bits of an IPv6 source that make the key; 64 is the prefix of one site.",
	},
	{
		name: "direction", typ: enumType(shaper.ToDownstream, shaper.FromDownstream, shaper.Both), def: `"to-downstream"`, needs: "`rate` or `packets`",
		doc: "Direction of the traffic that counts; `\"both\"` has one bucket for the sum. At listeners.",
	},
	{
		name: "rate", typ: rateType("10Mbit/s"), defText: "none", overridable: true,
		doc: "Rate of data, without packet headers.",
	},
	{
		name: "packets", typ: stringType("count a second, minute or hour", "5000pps", frequencyPattern), defText: "none", overridable: true,
		doc: "Rate of packets; at listeners datagrams, if UDP alone matches.",
	},
	{
		name: "burst", typ: sizeType("64KiB"), def: `"0B"`, needs: "`rate`", overridable: true,
		doc: "Bytes that may leave at once after a pause: at most what passes in 30 days. `\"0B\"` is strict " +
			"smoothing.",
	},
	{
		name: "burst_packets", typ: integerType(0, 1e12), def: "0", needs: "`packets`", overridable: true,
		doc: "Packets that may leave at once after a pause. 0 is strict smoothing.",
	},
	{
		name: "overhead", typ: stringType("size to `1kB`", "38B", sizePattern), def: `"0B"`, needs: "`rate`", overridable: true,
		doc: "Bytes added to the payload of each packet: headers, and on Ethernet the gaps between frames. Where " +
			"`packets` can be counted.",
	},
	{
		name: "max_delay", typ: durationType(0, shaper.MaxMaxDelay), def: `"200ms"`, needs: "`rate` or `packets`", overridable: true,
		doc: "Maximum delay of data in the queue of its bucket. Packets and datagrams that would wait longer are " +
			"dropped; at listeners a TCP source is slowed down.",
	},
	{
		name: "scheduling", typ: enumType(shaper.ScheduleFair, shaper.ScheduleFIFO), def: `"fair"`, needs: "`rate` or `packets`, at listeners", overridable: true,
		doc: "Order of the units that wait for one bucket: with `\"fair\"` sources take turns, and the connections " +
			"or flows of a source; `\"fifo\"` is first come, first served.",
	},
	{
		name: "ecn_mark", typ: stringType("percentage from `1%` to `100%`", "50%", `^[0-9]+ ?%$`), def: `"50%"`, needs: "`rate` or `packets`, at attachments", overridable: true,
		doc: "Part of `max_delay` beyond which packets that support it get a congestion mark (ECN). `\"100%\"` is " +
			"never.",
	},
	{
		name: "max_connections", typ: integerType(1, 1<<20), defText: "no bound", overridable: true,
		doc: "Maximum number of connections in flight, for each key. A UDP flow counts until its " +
			"`udp_idle_timeout`, or until it is evicted while idle; a new flow waits as a connection does, and " +
			"unverified sources take turns as one source. At attachments only TCP connections count, and at most " +
			"4 limits with this key may match one attachment.",
	},
	{
		name: "new_connections", typ: stringType("count a second, minute or hour", "50/s", `^[0-9]+ ?/(s|min|h)$`), defText: "no bound", overridable: true,
		doc: "Rate of new connections, for each key.",
	},
	{
		name: "queue_timeout", typ: durationType(0, time.Hour), def: `"2s"`, needs: "`max_connections` or `new_connections`", overridable: true,
		doc: "Maximum wait of a connection for admission, from its arrival. At attachments, maximum wait of its " +
			"first packet for `new_connections`.",
	},
	{
		name: "max_queue", typ: integerType(0, 1<<20), def: "1000", needs: "`max_connections` or `new_connections`, at listeners", overridable: true,
		doc: "Maximum number of connections that wait for admission, over all keys. Sources take turns.",
	},
	{
		name: "block", typ: booleanType, def: "false",
		doc: "Refuse everything that matches. Only `name`, `match`, `refuse_with`, `reply` and `observe` have an " +
			"effect next to it.",
	},
	{
		name: "refuse_with", typ: enumType(shaper.RefuseReset, shaper.RefuseClose, shaper.RefuseDrop, shaper.RefuseReply, shaper.RefuseReject), defText: "`\"reset\"`; `\"drop\"` at listeners where `match.protocol` is `\"udp\"`", needs: "`max_connections`, `new_connections`, `block` or UDP at listeners",
		doc: "Answer to a refused connection: `\"reset\"`, `\"close\"` or `\"reply\"` at listeners, `\"reset\"` or " +
			"`\"drop\"` (none) at attachments. A refused datagram is dropped, or with `\"reject\"` answered with an " +
			"ICMP port unreachable message, at most 1,000 a second, which needs CAP_NET_RAW; `\"reject\"` resets " +
			"TCP connections.",
	},
	{
		name: "reply", typ: stringType("`\"http-429\"`, or a text of at most 4096 bytes", "http-429", ""), defText: "none", needs: "`refuse_with = \"reply\"`",
		doc: "Text that a refused connection gets. `{retry_after}` in it is replaced by the seconds after which " +
			"the client may try again.",
	},
	{
		name: "observe", typ: booleanType, def: "false", overridable: true,
		doc: "A dry run of this limit: it counts what it would delay or refuse. `observe = true` of the daemon or " +
			"an attachment applies too.",
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
		doc: "`\"icmp\"`, which includes that of IPv6, is for attachments.",
	},
	{
		name: "source", typ: arrayType(`prefix or address such as "192.0.2.0/24"`, stringType("prefix", "192.0.2.0/24", prefixPattern)), defText: "all",
		doc: "Source addresses or prefixes.",
	},
	{
		name: "destination", typ: arrayType(`prefix or address such as "10.0.0.5"`, stringType("prefix", "10.0.0.5", prefixPattern)), defText: "all",
		doc: "Destination addresses or prefixes; at attachments.",
	},
	{
		name: "asn", typ: arrayType(`AS number such as 64500 or "AS64500"`, stringType("AS number", "AS64500", `^([aA][sS])?[0-9]+$`).orInteger(1, 1<<32-1)), defText: "all",
		doc: "AS numbers of source addresses; needs `[asn]` files.",
	},
	{
		name: "port", typ: arrayType(`port such as 5432, or range such as "8000-8010"`, stringType("port", "5432", `^[0-9]+(-[0-9]+)?$`).orInteger(1, 65535)), defText: "all",
		doc: "Destination ports and ranges that the source connects to; at most 1024.",
	},
}

// overrideKeys are the name of a limit, and what may be set in it.
var overrideKeys = func() keys {
	all := keys{{name: "limit", typ: stringType("name of a limit", "db", ""), required: true, doc: "Name of the limit."}}
	for _, k := range limitKeys {
		if k.overridable {
			k.def, k.defText = "", "the value in the limit"
			all = append(all, k)
		}
	}
	return all
}()
