package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// Of TCP connections that get nowhere.
var timeoutType = durationType(10*time.Millisecond, 8760*time.Hour)

var downstreamType = valueType{
	kind:     kindArray,
	desc:     `string such as "10.0.0.5:5432", or table such as { address = "10.0.0.5:5432", weight = 2 }`,
	elem:     &valueType{kind: kindStringOrTable, example: "10.0.0.5:5432", keys: downstreamKeys},
	parseAll: parseDownstreams,
	show:     showDownstreams,
}

var nameType = textType("1 to 64 letters, digits, `-`, `_` and `.`", "db", `^[A-Za-z0-9._-]{1,64}$`, parseName)

var listenKeys = keys{
	{
		name: "name", typ: nameType, required: true,
		field: fieldOf(func(l *shaper.Listener) *string { return &l.Name }),
		text:  noText,
		doc:   "Unique among listeners and attachments. A label of metrics and log records.",
	},
	{
		name: "address", typ: arrayType(`string such as "tcp://0.0.0.0:5432"`, stringType("address", "tcp://0.0.0.0:5432", `^(tcp|udp)://.+:[0-9]+(-[0-9]+)?$`), parseAddress, asText), required: true,
		field: fieldOf(func(l *shaper.Listener) *[]shaper.Address { return &l.Addresses }),
		doc:   "Protocol, IP address, and port or range of ports. `[::]` accepts IPv6 only, so `0.0.0.0` can be next to it.",
	},
	{
		name: "downstream", typ: downstreamType, required: true,
		field: fieldOf(func(l *shaper.Listener) *[]shaper.Downstream { return &l.Downstream }),
		text:  on(describeDownstreams),
		doc: "Hosts to forward to, by address or name. Without a port, shaperd connects to the port that the source " +
			"connected to. A range of ports always maps to the same ports.",
	},
	{
		name: "balance", typ: enumType(shaper.RoundRobin, shaper.LeastConnections, shaper.SourceHash), def: `"round-robin"`, needs: []condition{secondDownstream},
		field: fieldOf(func(l *shaper.Listener) *shaper.Balance { return &l.Balance }),
		after: "access_log",
		doc: "Algorithm that selects the downstream of a connection, by weight. `\"source-hash\"` sends a source to the same " +
			"downstream while that is available. A downstream at its `max_connections` is skipped. If all downstreams are " +
			"at their maximum, a connection waits for up to `connect_timeout`, and sources take turns.",
	},
	{
		name: "slow_start", typ: durationType(0, time.Hour), def: `"0s"`,
		field:    fieldOf(func(l *shaper.Listener) *time.Duration { return &l.SlowStart }),
		omitZero: true, after: "balance",
		doc: "Time after its recovery in which a downstream gets less than its share; its `max_connections` grows from a " +
			"part to the whole. If no other downstream could be reached, new connections are admitted at a ramp that lasts " +
			"at least this long.",
	},
	{
		name: "on_down", typ: enumType(shaper.DownRefuse, shaper.DownHold), def: `"refuse"`, needs: []condition{oneTCPPort},
		field:    fieldOf(func(l *shaper.Listener) *shaper.OnDown { return &l.OnDown }),
		omitZero: true, after: "slow_start",
		doc: "Behavior for new connections while no downstream can be reached: they are reset (`\"refuse\"`), or they wait " +
			"(`\"hold\"`). While they wait, one of them tries again each second; with `check`, the checks do that instead. " +
			"Once a downstream can be reached, they are admitted at a ramp. With either value, connections wait during " +
			"`shaperd hold`.",
	},
	{
		name: "retry_unanswered", typ: booleanType, def: "false", needs: []condition{tcpAddress},
		field:    fieldOf(func(l *shaper.Listener) *bool { return &l.RetryUnanswered }),
		omitZero: true, after: "on_down",
		doc: "Connect again, up to three times, if a downstream fails or closes before it has sent anything, and repeat the " +
			"bytes of the client, up to 16 KiB. The downstream may have acted on these bytes already. Use this key only for " +
			"protocols in which a connection begins with a greeting, such as those of databases, and not with a request.",
	},
	{
		name: "ramp", typ: quantityType("count per second, minute or hour", "10/s", `^[0-9]+ ?/(s|min|h)$`, parseConnectionFrequency, showFrequency), def: `"10/s"`,
		field: fieldOf(func(l *shaper.Listener) *shaper.Frequency { return &l.Ramp }),
		after: "retry_unanswered",
		doc: "Rate of new connections (TCP connections and UDP flows) to all downstreams together after a hold. It grows by " +
			"half every 3 s, until no connection waits for it.",
	},
	{
		name: "hold_timeout", typ: durationType(time.Second, 24*time.Hour), def: `"1m"`,
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.HoldTimeout }),
		after: "ramp",
		doc:   "Maximum wait of a connection, from its arrival, while its listener is held and during the ramp.",
	},
	{
		name: "max_queue", typ: integerType(1, 1<<20), def: "1000",
		field: fieldOf(func(l *shaper.Listener) *int { return &l.MaxQueue }),
		after: "hold_timeout",
		doc: "Maximum number of connections that wait for a downstream, during a hold or while all downstreams are full. The " +
			"source with the most waiting connections loses its newest one.",
	},
	{
		name: "check", typ: tableType(checkKeys), defText: "none", needs: []condition{tcpAddress},
		shown: when(func(l *shaper.Listener) bool { return l.Check.Interval > 0 }), after: "max_queue",
		text: on(func(l *shaper.Listener) string {
			c := l.Check
			text := fmt.Sprintf("every %s, given up after %s; up after %d, down after %d", FormatDuration(c.Interval), FormatDuration(c.Timeout), c.Rise, c.Fall)
			if c.Send != "" {
				text += fmt.Sprintf("; sends %q", c.Send)
			}
			if c.Expect != "" {
				text += fmt.Sprintf("; expects %q", c.Expect)
			}
			return text
		}),
		doc: "Active health check: a TCP connection to each downstream and, with `expect`, a comparison of its answer. A " +
			"check takes one of the `max_connections` of the downstream, and is skipped while none is free. Limits do not " +
			"count checks. Intervals vary by a tenth.",
	},
	{
		name: "eject", typ: tableType(ejectKeys), defText: "after 3, for 10s", needs: []condition{secondDownstream},
		shown: when(func(l *shaper.Listener) bool { return l.EjectAfter > 0 && len(l.Downstream) > 1 }), after: "check",
		text: on(func(l *shaper.Listener) string {
			return fmt.Sprintf("after %d failed dials, for %s", l.EjectAfter, FormatDuration(l.EjectFor))
		}),
		doc: "Passive health check. After a number of consecutive failed dials, a downstream gets no connections for some " +
			"time, unless no other downstream is left.",
	},
	{
		name: "breaker", typ: tableType(breakerKeys), defText: "none", needs: []condition{breakerPort},
		shown: when(func(l *shaper.Listener) bool { return l.Breaker.After > 0 }), after: "eject",
		text: on(func(l *shaper.Listener) string {
			b := &l.Breaker
			return fmt.Sprintf("opens after %d failures in a row (%s), for %s; then %d may try", b.After, strings.Join(failureNames(b.Of), ", "), FormatDuration(b.For), b.Probe)
		}),
		doc: "Circuit breaker of each downstream, including a single one. After several consecutive failures a " +
			"downstream gets no connections for some time; then up to `probe` connections may try. When one of them " +
			"succeeds, the others are admitted at the `ramp`, unless another downstream could be reached. While all " +
			"downstreams are shut off, new connections are refused at once, or wait with `on_down = \"hold\"`. Errors of " +
			"this host do not count.",
	},
	{
		name: "accept_proxy_from", typ: arrayType(`prefix or address such as "10.0.0.0/24"`, stringType("prefix", "10.0.0.0/24", prefixPattern), parsePrefix, asText), def: "[]", needs: []condition{tcpAddress},
		field:    fieldOf(func(l *shaper.Listener) *[]netip.Prefix { return &l.AcceptProxyFrom }),
		omitZero: true,
		doc: "Sources whose TCP connections begin with a PROXY protocol header, version 1 or 2. Limits apply to the source " +
			"in the header. A connection from these sources without a header is reset after 5 s at the latest.",
	},
	{
		name: "send_proxy", typ: enumType(shaper.NoProxy, shaper.ProxyV1, shaper.ProxyV2), def: `"off"`, needs: []condition{notV1ForUDP},
		field:    fieldOf(func(l *shaper.Listener) *shaper.ProxyVersion { return &l.SendProxy }),
		omitZero: true,
		doc: "Version of the PROXY protocol header that passes the source to the downstream. The header precedes the first " +
			"byte of a connection and, with `\"v2\"`, each UDP datagram. Limits count its bytes. `\"v1\"` is for TCP only.",
	},
	{
		name: "send_standing", typ: booleanType, def: "false", needs: []condition{tcpAddress, sendingV2},
		field:    fieldOf(func(l *shaper.Listener) *bool { return &l.SendStanding }),
		omitZero: true,
		doc: "Add the standing of the client to the PROXY header of a TCP connection, as TLVs. They refer to the limit on " +
			"connections with the fewest connections left. 0xE0 is the number of connections allowed, 0xE1 the number left " +
			"now, and 0xE2, for a rate, the number of seconds until all of 0xE0 are available again. 0xE3 is the class, if " +
			"there are classes. See [the TLVs](overload.md#the-state-of-a-client-in-the-proxy-header).",
	},
	{
		name: "transparent", typ: booleanType, def: "false",
		field:    fieldOf(func(l *shaper.Listener) *bool { return &l.Transparent }),
		omitZero: true,
		doc: "Connect to downstreams from the address of the source instead of the address of this host. The protocol does " +
			"not change. The replies of the downstreams must be routed through this host.",
	},
	{
		name: "instances", typ: integerType(1, 64), def: "1", needs: []condition{notTransparent, noDownstreamMaximum},
		field: fieldOf(func(l *shaper.Listener) *int { return &l.Instances }),
		shown: when(func(l *shaper.Listener) bool { return l.Instances > 1 }),
		doc: "Number of daemons on this host that listen at these addresses, to use more processors. The kernel selects one " +
			"by the source. Each limit that applies here must have `shared = true`. " +
			"See [instances](cluster.md#several-instances-on-one-host).",
	},
	{
		name: "access_log", typ: booleanType, def: "false",
		field:    fieldOf(func(l *shaper.Listener) *bool { return &l.AccessLog }),
		omitZero: true,
		doc: "Log each TCP connection and UDP flow when it ends: source, downstream, bytes, waits, and the reason of its " +
			"end.",
	},
	{
		name: "connect_timeout", typ: durationType(time.Millisecond, time.Hour), def: `"5s"`, needs: []condition{tcpAddress},
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.ConnectTimeout }),
		doc:   "Timeout of a TCP connect to a downstream.",
	},
	{
		name: "first_byte_timeout", typ: timeoutType, defText: "never", needs: []condition{tcpAddress},
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.FirstByteTimeout }),
		doc: "Timeout for the first byte of a TCP client, from the time at which the connection has a downstream. Do not set " +
			"it if the downstream speaks first.",
	},
	{
		name: "tcp_idle_timeout", typ: timeoutType, defText: "never", needs: []condition{tcpAddress},
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.TCPIdleTimeout }),
		doc: "Timeout of a TCP connection in which no byte moves in either direction. Time during which shaperd holds bytes " +
			"back does not count.",
	},
	{
		name: "half_close_timeout", typ: timeoutType, defText: "never", needs: []condition{tcpAddress},
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.HalfCloseTimeout }),
		doc:   "Idle timeout of a TCP connection of which one direction is closed.",
	},
	{
		name: "max_lifetime", typ: timeoutType, defText: "never", needs: []condition{tcpAddress},
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.MaxLifetime }),
		doc:   "Maximum lifetime of a TCP connection.",
	},
	{
		name: "min_throughput", typ: rateType("100B/s"), defText: "none", needs: []condition{tcpAddress},
		field: fieldOf(func(l *shaper.Listener) *uint64 { return &l.MinThroughput }),
		doc: "Minimum throughput of a TCP connection, both directions together, in each 10 s in which shaperd held nothing " +
			"back.",
	},
	{
		name: "udp_idle_timeout", typ: durationType(10*time.Millisecond, 24*time.Hour), def: `"1m"`, needs: []condition{udpAddressNotTCP},
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.UDPIdleTimeout }),
		doc:   "Timeout of a UDP flow without datagrams.",
	},
	{
		name: "max_flows", typ: integerType(1, 1<<20), def: "4096", needs: []condition{udpAddress},
		field: fieldOf(func(l *shaper.Listener) *int { return &l.MaxFlows }),
		doc: "Maximum number of UDP flows. Each flow takes a local port of this host; 28,000 are available by default. If " +
			"the table is full, an idle flow is evicted, in this order: a flow that was never answered, a flow whose source " +
			"has sent nothing since the answer, a flow that was idle for a quarter of `udp_idle_timeout`. A flow with " +
			"queued datagrams is never evicted.",
	},
	{
		name: "max_flows_per_source", typ: integerType(1, 1<<20), defText: "a quarter of `max_flows`", needs: []condition{udpAddress},
		field:  fieldOf(func(l *shaper.Listener) *int { return &l.MaxFlowsPerSource }),
		preset: on(func(l *shaper.Listener) any { return max(1, l.MaxFlows/4) }),
		doc: "Maximum number of UDP flows of one IPv4 address, or of one IPv6 /64. A source at the maximum evicts one of its " +
			"own flows.",
	},
	{
		name: "amplification", typ: integerType(0, 1000), def: "3", needs: []condition{udpAddress},
		field: fieldOf(func(l *shaper.Listener) *int { return &l.Amplification }),
		doc: "Maximum ratio of the bytes sent to the source of a UDP flow to the bytes received from it, over the lifetime " +
			"of the flow. The source may be forged. 0 means no maximum: use it for protocols whose replies are much larger " +
			"than the requests, such as DNS, QUIC, tunnels and streams.",
	},
}

var downstreamKeys = keys{
	{
		name: "address", typ: stringType("address or name, with a port or without", "10.0.0.5:5432", ""), required: true,
		field: field{get: on(func(d *shaper.Downstream) any { return d.String() })},
		doc:   "Address of the downstream, as in the string form.",
	},
	{
		name: "weight", typ: integerType(1, 256), def: "1",
		field: fieldOf(func(d *shaper.Downstream) *int { return &d.Weight }),
		doc:   "Weight of the downstream relative to the others.",
	},
	{
		name: "max_connections", typ: integerType(1, 1<<20), defText: "no maximum",
		field: fieldOf(func(d *shaper.Downstream) *int { return &d.MaxConnections }),
		doc:   "Maximum number of connections, including UDP flows.",
	},
}

// bytesType is the type of strings of bytes, at most n, of which each is the character with its number.
func bytesType(n int) valueType {
	t := textType(fmt.Sprintf("string of at most %d characters up to `\\u00ff`", n), "PING\r\n", "", func(s string, _ any) (any, error) {
		var b []byte
		for _, r := range s {
			if r > 0xff {
				return nil, fmt.Errorf("%q is not a byte: write each byte as a character, up to \\u00ff", r)
			}
			b = append(b, byte(r))
		}
		if len(b) == 0 || len(b) > n {
			return nil, fmt.Errorf("must have 1 to %d bytes, not %d", n, len(b))
		}
		return string(b), nil
	})
	t.show = func(v any) any {
		var runes []rune
		for _, c := range []byte(v.(string)) {
			runes = append(runes, rune(c))
		}
		return string(runes)
	}
	return t
}

var checkKeys = keys{
	{
		name: "interval", typ: durationType(10*time.Millisecond, time.Hour), def: `"2s"`,
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.Check.Interval }),
		doc:   "Interval between checks.",
	},
	{
		name: "timeout", typ: durationType(10*time.Millisecond, time.Hour), def: `"1s"`,
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.Check.Timeout }),
		doc:   "Timeout of a check.",
	},
	{
		name: "send", typ: bytesType(1024), defText: "nothing", needs: []condition{expecting},
		field:    fieldOf(func(l *shaper.Listener) *string { return &l.Check.Send }),
		omitZero: true,
		doc: "Bytes to send to the downstream after the connect. Each character is a byte, from `\\u0000` to `\\u00ff`. " +
			"See an example for [PostgreSQL](overload.md#holding-a-listener).",
	},
	{
		name: "expect", typ: bytesType(256), defText: "nothing",
		field:    fieldOf(func(l *shaper.Listener) *string { return &l.Check.Expect }),
		omitZero: true,
		doc:      "Beginning of the expected answer or greeting of the downstream, in the same form.",
	},
	{
		name: "rise", typ: integerType(1, 1000), def: "2",
		field: fieldOf(func(l *shaper.Listener) *int { return &l.Check.Rise }),
		doc:   "Consecutive successful checks after which a downstream is up.",
	},
	{
		name: "fall", typ: integerType(1, 1000), def: "3",
		field: fieldOf(func(l *shaper.Listener) *int { return &l.Check.Fall }),
		doc:   "Consecutive failed checks after which a downstream is down.",
	},
}

var ejectKeys = keys{
	{
		name: "after", typ: integerType(0, 1000), def: "3",
		field: fieldOf(func(l *shaper.Listener) *int { return &l.EjectAfter }),
		doc:   "Consecutive failed dials after which a downstream is ejected. 0 disables ejection.",
	},
	{
		name: "for", typ: durationType(10*time.Millisecond, 24*time.Hour), def: `"10s"`,
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.EjectFor }),
		needs: []condition{ejecting},
		doc:   "Duration of an ejection.",
	},
}

var breakerKeys = keys{
	{
		name: "after", typ: integerType(1, 1000), def: "5",
		field: fieldOf(func(l *shaper.Listener) *int { return &l.Breaker.After }),
		doc:   "Consecutive failures after which the breaker opens.",
	},
	{
		name: "of", typ: arrayType("`\"dial\"`, `\"reset\"` or `\"first-byte\"`", enumType(shaper.FailedDial, shaper.FailedReset, shaper.FailedFirstByte), parseFailure, asText), defText: "`[\"dial\"]`",
		field: fieldOf(func(l *shaper.Listener) *[]shaper.Failure { return &l.Breaker.Of }),
		doc: "Failures that count. `\"dial\"`: the connect fails. `\"reset\"`: the downstream resets a connection to which " +
			"it owes an answer. `\"first-byte\"`: the client has sent something, and the downstream closes the connection " +
			"without an answer or sends nothing within `timeout`. A client can cause the last two, if the downstream reacts " +
			"to invalid input in this way.",
	},
	{
		name: "for", typ: durationType(10*time.Millisecond, 24*time.Hour), def: `"10s"`,
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.Breaker.For }),
		doc:   "Time for which the breaker is open before a connection may try, and again after each try that fails.",
	},
	{
		name: "probe", typ: integerType(1, 100), def: "1",
		field: fieldOf(func(l *shaper.Listener) *int { return &l.Breaker.Probe }),
		doc:   "Maximum number of connections that may try at the same time.",
	},
	{
		name: "timeout", typ: durationType(10*time.Millisecond, time.Hour), def: `"10s"`,
		field: fieldOf(func(l *shaper.Listener) *time.Duration { return &l.Breaker.Timeout }),
		doc: "Time from the client's bytes to the first byte of the downstream; the breaker checks it once a second. It does " +
			"not end the connection. If `\"first-byte\"` does not count, a connection that has lasted this long is a " +
			"success.",
	},
	{
		name: "reply", typ: replyType("http-503", breakerPlaceholders), defText: "none",
		field:    fieldOf(func(l *shaper.Listener) *string { return &l.Breaker.Reply }),
		omitZero: true,
		doc: "Reply to a refused client, as the [reply](#limit) of a limit. In a text, `{retry_after}` becomes a number of " +
			"seconds, at least the time until the breaker lets a connection try and at most twice that, and `{reason}` " +
			"becomes `breaker-open`. Without a reply the connection is reset.",
	},
}

// Conditions of keys of listeners. They are met where the mistake is another one: no
// addresses, or no downstreams.
var (
	tcpAddress = needs("a `tcp://` address", "", hasAddress(shaper.TCP))
	udpAddress = needs("a `udp://` address", "", hasAddress(shaper.UDP))

	udpAddressNotTCP = needs(udpAddress.doc, "has no effect without a udp:// address; for TCP, use tcp_idle_timeout", hasAddress(shaper.UDP))

	secondDownstream = needs("a second downstream", "", func(l *shaper.Listener, _ isSet) bool { return len(l.Downstream) != 1 })
	notV1ForUDP      = needs("", `"v1" is unsupported for UDP: use "v2"`, func(l *shaper.Listener, _ isSet) bool {
		return l.SendProxy != shaper.ProxyV1 || !l.Accepts(shaper.UDP)
	})
	sendingV2 = needs("`send_proxy = \"v2\"`", "", func(l *shaper.Listener, _ isSet) bool { return !l.SendStanding || l.SendProxy == shaper.ProxyV2 })
	// Where only one of several ports cannot be reached, connections to the others must not wait.
	oneTCPPort = needs("a single `tcp://` address with a single port", "", func(l *shaper.Listener, _ isSet) bool {
		return l.OnDown == shaper.DownRefuse || len(l.Addresses) == 0 || onlyOneTCPPort(l)
	})
	breakerPort = needs(oneTCPPort.doc, "", func(l *shaper.Listener, _ isSet) bool {
		return l.Breaker.After == 0 || len(l.Addresses) == 0 || onlyOneTCPPort(l)
	})
	notTransparent = needs("", "unsupported with transparent = true: interception selects the socket", func(l *shaper.Listener, _ isSet) bool {
		return l.Instances <= 1 || !l.Transparent
	})
	noDownstreamMaximum = needs("", "unsupported with max_connections of a downstream, which each instance would allow: use a limit with shared = true", func(l *shaper.Listener, _ isSet) bool {
		return l.Instances <= 1 || !slices.ContainsFunc(l.Downstream, func(d shaper.Downstream) bool { return d.MaxConnections > 0 })
	})
	expecting = needs("`expect`", "", func(l *shaper.Listener, _ isSet) bool { return l.Check.Expect != "" })
	ejecting  = needs("", "has no effect without after", func(l *shaper.Listener, _ isSet) bool { return l.EjectAfter > 0 })
)

func parseFailure(s string) (shaper.Failure, error) {
	all := []shaper.Failure{shaper.FailedDial, shaper.FailedReset, shaper.FailedFirstByte}
	if i := slices.Index(failureNames(all), s); i >= 0 {
		return all[i], nil
	}
	return 0, fmt.Errorf("must be %s, not %s", strings.ReplaceAll(alternatives(failureNames(all)), "`", ""), quote(s))
}

func failureNames(all []shaper.Failure) (names []string) {
	for _, f := range all {
		names = append(names, f.String())
	}
	return names
}

func onlyOneTCPPort(l *shaper.Listener) bool {
	return len(l.Addresses) == 1 && l.Accepts(shaper.TCP) && l.Addresses[0].Single()
}

func hasAddress(p shaper.Protocol) func(*shaper.Listener, isSet) bool {
	return func(l *shaper.Listener, _ isSet) bool {
		return len(l.Addresses) == 0 || l.Accepts(p)
	}
}
