package config

import (
	"time"

	"shaperd/shaper"
)

const frequencyPattern = `^[0-9]+ ?(pps|/s|/min|/h)$`

var limitKeys = keys{
	{
		name: "name", takes: aName, required: true,
		about: "Unique. Buckets keep their state across a reload under this name.",
	},
	{
		name: "match", takes: tableOf(matchKeys), without: "all at listeners",
		about: "What the limit is for. What is left out matches all.",
	},
	{
		name: "key", takes: listOf(`string such as "source"`, value{names: shaper.FieldNames()}), preset: "[]",
		about: "What splits the traffic: each combination has a bucket of its own; `[]` is one for all. `\"listen\"` is " +
			"for listeners, `\"attach\"` for attachments. `\"asn\"` needs `[asn]` files; all addresses that they do " +
			"not know share AS 0. At attachments a connection is what has the same addresses, ports and protocol.",
	},
	{
		name: "ipv4_prefix", takes: integer(1, 32), preset: "32", needs: "`\"source\"` in `key`",
		about: "How many bits of an IPv4 source make the key.",
	},
	{
		name: "ipv6_prefix", takes: integer(1, 128), preset: "64", needs: "`\"source\"` in `key`",
		about: "How many bits of an IPv6 source make the key; 64 are what one site has.",
	},
	{
		name: "direction", takes: oneOf(shaper.ToDownstream, shaper.FromDownstream, shaper.Both), preset: `"to-downstream"`, needs: "`rate` or `packets`",
		about: "Which way traffic counts; `\"both\"` has one bucket for the sum. At listeners.",
	},
	{
		name: "rate", takes: rate("10Mbit/s"), without: "none", settable: true,
		about: "How fast data may pass, counted without packet headers.",
	},
	{
		name: "packets", takes: text("count a second, minute or hour", "5000pps", frequencyPattern), without: "none", settable: true,
		about: "How many packets may pass; at listeners datagrams, where UDP alone is matched.",
	},
	{
		name: "burst", takes: size("64KiB"), preset: `"0B"`, needs: "`rate`", settable: true,
		about: "How much may pass at once after a pause: at most what passes in 30 days. `\"0B\"` is strict smoothing.",
	},
	{
		name: "burst_packets", takes: integer(0, 1e12), preset: "0", needs: "`packets`", settable: true,
		about: "How many may pass at once after a pause. 0 is strict smoothing.",
	},
	{
		name: "overhead", takes: text("size to `1kB`", "38B", sizePattern), preset: `"0B"`, needs: "`rate`", settable: true,
		about: "What each packet counts for beside its payload: headers, and on Ethernet the gaps between frames. Where " +
			"`packets` can be counted.",
	},
	{
		name: "max_delay", takes: duration(0, shaper.MaxMaxDelay), preset: `"200ms"`, needs: "`rate` or `packets`", settable: true,
		about: "How long data may wait in the queue of its bucket. What would wait longer is dropped; at listeners a TCP " +
			"source is held back.",
	},
	{
		name: "scheduling", takes: oneOf(shaper.ShareFair, shaper.ShareFIFO), preset: `"fair"`, needs: "`rate` or `packets`, at listeners", settable: true,
		about: "How those share a bucket who wait for it: with `\"fair\"` sources take turns, and the connections or " +
			"flows of a source; `\"fifo\"` is first come, first served.",
	},
	{
		name: "ecn_mark", takes: text("percentage from `1%` to `100%`", "50%", `^[0-9]+ ?%$`), preset: `"50%"`, needs: "`rate` or `packets`, at attachments", settable: true,
		about: "The part of `max_delay` beyond which packets that can carry a mark of congestion (ECN) get it. " +
			"`\"100%\"` is never.",
	},
	{
		name: "max_connections", takes: integer(1, 1<<20), without: "no bound", settable: true,
		about: "Connections in flight, for each key. A UDP flow is one until its `udp_idle_timeout` has passed, or until " +
			"somebody needs its place and it is idle; a new one waits as a connection does, and those of sources that have none " +
			"that was answered take turns as one source. At attachments only TCP has connections, and at most 4 limits with this key may match one.",
	},
	{
		name: "new_connections", takes: text("count a second, minute or hour", "50/s", `^[0-9]+ ?/(s|min|h)$`), without: "no bound", settable: true,
		about: "New connections, for each key.",
	},
	{
		name: "queue_timeout", takes: duration(0, time.Hour), preset: `"2s"`, needs: "`max_connections` or `new_connections`", settable: true,
		about: "How long a connection may wait for its turn, counted from when it came. At attachments, how long its " +
			"first packet may wait for `new_connections`.",
	},
	{
		name: "max_queue", takes: integer(0, 1<<20), preset: "1000", needs: "`max_connections` or `new_connections`, at listeners", settable: true,
		about: "How many connections may wait at once, over all keys. Sources take turns.",
	},
	{
		name: "block", takes: boolean, preset: "false",
		about: "Whether all that is matched is refused. Beside it only `name`, `match`, `refuse_with`, `reply` and " +
			"`observe` have an effect.",
	},
	{
		name: "refuse_with", takes: oneOf(shaper.ExcessReset, shaper.ExcessClose, shaper.ExcessDrop, shaper.ExcessReply, shaper.ExcessReject), without: "`\"reset\"`; `\"drop\"` at listeners where `match.protocol` is `\"udp\"`", needs: "`max_connections`, `new_connections`, `block` or UDP at listeners",
		about: "What a refused connection gets: `\"reset\"`, `\"close\"` or `\"reply\"` at listeners, `\"reset\"` or " +
			"`\"drop\"` (nothing) at attachments. A refused datagram gets nothing, or with `\"reject\"` an ICMP " +
			"message that its port cannot be reached, at most 1,000 of them a second, which takes CAP_NET_RAW; " +
			"`\"reject\"` resets TCP connections.",
	},
	{
		name: "reply", takes: text("`\"http-429\"`, or a text of at most 4096 bytes", "http-429", ""), without: "none", needs: "`refuse_with = \"reply\"`",
		about: "What a refused connection is told. `{retry_after}` in it becomes the seconds after which the client may " +
			"try again.",
	},
	{
		name: "observe", takes: boolean, preset: "false", settable: true,
		about: "Whether the limit only counts what it would do: a dry run. It observes as well where `[daemon]` or the " +
			"attachment does.",
	},
}

var matchKeys = keys{
	{
		name: "listen", takes: listOf(`name of a listener, such as "db"`, text("name", "db", "")), without: "all",
		about: "Names of listeners.",
	},
	{
		name: "attach", takes: listOf(`name of an attachment, such as "uplink"`, text("name", "uplink", "")), without: "the limit is for listeners",
		about: "Names of attachments; not together with `listen`.",
	},
	{
		name: "protocol", takes: oneOf(shaper.TCP, shaper.UDP, shaper.ICMP), without: "all",
		about: "`\"icmp\"`, which is that of IPv6 too, is for attachments.",
	},
	{
		name: "source", takes: listOf(`prefix or address such as "192.0.2.0/24"`, text("prefix", "192.0.2.0/24", prefixPattern)), without: "all",
		about: "Source addresses, or prefixes of them.",
	},
	{
		name: "destination", takes: listOf(`prefix or address such as "10.0.0.5"`, text("prefix", "10.0.0.5", prefixPattern)), without: "all",
		about: "Destination addresses, or prefixes of them; at attachments.",
	},
	{
		name: "asn", takes: listOf(`AS number such as 64500 or "AS64500"`, text("AS number", "AS64500", `^([aA][sS])?[0-9]+$`).orInteger(1, 1<<32-1)), without: "all",
		about: "AS numbers of source addresses; needs `[asn]` files.",
	},
	{
		name: "port", takes: listOf(`port such as 5432, or range such as "8000-8010"`, text("port", "5432", `^[0-9]+(-[0-9]+)?$`).orInteger(1, 65535)), without: "all",
		about: "Destination ports and ranges, as the source sees them; at most 1024.",
	},
}

// overrideKeys are the name of a limit, and what may be set in it.
var overrideKeys = func() keys {
	all := keys{{name: "limit", takes: text("name of a limit", "db", ""), required: true, about: "Which limit."}}
	for _, k := range limitKeys {
		if k.settable {
			k.preset, k.without = "", "what stands in the limit"
			all = append(all, k)
		}
	}
	return all
}()
