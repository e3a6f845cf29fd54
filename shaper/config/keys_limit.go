package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper"
)

var limitKeys = keys{
	{
		name: "name", typ: nameType, required: true,
		field: fieldOf(func(l *shaper.Limit) *string { return &l.Name }),
		text:  noText,
		doc:   "Unique among limits. Buckets keep their state across a reload under this name.",
	},
	{
		name: "match", typ: tableType(matchKeys), defText: "all traffic at listeners",
		doc: "Traffic that the limit applies to. A missing key matches everything.",
	},
	{
		name: "except", typ: tableType(exceptKeys), defText: "none",
		shown: when(func(l *shaper.Limit) bool { return l.Except.Any() }),
		doc:   "Sources that the limit does not apply to. A source is exempt if any of these keys matches it.",
	},
	{
		name: "key", typ: arrayType(`string such as "source"`, valueType{enumNames: keyNames, example: tlvExample, pattern: `^tlv:(0x)?[0-9A-Fa-f]+$`}, parseField, asText), def: "[]",
		field: keyField,
		text: on(func(l *shaper.Limit) string {
			switch {
			case l.Block, l.Shed.Any():
				return ""
			case l.Key == 0:
				return "one bucket for all"
			}
			return strings.ReplaceAll(l.KeyText(), ",", ", ")
		}),
		doc: "Attributes that split the traffic. Each combination of their values, a key value, has its own bucket; `[]` is " +
			"one bucket for all. `\"listen\"` is for listeners, `\"attach\"` for attachments. `\"asn\"` needs `[asn]` " +
			"files; addresses that are in none of them share AS 0. `\"destination\"` is the address to which the source " +
			"connects or sends; it cannot be combined with `\"source\"`. `\"downstream\"` is the selected downstream of any " +
			"listener, with its port as configured; it is for rates at listeners only. `\"country\"` needs an `[asn]` file " +
			"with countries; unknown countries share a bucket. `\"tlv:0xE0\"` is the value of the first TLV of this type, " +
			"among the first 16 TLVs, in the PROXY header (version 2) of a proxy in `accept_proxy_from`; connections " +
			"without it share a bucket. If clients choose the value, as for 0x02 (SNI), a client can have any number of " +
			"buckets. At attachments, `\"connection\"` is the packets with the same addresses, ports and protocol.",
	},
	{
		name: "ipv4_prefix", typ: integerType(1, 32), def: "32", needs: []condition{byAddress},
		field: fieldOf(func(l *shaper.Limit) *int { return &l.IPv4Prefix }),
		label: "source prefix", text: prefixesOf(shaper.KeySource),
		doc: "Number of leading bits of an IPv4 source or destination in the key.",
	},
	{
		name: "ipv6_prefix", typ: integerType(1, 128), defText: "`64`, or `128` of a destination", needs: []condition{byAddress},
		field: fieldOf(func(l *shaper.Limit) *int { return &l.IPv6Prefix }),
		preset: on(func(l *shaper.Limit) any {
			if l.Key&shaper.KeyDestination != 0 {
				return 128
			}
			return 64
		}),
		label: "destination prefix", text: prefixesOf(shaper.KeyDestination),
		doc: "Number of leading bits of an IPv6 source or destination in the key. 64 is the prefix of one site.",
	},
	{
		name: "shared", typ: booleanType, def: "false", needs: []condition{notPerConnection},
		field:    fieldOf(func(l *shaper.Limit) *bool { return &l.Shared }),
		omitZero: true,
		doc: "One bucket per key value for all hosts of the group in `[shared]`: all hosts together stay within the rates " +
			"and caps. Hosts borrow slots of `max_connections` from each other, so `max_connections` may be less than " +
			"`hosts`; at attachments each host has 1/`hosts` of them, rounded down. Listeners, attachments and downstreams " +
			"in `match` or `key` need the same names on all hosts. An override applies to its host only: each host applies " +
			"its parts to its own values.",
	},
	{
		name: "direction", typ: enumType(shaper.ToDownstream, shaper.FromDownstream, shaper.Both), def: `"to-downstream"`, needs: []condition{paced, oneDirection},
		field: fieldOf(func(l *shaper.Limit) *shaper.Direction { return &l.Direction }),
		shown: when(func(l *shaper.Limit) bool { return paces(l) && !l.InPacketPlane() }), textAfter: "ecn_mark",
		doc: "Direction of the traffic that counts. `\"both\"` has one bucket for the sum. Listeners only.",
	},
	*valueKeys.find("rate"),
	*valueKeys.find("packets"),
	*valueKeys.find("burst"),
	*valueKeys.find("burst_packets"),
	{
		name: "overhead", typ: boundedSizeType("38B", shaper.MaxOverhead), def: `"0B"`, needs: []condition{rateFor(func(l *shaper.Limit) bool { return l.Overhead == 0 })}, overridable: true,
		field:    fieldOf(func(l *shaper.Limit) *int { return &l.Overhead }),
		omitZero: true,
		doc: "Bytes added to the payload of each packet, for headers and, on Ethernet, for the gaps between frames. For " +
			"limits that can count `packets`.",
	},
	{
		name: "max_delay", typ: durationType(0, shaper.MaxMaxDelay), def: `"200ms"`, needs: []condition{paced}, overridable: true,
		field: fieldOf(func(l *shaper.Limit) *time.Duration { return &l.MaxDelay }),
		doc: "Maximum delay of data in the queue of its bucket. Packets and datagrams that would wait longer are dropped. A " +
			"TCP source at a listener is slowed down instead.",
	},
	{
		name: "scheduling", typ: enumType(shaper.ScheduleFair, shaper.ScheduleFIFO), def: `"fair"`, needs: []condition{paced, atListeners("unsupported at attachments, where packets of a bucket leave in order of arrival"), notPerConnection}, overridable: true, perHost: true,
		field: fieldOf(func(l *shaper.Limit) *shaper.Scheduling { return &l.Scheduling }),
		doc: "Order of the units that wait for one bucket. With `\"fair\"`, sources take turns, and so do the connections or " +
			"flows of each source. `\"fifo\"` is first come, first served.",
	},
	turnsKey,
	{
		name: "ecn_mark", typ: quantityType("percentage from `1%` to `100%`", "50%", `^[0-9]+ ?%$`, parsePercent, showPercent), def: `"50%"`, needs: []condition{pacedAtAttachments, atAttachments}, overridable: true, perHost: true,
		field: fieldOf(func(l *shaper.Limit) *int { return &l.ECNMark }),
		preset: on(func(l *shaper.Limit) any {
			if l.InPacketPlane() {
				return 50
			}
			return 0
		}),
		doc: "Part of `max_delay` above which ECN-capable packets get a congestion mark (CE). `\"100%\"` disables marking.",
	},
	*valueKeys.find("max_connections"),
	{
		name: "adapt", typ: enumType(shaper.AdaptOff, shaper.AdaptObserve, shaper.AdaptOn), def: `"off"`, needs: []condition{capping, atListeners("unsupported at attachments, which do not see the answers of the downstream")}, overridable: true,
		field:    fieldOf(func(l *shaper.Limit) *shaper.Adaptation { return &l.Adapt }),
		omitZero: true,
		doc: "Adapt the maximum in flight to the downstream, between `min_connections` and `max_connections`. `\"on\"` uses " +
			"the lowest maximum at which the downstream answers nearly as often as it can. `\"observe\"` only computes it. " +
			"For TCP limits without `key`; connections must be able to wait. With `shared = true`, hosts compute one " +
			"maximum together and need a `store`. See [adaptive maximum](overload.md#an-adaptive-maximum).",
	},
	{
		name: "min_connections", typ: integerType(1, 1<<20), def: "1", needs: []condition{adapting}, overridable: true,
		field: fieldOf(func(l *shaper.Limit) *int { return &l.MinConnections }),
		preset: on(func(l *shaper.Limit) any {
			if l.Adapt == shaper.AdaptOn {
				return 1
			}
			return 0
		}),
		doc: "Lower bound of the maximum in flight that `adapt` may choose.",
	},
	{
		name: "slot_for", typ: enumType(shaper.PerConnection, shaper.PerTurn, shaper.PerTransaction), def: `"connection"`, needs: []condition{capping, atListeners("unsupported at attachments, where nothing waits for a slot")}, overridable: true,
		field:    fieldOf(func(l *shaper.Limit) *shaper.SlotFor { return &l.SlotFor }),
		omitZero: true,
		doc: "Holder of a slot of `max_connections`. With `\"turn\"`, a TCP connection holds a slot from a request of its " +
			"client until `turn_gap` after the answer; requests without a slot wait. Use it for connection pools, whose " +
			"connections stay open. `\"transaction\"` also holds the slot until the end of a PostgreSQL transaction, and no " +
			"longer; it cannot see the end within TLS. Cannot be combined with `new_connections`. See [slots for " +
			"turns](overload.md#slots-for-turns).",
	},
	{
		name: "turn_gap", typ: durationType(0, shaper.MaxTurnGap), def: `"10ms"`, needs: []condition{takingTurns}, overridable: true,
		field: fieldOf(func(l *shaper.Limit) *time.Duration { return &l.TurnGap }),
		preset: on(func(l *shaper.Limit) any {
			if l.SlotFor.InTurns() {
				return 10 * time.Millisecond
			}
			return time.Duration(0)
		}),
		doc: "A turn ends when an answer has begun and no byte has moved for this long. Choose a value above the pauses " +
			"within an answer and, if several requests belong together and hold locks, above the time a client takes from " +
			"an answer to its next request. While others wait, a connection sends no further request after 10 times this " +
			"value, until it gets a slot again.",
	},
	{
		name: "yield_after", typ: durationType(0, 240*time.Hour), def: `"0s"`, needs: []condition{capping, atListeners("unsupported at attachments, where no connection waits for a slot")}, overridable: true,
		field:    fieldOf(func(l *shaper.Limit) *time.Duration { return &l.YieldAfter }),
		omitZero: true,
		doc: "Idle time after which a TCP connection may be closed because another source waits for its slot. shaperd closes " +
			"the longest idle connection of the source that holds the most slots, and only if that source holds more than " +
			"the waiting one. It never closes a connection to which the first answer is due. 0 disables this.",
	},
	reserveKey,
	*valueKeys.find("new_connections"),
	*valueKeys.find("burst_connections"),
	{
		name: "algorithm", typ: enumType(shaper.LeakyBucket, shaper.FixedWindow, shaper.SlidingWindow, shaper.SlidingLog), def: `"leaky"`, needs: []condition{anyOf("new_connections")}, overridable: true,
		field:    fieldOf(func(l *shaper.Limit) *shaper.Algorithm { return &l.Algorithm }),
		omitZero: true,
		doc: "Algorithm that counts `new_connections`. `\"leaky\"` spaces them; with `burst_connections` it is a token " +
			"bucket. The others allow the full number in each window of the period (`\"fixed-window\"`), in two weighted " +
			"windows (`\"sliding-window\"`), or in any interval of the length of the period (`\"sliding-log\"`, at most " +
			"1000 connections). The last two are for listeners. Cannot be combined with `shared = true`. See " +
			"[choosing](choosing.md).",
	},
	*quotaKeys.find("quota"),
	*quotaKeys.find("quota_over"),
	{
		name: "queue_timeout", typ: durationType(0, time.Hour), def: `"2s"`, needs: []condition{counting, waiting}, overridable: true,
		field: fieldOf(func(l *shaper.Limit) *time.Duration { return &l.QueueTimeout }),
		doc: "Maximum wait of a connection for admission, from its arrival. At attachments, maximum wait of its first packet " +
			"for `new_connections`.",
	},
	{
		name: "queue_target", typ: durationType(0, time.Hour), def: `"0s"`, needs: []condition{counting, atListeners("unsupported at attachments, where no connection waits for a slot")}, overridable: true, perHost: true,
		field:    fieldOf(func(l *shaper.Limit) *time.Duration { return &l.QueueTarget }),
		omitZero: true,
		doc: "Maximum wait of the connections of a source with a standing queue, that is, a source of which every connection " +
			"served in the last five times `queue_target` has waited at least half of it. Connections that would wait " +
			"longer are refused at once, so that the others are served in time. With 0, the maximum is `queue_timeout`.",
	},
	{
		name: "max_queue", typ: integerType(0, 1<<20), def: "1000", needs: []condition{counting, queueing}, overridable: true, perHost: true,
		field: fieldOf(func(l *shaper.Limit) *int { return &l.MaxQueue }),
		preset: on(func(l *shaper.Limit) any {
			if l.InPacketPlane() {
				return 0
			}
			return 1000
		}),
		doc: "Maximum number of connections that wait for admission, over all key values. Sources take turns.",
	},
	{
		name: "for", typ: namedTablesType("gold", tierKeys), defText: "none", needs: []condition{bySource, atListeners(noTiers)},
		shown: when(func(l *shaper.Limit) bool { return len(l.For) > 0 }),
		text:  on(tiersText),
		doc: "Other values for the buckets of groups, as in `for.gold = { rate = \"100Mbit/s\" }`. The " +
			"[table](#for-of-limit) lists the keys; the limit must set each of them too. The longest prefix of a source " +
			"decides, and takes precedence over its AS. Two groups must not have the same prefix. Cannot be combined with " +
			"`shared = true`.",
	},
	{
		name: "values", typ: dataFileType("customers.csv"), defText: "none", needs: []condition{bySource, atListeners(noTiers)},
		field:    fieldOf(func(l *shaper.Limit) *string { return &l.ValuesFile }),
		omitZero: true,
		doc: "File with other values for the buckets of individual sources. The first line names the columns, such as " +
			"`source,rate,max_connections`, with keys of `for`. Each further line has a source or prefix and its values; an " +
			"empty value is the value of the limit. At most 200,000 lines. The longest prefix of a source decides; a line " +
			"takes precedence over a group with the same prefix. A change to the file takes effect within two seconds, " +
			"without a reload. If a line is invalid, the previous values stay effective. Cannot be combined with `shared = " +
			"true`.",
	},
	{
		name: "block", typ: booleanType, def: "false",
		field:    fieldOf(func(l *shaper.Limit) *bool { return &l.Block }),
		omitZero: true, text: func(any) string { return "all that is matched" },
		doc: "Refuse everything that matches. Only `name`, `match`, `refuse_with`, `reply` and `observe` can be combined " +
			"with it.",
	},
	{
		name: "shed", typ: tableType(shedKeys), defText: "none", needs: []condition{atListeners("unsupported at attachments, which refuse packets by their rate")},
		shown: when(func(l *shaper.Limit) bool { return l.Shed.Any() }), after: "block",
		text: on(func(l *shaper.Limit) string { return shedText(&l.Shed) }),
		doc: "Refuse a part of the new connections and UDP flows that match while this host, or the downstream behind " +
			"another limit, is overloaded. The part grows by up to a tenth each second. Once the load is a tenth below the " +
			"threshold, the part shrinks by up to half each second. Traffic that matches no such limit is never shed. Only " +
			"`name`, `match`, `refuse_with`, `reply` and `observe` can be combined with it. See [shedding " +
			"load](overload.md#shedding-load).",
	},
	{
		name: "refuse_with", typ: enumType(shaper.RefuseReset, shaper.RefuseClose, shaper.RefuseDrop, shaper.RefuseReply, shaper.RefuseReject), defText: "`\"reset\"`; `\"drop\"` at listeners where `match.protocol` is `\"udp\"`", needs: []condition{refusing}, perHost: true,
		field: fieldOf(func(l *shaper.Limit) *shaper.RefuseWith { return &l.RefuseWith }),
		preset: on(func(l *shaper.Limit) any {
			if isUDPOnly(l) {
				return shaper.RefuseDrop
			}
			return shaper.RefuseReset
		}),
		shown: when(refuses),
		doc: "Answer to a refused connection: `\"reset\"`, `\"close\"` or `\"reply\"` at listeners, `\"reset\"` or " +
			"`\"drop\"` (no answer) at attachments. A refused datagram is dropped. With `\"reject\"` it is answered with an " +
			"ICMP port unreachable message, at most 1,000 a second, which needs CAP_NET_RAW; TCP connections are reset.",
	},
	{
		name: "reply", typ: replyType("http-429", limitPlaceholders), defText: "none", needs: []condition{replying}, perHost: true,
		field: fieldOf(func(l *shaper.Limit) *string { return &l.Reply }),
		text:  on(func(l *shaper.Limit) string { return strconv.Quote(l.Reply) }),
		doc: "Reply to a refused connection: the name of a protocol, whose clients [show an " +
			"error](overload.md#replies-to-refused-clients), or a text, which is sent after the first bytes of the " +
			"client or a second of silence. In a text, `{retry_after}` becomes the seconds after which the client may try " +
			"again, or 60 if that is unknown, as for a `block`; `{limit}` becomes the name of the limit, and `{reason}` the " +
			"reason, as in the metrics of the limit. A single word in lower case is read as the name of a protocol.",
	},
	{
		name: "observe", typ: booleanType, def: "false", overridable: true,
		field: fieldOf(func(l *shaper.Limit) *bool { return &l.Observe }),
		after: "name",
		doc: "A dry run of this limit: it counts what it would delay or refuse. `observe = true` of the daemon or of an " +
			"attachment has the same effect.",
	},
}

// overrideKeys are the name of a limit, and what may be set in it.
var overrideKeys = func() keys {
	all := keys{
		{name: "limit", typ: stringType("name of a limit", "db", ""), required: true, doc: "Name of the limit."},
		{
			name: "when", typ: arrayType(`span of time such as "Mon-Fri 08:00-18:00 Europe/Berlin"`, stringType("span of time", "Mon-Fri 08:00-18:00 Europe/Berlin", ""), parseSpan, asText), defText: "always",
			doc: "Times at which the values are effective: days of the week, a time of day to another, and a time zone. Without " +
				"days, every day; without a time zone, by the clock of this host. `\"Fri 22:00-06:00\"` ends on Saturday. A " +
				"limit may have up to 4 such overrides. If several are effective, the last one decides, before an override " +
				"without `when`. Buckets keep their backlog when values change.",
		},
	}
	for _, k := range limitKeys {
		if k.overridable {
			k.def, k.defText = "", "the value in the limit"
			all = append(all, k)
		}
	}
	return all
}()

// keyField is the set of attributes in the key of a limit, as a list.
var keyField = field{
	get: on(func(l *shaper.Limit) any {
		var all []keyAttribute
		for i := range shaper.FieldNames() {
			a := keyAttribute{field: 1 << i}
			if a.field == shaper.KeyTLV {
				a.tlv = l.TLV
			}
			if l.Key&a.field != 0 {
				all = append(all, a)
			}
		}
		return all
	}),
	set: func(record, value any) {
		l := record.(*shaper.Limit)
		for _, a := range value.([]keyAttribute) {
			l.Key |= a.field
			l.TLV = max(l.TLV, a.tlv)
		}
	},
}

// prefixesOf returns the text of both prefixes of limits with an address in their key, or "".
func prefixesOf(address shaper.Fields) func(record any) string {
	return on(func(l *shaper.Limit) string {
		if l.Key&address == 0 {
			return ""
		}
		return fmt.Sprintf("/%d of IPv4, /%d of IPv6", l.IPv4Prefix, l.IPv6Prefix)
	})
}

// showPackets is showFrequency in the unit of packets.
func showPackets(f shaper.Frequency) any {
	shown := showFrequency(f).(object)
	shown[0].value = strings.Replace(shown[0].value.(string), "/s", "pps", 1)
	return shown
}

var percentType = quantityType("percentage from `1%` to `100%`", "90%", `^[0-9]+ ?%$`, parsePercent, showPercent)

var shedKeys = keys{
	{
		name: "cpu", typ: percentType, defText: "not used",
		field: fieldOf(func(l *shaper.Limit) *int { return &l.Shed.CPU }), omitZero: true,
		doc: "Used part of the CPU time of the host, or of the CPU quota of the control group, whichever is higher.",
	},
	{
		name: "memory", typ: percentType, defText: "not used",
		field: fieldOf(func(l *shaper.Limit) *int { return &l.Shed.Memory }), omitZero: true,
		doc: "Used part of the memory of the control group, or of the host, whichever is higher. Memory that can be " +
			"reclaimed at once does not count as used.",
	},
	{
		name: "pressure", typ: percentType, defText: "not used",
		field: fieldOf(func(l *shaper.Limit) *int { return &l.Shed.Pressure }), omitZero: true,
		doc: "Part of the time in which a task in the control group waits for a processor or for memory (PSI).",
	},
	{
		name: "late", typ: durationType(time.Millisecond, time.Second), defText: "not used",
		field: fieldOf(func(l *shaper.Limit) *time.Duration { return &l.Shed.Late }), omitZero: true,
		doc: "Response time of the slowest loop.",
	},
	{
		name: "descriptors", typ: percentType, defText: "not used",
		field: fieldOf(func(l *shaper.Limit) *int { return &l.Shed.Descriptors }), omitZero: true,
		doc: "Used part of the file descriptors that the process may open.",
	},
	{
		name: "limit", typ: labelType("database"), defText: "none",
		field: fieldOf(func(l *shaper.Limit) *string { return &l.Shed.Limit }), omitZero: true,
		doc: "A limit at listeners with `max_connections` and without `key`. The signal is the part of its maximum that is " +
			"in flight, and 100% while connections wait there. If the limit is adaptive, only the waiting counts.",
	},
	{
		name: "above", typ: percentType, def: `"80%"`, needs: []condition{sheddingFor},
		field: fieldOf(func(l *shaper.Limit) *int { return &l.Shed.Above }),
		preset: on(func(l *shaper.Limit) any {
			if l.Shed.Limit != "" {
				return 80
			}
			return 0
		}),
		doc: "Part of the maximum of `limit` above which connections are shed.",
	},
	{
		name: "order", typ: integerType(1, shaper.MaxShedOrder), def: "1",
		field: fieldOf(func(l *shaper.Limit) *int { return &l.Shed.Order }),
		doc: "Order of shedding. Limits of order 2 begin to shed when the overloaded limits of order 1 refuse everything, " +
			"and recover before limits of order 1 with the same signal; and so on for higher orders.",
	},
}

var sheddingFor = needs("`limit`", "", func(l *shaper.Limit, _ isSet) bool { return l.Shed.Limit != "" })

// shedText says what s looks at.
func shedText(s *shaper.Shed) string {
	var parts []string
	for _, p := range []struct {
		name    string
		percent int
	}{{"cpu", s.CPU}, {"memory", s.Memory}, {"pressure", s.Pressure}, {"descriptors", s.Descriptors}, {"limit " + strconv.Quote(s.Limit), s.Above}} {
		if p.percent > 0 {
			parts = append(parts, fmt.Sprintf("%s from %d%%", p.name, p.percent))
		}
	}
	if s.Late > 0 {
		parts = append(parts, "late by "+FormatDuration(s.Late))
	}
	return fmt.Sprintf("%s; order %d", strings.Join(parts, ", "), s.Order)
}

// Conditions of keys of limits.
var (
	paced    = anyOf("rate", "packets", "quota")
	counting = needs(anyOf("max_connections", "new_connections").doc, "", func(l *shaper.Limit, has isSet) bool {
		return has("max_connections") || has("new_connections") || l.HasConnectionQuota()
	})

	capping  = needs("`max_connections`", "", func(l *shaper.Limit, has isSet) bool { return has("max_connections") })
	adapting = needs("`adapt = \"on\"`", "", func(l *shaper.Limit, _ isSet) bool { return l.Adapt == shaper.AdaptOn })

	takingTurns = needs("`slot_for = \"turn\"` or `\"transaction\"`", "", func(l *shaper.Limit, _ isSet) bool { return l.SlotFor.InTurns() })

	bySource = needs("`\"source\"` in `key`", "", func(l *shaper.Limit, _ isSet) bool {
		return l.Key&shaper.KeySource != 0
	})
	byAddress = needs("`\"source\"` or `\"destination\"` in `key`", "", func(l *shaper.Limit, _ isSet) bool {
		return l.Key&(shaper.KeySource|shaper.KeyDestination) != 0
	})
	notPerConnection = needs("", `has no effect with "connection" in key, where each connection has its own bucket`, func(l *shaper.Limit, _ isSet) bool {
		return l.Key&shaper.KeyConnection == 0
	})
	oneDirection = needs("", `unsupported at attachments, which have one direction: add an [[attach]] with direction = "ingress"`, func(l *shaper.Limit, _ isSet) bool {
		return !l.InPacketPlane() || l.Direction == shaper.ToDownstream
	})
	pacedAtAttachments = needs(paced.doc, "", func(l *shaper.Limit, _ isSet) bool {
		return !l.InPacketPlane() || paces(l)
	})
	atAttachments = needs("at attachments", "has no effect without match.attach", func(l *shaper.Limit, has isSet) bool {
		return l.InPacketPlane() || has("match.attach") // a mistake in it is reported there
	})
	waiting = needs("", "has no effect without new_connections: "+noWait, func(l *shaper.Limit, has isSet) bool {
		return !l.InPacketPlane() || has("new_connections") || !has("max_connections")
	})
	queueing = needs("at listeners", "has no effect: "+noWait, func(l *shaper.Limit, has isSet) bool {
		return !l.InPacketPlane() || !counting.met(l, has)
	})
	refusing = needs("`max_connections`, `new_connections`, `quota`, `block`, `shed` or UDP at listeners", "has no effect without max_connections or new_connections", func(l *shaper.Limit, has isSet) bool {
		refusesDatagrams := !l.InPacketPlane() && l.Direction != shaper.FromDownstream && (isUDPOnly(l) || l.RefuseWith == shaper.RefuseReject)
		return refusesDatagrams || l.Quota.Amount > 0 || l.Block || l.Shed.Any() || counting.met(l, has)
	})
	replying = needs("`refuse_with = \"reply\"`", "", func(l *shaper.Limit, _ isSet) bool {
		return l.RefuseWith == shaper.RefuseReply
	})
)

const noWait = "at attachments no connection waits for a slot"

// atListeners is the condition that the limit is for listeners; msg is the error elsewhere.
func atListeners(msg string) condition {
	return needs("at listeners", msg, func(l *shaper.Limit, _ isSet) bool { return !l.InPacketPlane() })
}

// rateFor is the condition that there is a rate, or that the key has its default: one that is
// written out is not a mistake.
func rateFor(isDefault func(*shaper.Limit) bool) condition {
	return needs("`rate`", "", func(l *shaper.Limit, has isSet) bool { return has("rate") || isDefault(l) })
}

// paces reports whether l limits a rate of units.
func paces(l *shaper.Limit) bool { return l.Paces() }

// refuses reports whether l refuses connections or datagrams.
func refuses(l *shaper.Limit) bool {
	blocksTCP := l.Block && l.Match.Protocol != shaper.UDP && l.Match.Protocol != shaper.ICMP
	return l.CountsConnections() || l.Quota.Amount > 0 || blocksTCP || l.Shed.Any() || isUDPOnly(l) || l.RefuseWith == shaper.RefuseReject
}
