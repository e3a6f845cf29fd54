package config

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// loader builds one configuration from several files.
type loader struct {
	report
	c *Config

	set          map[string]*node // positions of the keys of [daemon] and [transparent]
	asnFiles     map[string]*node // positions of ASN files, by path
	transparents []table          // [transparent] of each file
	listens      []table          // tables of c.Listen
	addresses    []locatedAddress
	attaches     []table // tables of c.Attach
	interfaces   []locatedInterface
	limits       []table                             // tables of c.Limits
	references   []references                        // names in the matches of c.Limits
	overrides    map[string]map[string]overrideValue // by limit and key
	overridden   []item[string]                      // names of limits in overrides
	syntaxErrors bool                                // some file has a syntax error: names may be missing
	hasPlaces    bool                                // there are listeners or attachments, if only invalid ones
}

// references has the names of listeners and attachments in a match.
type references struct{ listen, attach []item[string] }

// locatedAddress is an address of one listener, with its position.
type locatedAddress struct {
	Address
	listen int
	at     *node
}

// file decodes one file, except its overrides.
func (l *loader) file(t table) {
	meant := t.check()
	l.hasPlaces = l.hasPlaces || meant["listen"] || meant["attach"]
	if daemon, ok := t.table("daemon"); ok {
		l.daemon(daemon)
	}
	if transparent, ok := t.table("transparent"); ok {
		l.transparent(transparent)
	}
	if asn, ok := t.table("asn"); ok {
		l.asn(asn)
	}
	for _, listen := range t.tables("listen") {
		l.listen(listen)
	}
	for _, attach := range t.tables("attach") {
		l.attach(attach)
	}
	for _, limit := range t.tables("limit") {
		l.limit(limit)
	}
}

// checkDuplicateKeys reports keys of t that an earlier file has set.
func (l *loader) checkDuplicateKeys(t table) {
	for key := range t.values {
		name := t.name + key
		if first := l.set[name]; first != nil {
			t.errorf(key, "duplicate key, already set at %s:%d: a key of %s may be in one file only", first.file.name, first.line(), t.name)
		}
		l.set[name] = t.at.child(key)
	}
}

func (l *loader) transparent(t table) {
	l.checkDuplicateKeys(t)
	c := &l.c.Transparent
	enumValue(t, "rules", &c.Rules)
	t.integer("mark", &c.Mark)
	if c.Mark >= 253 && c.Mark <= 255 {
		t.errorf("mark", "%d is reserved: 253 to 255 are routing tables of the system", c.Mark)
	}
	l.transparents = append(l.transparents, t)
}

func (l *loader) daemon(t table) {
	l.checkDuplicateKeys(t)
	d := &l.c.Daemon
	t.boolean("observe", &d.Observe)
	endpoint(t, "metrics", &d.Metrics)
	endpoint(t, "dashboard", &d.Dashboard)
	t.integer("max_buckets", &d.MaxBuckets)
	if s, ok := t.text("pin_path"); ok {
		var err error
		if d.PinPath, err = parsePins(s); err != nil {
			t.errorf("pin_path", "%v", err)
		}
	}
}

// endpoint sets *into to the host:port under a key.
func endpoint(t table, key string, into *string) {
	s, ok := t.text(key)
	if !ok {
		return
	}
	if err := checkEndpoint(s, *into); err != nil {
		t.errorf(key, "%v", err)
		return
	}
	*into = s
}

func (l *loader) asn(t table) {
	folder := filepath.Dir(t.at.file.name)
	for _, f := range list(t, "files", notEmpty) {
		path := f.value
		if !filepath.IsAbs(path) {
			path = filepath.Join(folder, path)
		}
		if first := l.asnFiles[path]; first != nil {
			l.add(f.at, fmt.Sprintf("files: duplicate %s, already named at %s:%d", quote(f.value), first.file.name, first.line()))
			continue
		}
		l.asnFiles[path] = f.at
		l.c.ASN.Files = append(l.c.ASN.Files, path)
		l.c.asnAt = append(l.c.asnAt, f.at)
	}
}

func notEmpty(s string) (string, error) {
	if s == "" || strings.ContainsRune(s, 0) {
		return "", fmt.Errorf("%s is not a valid file name", quote(s))
	}
	return s, nil
}

// name returns the key "name" of a listener, an attachment or a limit.
func name(t table) string {
	s, ok := t.text("name")
	if ok && !isName(s) {
		t.errorf("name", "must be 1 to 64 letters, digits, \"-\", \"_\" and \".\", and begin with a letter or digit, not %s", quote(s))
	}
	if s == "none" {
		t.errorf("name", "\"none\" is reserved: logs and metrics have it where there is no limit")
	}
	return s
}

// notEmpty reports empty arrays.
func (t table) notEmpty(keys ...string) {
	for _, key := range keys {
		if elems, ok := elements(t.values[key]); ok && len(elems) == 0 {
			t.errorf(key, "must not be empty")
		}
	}
}

// isName reports whether s is fit for metric labels, logs, paths and command lines.
func isName(s string) bool {
	return s != "" && strings.IndexByte("-_.", s[0]) < 0 && s != "" && len(s) <= 64 && strings.Trim(strings.ToLower(s), "abcdefghijklmnopqrstuvwxyz0123456789-_.") == ""
}

func (l *loader) listen(t table) {
	listen := Listen{
		Name:           name(t),
		ConnectTimeout: 5 * time.Second,
		UDPIdleTimeout: time.Minute,
		MaxFlows:       4096,
		Amplification:  3,
		EjectAfter:     3,
		EjectFor:       10 * time.Second,
	}
	addresses := list(t, "address", parseAddress)
	listen.Addresses = values(addresses)
	for _, a := range addresses {
		l.addresses = append(l.addresses, locatedAddress{a.value, len(l.c.Listen), a.at})
	}
	downstream := downstreams(t)
	listen.Downstream = values(downstream)
	decodeBalancing(t, &listen)
	listen.AcceptProxyFrom = values(list(t, "accept_proxy_from", parsePrefix))
	enumValue(t, "send_proxy", &listen.SendProxy)
	t.boolean("transparent", &listen.Transparent)
	t.boolean("access_log", &listen.AccessLog)
	t.notEmpty("address", "downstream")
	t.duration("connect_timeout", &listen.ConnectTimeout)
	t.duration("first_byte_timeout", &listen.FirstByteTimeout)
	t.duration("tcp_idle_timeout", &listen.TCPIdleTimeout)
	t.duration("half_close_timeout", &listen.HalfCloseTimeout)
	t.duration("max_lifetime", &listen.MaxLifetime)
	quantity(t, "min_throughput", &listen.MinThroughput, ParseRate)
	t.duration("udp_idle_timeout", &listen.UDPIdleTimeout)
	t.integer("max_flows", &listen.MaxFlows)
	listen.MaxFlowsPerSource = max(1, listen.MaxFlows/4)
	t.integer("max_flows_per_source", &listen.MaxFlowsPerSource)
	t.integer("amplification", &listen.Amplification)

	for _, d := range downstream {
		checkDownstream(t, addresses, d, listen.Transparent)
	}
	protocols := map[shaper.Protocol]bool{}
	for _, a := range addresses {
		protocols[a.value.Protocol] = true
	}
	if len(addresses) > 0 {
		if listen.SendProxy == ProxyV1 && protocols[shaper.UDP] {
			t.errorf("send_proxy", "\"v1\" is unsupported for UDP: use \"v2\"")
		}
		t.requireForEffect(protocols[shaper.TCP], "a tcp address", "accept_proxy_from", "check",
			"connect_timeout", "first_byte_timeout", "tcp_idle_timeout", "half_close_timeout", "max_lifetime", "min_throughput")
		t.requireForEffect(protocols[shaper.UDP], "a udp address: for TCP it is tcp_idle_timeout", "udp_idle_timeout")
		t.requireForEffect(protocols[shaper.UDP], "a udp address", "max_flows", "max_flows_per_source", "amplification")
	}
	l.c.Listen = append(l.c.Listen, listen)
	l.listens = append(l.listens, t)
}

// checkDownstream reports a port that no address uses, and forwarding loops. A
// transparent listener may have the address of its downstream, if that is another host.
func checkDownstream(t table, addresses []item[Address], d item[Downstream], transparent bool) {
	used := d.value.Port == 0 || len(addresses) == 0
	ip, _ := netip.ParseAddr(d.value.Host)
	for _, a := range addresses {
		single := a.value.single()
		used = used || single
		same := d.value.Port == 0 || !single || d.value.Port == a.value.Ports.First
		here := ip == a.value.Addr && !transparent || a.value.Addr.IsUnspecified() && ip.IsLoopback() && ip.Is4() == a.value.Addr.Is4()
		if same && here {
			t.add(d.at, fmt.Sprintf("downstream: %q is this listener's own address %q", d.value, a.value))
		}
	}
	if !used {
		t.add(d.at, fmt.Sprintf("downstream: %q has a port, and a range of ports maps to the same ports: write %q",
			d.value, Downstream{Host: d.value.Host}))
	}
}

func (l *loader) limit(t table) {
	l.applyOverrides(t)
	limit := shaper.Limit{
		Name:         name(t),
		IPv4Prefix:   32,
		IPv6Prefix:   64,
		MaxDelay:     200 * time.Millisecond,
		QueueTimeout: 2 * time.Second,
		MaxQueue:     1000,
	}
	var names references
	if match, ok := t.table("match"); ok {
		limit.Match = decodeMatch(match)
		names.listen = list(match, "listen", identity)
		names.attach = list(match, "attach", identity)
		if elems, ok := elements(match.values["attach"]); ok && len(elems) == 0 {
			match.errorf("attach", "must not be empty: name attachments, or remove the key for listeners")
		}
		limit.Match.Listen, limit.Match.Attach = values(names.listen), values(names.attach)
	}
	if limit.InPacketPlane() {
		limit.ECNMark, limit.MaxQueue = 50, 0
	}
	for _, f := range list(t, "key", parseField) {
		limit.Key |= f.value
	}
	t.integer("ipv4_prefix", &limit.IPv4Prefix)
	t.integer("ipv6_prefix", &limit.IPv6Prefix)
	enumValue(t, "direction", &limit.Direction)

	quantity(t, "rate", &limit.Rate, ParseRate)
	quantity(t, "packets", &limit.Packets, ParseFrequency)
	quantity(t, "burst", &limit.Burst, ParseSize)
	burstPackets := 0
	t.integer("burst_packets", &burstPackets)
	limit.BurstPackets = uint64(burstPackets)
	quantity(t, "overhead", &limit.Overhead, parseOverhead)
	t.duration("max_delay", &limit.MaxDelay)
	enumValue(t, "scheduling", &limit.Scheduling)
	quantity(t, "ecn_mark", &limit.ECNMark, parsePercent)

	connections := 100
	t.integer("max_connections", &connections)
	if t.has("max_connections") {
		limit.MaxConnections = connections
	}
	quantity(t, "new_connections", &limit.NewConnections, parseConnectionFrequency)
	t.duration("queue_timeout", &limit.QueueTimeout)
	t.integer("max_queue", &limit.MaxQueue)
	t.boolean("block", &limit.Block)
	if isUDPOnly(limit) {
		limit.RefuseWith = shaper.RefuseDrop
	}
	enumValue(t, "refuse_with", &limit.RefuseWith)
	quantity(t, "reply", &limit.Reply, parseReply)
	t.boolean("observe", &limit.Observe)

	if limit.Name == BlockedName || limit.Name == BlockedPacketsName {
		t.errorf("name", "%s is reserved for \"shaperd block\"", quote(limit.Name))
	}
	checkEffect(t, limit)
	l.c.Limits = append(l.c.Limits, limit)
	l.c.limitAt = append(l.c.limitAt, t.at)
	l.limits = append(l.limits, t)
	l.references = append(l.references, names)
}

// decodeMatch decodes a match, except the names of listeners and attachments. An empty list
// does not match everything: generated from an empty list of sources to block, it would
// block all.
func decodeMatch(t table) shaper.Match {
	var m shaper.Match
	for _, key := range []string{"listen", "source", "destination", "asn", "port"} {
		if elems, ok := elements(t.values[key]); ok && len(elems) == 0 {
			t.errorf(key, "must not be empty: remove the key to match all, or the limit to match none")
		}
	}
	if t.values["protocol"] != "" {
		enumValue(t, "protocol", &m.Protocol)
	}
	m.Source = values(list(t, "source", parsePrefix))
	m.Destination = values(list(t, "destination", parsePrefix))
	m.ASN = values(list(t, "asn", func(v any) (uint32, error) {
		switch v := v.(type) {
		case string:
			return parseASN(v)
		case int64:
			return parseASN(strconv.FormatInt(v, 10))
		}
		return 0, t.elementError("asn", v)
	}))
	m.Port = values(list(t, "port", func(v any) (shaper.PortRange, error) {
		switch v := v.(type) {
		case string:
			return parsePorts(v)
		case int64:
			return parsePorts(strconv.FormatInt(v, 10))
		}
		return shaper.PortRange{}, t.elementError("port", v)
	}))
	return m
}

func identity(s string) (string, error) { return s, nil }

// parseASN parses an AS number, "64500" or "AS64500".
func parseASN(s string) (uint32, error) {
	number := s
	if len(s) > 2 && strings.EqualFold(s[:2], "AS") {
		number = s[2:]
	}
	n, err := strconv.ParseUint(number, 10, 32)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%s is not an AS number from 1 to 4294967295, such as 64500 or \"AS64500\"", quote(s))
	}
	return uint32(n), nil
}

// parseField parses one attribute of a key.
func parseField(s string) (shaper.Fields, error) {
	if s == "all" {
		return 0, errors.New(`"all" is unsupported: use [] for one bucket for all`)
	}
	i := slices.Index(shaper.FieldNames(), s)
	if i < 0 {
		return 0, errors.New(unknownValue(s, shaper.FieldNames(), valueSynonyms["key"]))
	}
	return 1 << i, nil
}

// parseConnectionFrequency parses a frequency without the unit of packets.
func parseConnectionFrequency(s string) (shaper.Frequency, error) {
	if number, ok := strings.CutSuffix(s, "pps"); ok {
		return shaper.Frequency{}, fmt.Errorf("%s counts packets: write %q", quote(s), strings.TrimSuffix(number, " ")+"/s")
	}
	return ParseFrequency(s)
}
