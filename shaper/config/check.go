package config

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

// Bounds of lists whose elements are compared with each other.
const (
	maxAddresses = 1024 // of all listeners
	maxPorts     = 1024 // of one match
	maxMarks     = 1024 // of one match
)

// checkEffect reports keys of a limit that have no effect, and values that it cannot have.
func checkEffect(t table, limit *shaper.Limit) {
	if limit.Block || t.has("shed") {
		if !checkRefusal(t, limit) {
			return
		}
	} else if block := t.values["block"]; !paced.met(limit, t.has) && !counting.met(limit, t.has) && (block == nil || block == false) {
		if len(t.unknownKeys()) > 0 { // possibly misspellings of these
			return
		}
		t.add(t.at, "[[limit]] has no effect: set rate, packets, max_connections, new_connections, quota, shed or block = true")
		return
	}
	t.checkNeeds(limit)
	if limit.RefuseWith == shaper.RefuseReply && limit.Reply == "" && !t.has("reply") {
		t.errorf("refuse_with", "\"reply\": missing key reply, such as \"http-429\" or a text")
	}
	switch match, _ := t.values["match"].(map[string]any); {
	case limit.InPacketPlane():
		checkAttachmentLimit(t, limit)
	case match["attach"] == nil: // otherwise the mistake in it is reported
		checkListenerLimit(t, limit)
	}
	for _, key := range []string{"max_connections", "new_connections"} {
		if t.has(key) && !notPerConnection.met(limit, t.has) {
			t.errorf(key, "%s", notPerConnection.message())
		}
	}

	checkBursts(t, limit)
	checkAlgorithm(t, limit)
	checkQuota(t, limit)
}

// checkBursts reports bursts that take too long to drain.
func checkBursts(t table, limit *shaper.Limit) {
	longest := leaky.FromDuration(shaper.MaxBurstTime)
	if leaky.NewRate(limit.Rate, 8e9).Cost(limit.Burst) > longest {
		t.errorf(t.overriddenKey("burst", "rate"), "a burst of %s takes more than 30 days at %s", FormatSize(limit.Burst), FormatRate(limit.Rate))
	}
	if leaky.NewRate(limit.Packets.N, limit.Packets.Per).Cost(limit.BurstPackets) > longest {
		t.errorf(t.overriddenKey("burst_packets", "packets"), "a burst of %d packets takes more than 30 days at %s", limit.BurstPackets, FormatFrequency(limit.Packets))
	}
	if limit.Shared && limit.BurstConnections > 1 {
		t.errorf(t.overriddenKey("burst_connections", "shared"), "unsupported with shared = true: all hosts would have their bursts at once")
	}
	if leaky.NewRate(limit.NewConnections.N, limit.NewConnections.Per).Cost(limit.BurstConnections) > longest {
		t.errorf(t.overriddenKey("burst_connections", "new_connections"), "a burst of %d connections takes more than 30 days at %s", limit.BurstConnections, FormatFrequency(limit.NewConnections))
	}
}

// checkAlgorithm reports what keeps new connections from being counted by another algorithm than a leaky bucket.
func checkAlgorithm(t table, limit *shaper.Limit) {
	n := limit.NewConnections.N
	if limit.Algorithm == shaper.LeakyBucket || n == 0 {
		return
	}
	at, is := t.overriddenKey("algorithm", "new_connections"), strconv.Quote(limit.Algorithm.String())
	switch {
	case limit.Shared:
		t.errorf(t.overriddenKey("algorithm", "shared"), "%s: unsupported with shared = true: hosts share a leaky bucket", is)
	case limit.InPacketPlane() && limit.Algorithm.HasHistory():
		t.errorf(at, "%s: unsupported at attachments, whose buckets are one number: use \"fixed-window\", or \"leaky\" with burst_connections", is)
	case limit.BurstConnections > 0:
		t.errorf(t.overriddenKey("burst_connections", "algorithm"), "has no effect with algorithm = %s, by which all of %s may come at once", is, FormatFrequency(limit.NewConnections))
	case limit.Algorithm == shaper.SlidingLog && n > leaky.MaxLog:
		t.errorf(t.overriddenKey("new_connections", "algorithm"), "%s: a log keeps the times of at most %d connections for each key; use \"sliding-window\"", FormatFrequency(limit.NewConnections), leaky.MaxLog)
	case n > shaper.MaxWindow:
		t.errorf(t.overriddenKey("new_connections", "algorithm"), "%s: must be at most %d in a window", FormatFrequency(limit.NewConnections), shaper.MaxWindow)
	}
}

// checkRefusal reports the keys that have no effect with block = true or shed. It returns false if it has reported any.
func checkRefusal(t table, limit *shaper.Limit) bool {
	alone, kind, what := true, "shed", "shed, which refuses a part of the traffic that matches"
	if limit.Block {
		kind, what = "block", "block = true, which refuses everything that matches"
	}
	for key := range t.values {
		effective := slices.Contains([]string{"name", "match", kind, "refuse_with", "reply", "observe"}, key) || key == "key" && limit.Key == 0
		if !effective && slices.Contains(t.keys.names(), key) {
			t.errorf(key, "has no effect with %s", what)
			alone = false
		}
	}
	if protocol := limit.Match.Protocol; limit.InPacketPlane() && (protocol == shaper.UDP || protocol == shaper.ICMP) && t.has("refuse_with") {
		t.errorf("refuse_with", "is for TCP connections, and match.protocol is %q: packets are dropped", protocol)
	}
	return alone
}

// check reports mistakes between tables. root is the root node of the main file.
func (l *loader) check(root *node) {
	if len(l.listens)+len(l.attaches) == 0 && !l.hasPlaces {
		l.add(root, "missing [[listen]] or [[attach]]: nothing to do")
	}
	if len(l.limits) > MaxLimits {
		l.add(l.limits[MaxLimits].at, fmt.Sprintf("too many limits: %d, of at most %d: two of %d are reserved for \"shaperd block\"", len(l.limits), MaxLimits, shaper.MaxLimits))
	}
	if dashboard := l.c.Daemon.Dashboard; dashboard == l.c.Daemon.Metrics && dashboard != "" && !strings.HasSuffix(dashboard, ":0") {
		at := cmp.Or(l.set["[daemon]dashboard"], l.set["[daemon]metrics"])
		l.add(at, fmt.Sprintf("dashboard and metrics are both at %s: must be different", quote(dashboard)))
	}
	l.checkOwnPorts()
	l.checkNames(slices.Concat(l.listens, l.attaches))
	l.checkNames(l.limits)
	l.checkGroups()
	l.checkOverlaps()
	l.checkForwardLoops()
	l.checkAttach()
	for _, t := range l.transparents {
		t.requireForEffect(hasTransparent(l.c), "a listener with transparent = true", t.keys.names()...)
	}
	var listeners, attachments, limits []string
	for _, listen := range l.c.Listen {
		listeners = append(listeners, listen.Name)
	}
	for _, attach := range l.c.Attach {
		attachments = append(attachments, attach.Name)
	}
	for _, limit := range l.c.Limits {
		limits = append(limits, limit.Name)
	}
	l.checkClasses(listeners)
	l.checkKnown(l.overridden, "limit", "limit", limits)
	for i, limit := range l.c.Limits {
		l.checkKnown(l.references[i].listen, "listen", "listener", listeners)
		l.checkKnown(l.references[i].attach, "attach", "attachment", attachments)
		l.checkShed(l.limits[i], limit, limits)
		l.checkMatch(l.limits[i], limit)
		checkKey(l.limits[i], limit)
	}
	l.checkPenalties(limits)
	// After any mistake, matches may not be complete.
	if len(l.mistakes) > 0 {
		return
	}
	l.checkCounting()
	l.checkMarks()
	l.checkShared()
	l.checkInstances()
	l.observeAttachments()
	for i, limit := range l.c.Limits {
		if limit.InPacketPlane() {
			l.checkFamilies(l.limits[i], limit)
		} else {
			l.checkReach(l.limits[i], limit)
		}
	}
}

// checkNames reports duplicate names.
func (l *loader) checkNames(tables []table) {
	first := map[string]table{}
	for _, t := range tables {
		name, ok := t.values["name"].(string)
		if !ok {
			continue
		}
		f, taken := first[name]
		if !taken {
			first[name] = t
			continue
		}
		at := f.at.child("name")
		t.errorf("name", "duplicate name %s: first in %s at %s:%d", quote(name), f.name, at.file.name, at.line())
	}
}

// checkOverlaps reports addresses that cannot both be bound.
func (l *loader) checkOverlaps() {
	if len(l.addresses) > maxAddresses {
		l.add(l.addresses[maxAddresses].at, fmt.Sprintf("too many addresses: %d, of at most %d", len(l.addresses), maxAddresses))
		return
	}
	for i, a := range l.addresses {
		for _, b := range l.addresses[:i] {
			if overlap(a.Address, b.Address) {
				l.add(a.at, fmt.Sprintf("address: %q overlaps %q at %s:%d", a.Address, b.Address, b.at.file.name, b.at.line()))
				break
			}
		}
	}
}

// overlap reports whether a and b share a port of an address.
func overlap(a, b shaper.Address) bool {
	return a.Protocol == b.Protocol && intersects(a.Ports, b.Ports) &&
		a.Addr.Is4() == b.Addr.Is4() && (a.Addr == b.Addr || a.Addr.IsUnspecified() || b.Addr.IsUnspecified())
}

// checkOwnPorts reports listeners with an address of the daemon itself.
func (l *loader) checkOwnPorts() {
	for _, own := range l.c.OwnPorts() {
		port := own.Addr.Port()
		taken := shaper.Address{Protocol: shaper.TCP, Addr: own.Addr.Addr(), Ports: shaper.PortRange{First: port, Last: port}}
		for _, a := range l.addresses {
			mapped := taken
			if taken.Addr == netip.IPv6Unspecified() && a.Addr.Is4() { // it accepts IPv4 too
				mapped.Addr = netip.IPv4Unspecified()
			}
			if overlap(a.Address, mapped) {
				l.add(a.at, fmt.Sprintf("address: %q has the port of %s, %q: must be different", a.Address, own.Key, own.At))
			}
		}
	}
}

// OwnPort is an address at which the daemon itself listens, with its key.
type OwnPort struct {
	Key, At string
	Addr    netip.AddrPort
}

// OwnPorts returns the addresses of metrics, dashboard and ledger, except host names.
func (c *Config) OwnPorts() (all []OwnPort) {
	for _, p := range []OwnPort{
		{Key: "[daemon] metrics", At: c.Daemon.Metrics},
		{Key: "[daemon] dashboard", At: c.Daemon.Dashboard},
		{Key: "[shared] serve", At: c.Shared.Serve},
	} {
		at := p.At
		if strings.HasPrefix(at, ":") {
			at = "[::]" + at
		}
		var err error
		if p.Addr, err = netip.ParseAddrPort(at); err == nil {
			all = append(all, p)
		}
	}
	return all
}

func intersects(a, b shaper.PortRange) bool { return a.First <= b.Last && b.First <= a.Last }

// checkKnown reports unknown names under a key of match. what is the kind of names.
func (l *loader) checkKnown(matched []item[string], key, what string, names []string) {
	for _, m := range matched {
		if slices.Contains(names, m.value) || l.full() {
			continue
		}
		msg := fmt.Sprintf("%s: unknown %s %s", key, what, quote(m.value))
		if near := Nearest(m.value, names); near != "" {
			msg += fmt.Sprintf("; did you mean %q?", near)
		}
		l.add(m.at, msg)
	}
}

// checkShed reports a limit that shed names and that does not tell how full it is.
func (l *loader) checkShed(t table, limit shaper.Limit, names []string) {
	if limit.Shed.Limit == "" {
		return
	}
	at := t.at.child("shed").child("limit")
	l.checkKnown([]item[string]{{limit.Shed.Limit, at}}, "limit", "limit", names)
	if i := slices.Index(names, limit.Shed.Limit); i >= 0 {
		if other := &l.c.Limits[i]; other.MaxConnections == 0 || other.Key != 0 || other.InPacketPlane() {
			l.add(at, fmt.Sprintf("limit: %s must have max_connections, no key, and apply to listeners, so that shed knows how full it is", quote(limit.Shed.Limit)))
		}
	}
}

// checkMatch reports too long lists of ports, and AS numbers without data.
func (l *loader) checkMatch(t table, limit shaper.Limit) {
	match := t.at.child("match")
	if len(limit.Match.Port) > maxPorts {
		l.add(match.child("port").elem(maxPorts), fmt.Sprintf("port: too many ports and ranges: %d, of at most %d", len(limit.Match.Port), maxPorts))
	}
	if len(limit.Match.Mark) > maxMarks {
		l.add(match.child("mark").elem(maxMarks), fmt.Sprintf("mark: too many marks: %d, of at most %d", len(limit.Match.Mark), maxMarks))
	}
	if len(l.asnFiles) == 0 && len(limit.Match.ASN) > 0 {
		l.add(match.child("asn"), "asn: missing [asn] files")
	}
	if len(l.asnFiles) == 0 && len(limit.Match.Country) > 0 {
		l.add(match.child("country"), "country: missing [asn] files")
	}
	if len(l.asnFiles) == 0 && limit.Key&shaper.KeyCountry != 0 {
		t.errorf("key", "\"country\": missing [asn] files")
	}
	if len(l.asnFiles) == 0 && len(limit.Except.ASN) > 0 {
		l.add(t.at.child("except").child("asn"), "asn: missing [asn] files")
	}
	if len(l.asnFiles) == 0 && slices.Contains(limit.Turns, shaper.TurnASN) {
		t.errorf("turns", "\"asn\": missing [asn] files")
	}
	if len(l.asnFiles) == 0 && limit.Key&shaper.KeyASN != 0 {
		t.errorf("key", "\"asn\": missing [asn] files")
	}
}

// checkKey reports attributes of a key that exclude each other.
func checkKey(t table, limit shaper.Limit) {
	if address := shaper.KeySource | shaper.KeyDestination; limit.Key&address == address {
		t.errorf("key", "\"source\" and \"destination\" cannot be combined: a key has one address; use two limits")
	}
	if t.tlvs() > 1 {
		t.errorf("key", "more than one \"tlv\": a key has at most one; use two limits")
	}
}

// tlvs returns how many attributes of a key are TLVs.
func (t table) tlvs() (n int) {
	list, _ := elements(t.values["key"])
	for _, e := range list {
		if s, ok := e.(string); ok && strings.HasPrefix(s, "tlv:") {
			n++
		}
	}
	return n
}

// checkReach reports limits, and ports of limits, that no traffic can match.
func (l *loader) checkReach(t table, limit shaper.Limit) {
	m, match := limit.Match, t.at.child("match")
	if len(l.c.Listen) == 0 {
		l.add(t.at, "[[limit]] matches nothing without a [[listen]]; name attachments in match.attach")
		return
	}
	var selected, met []shaper.Address
	for _, listen := range l.c.Listen {
		if len(m.Listen) > 0 && !slices.Contains(m.Listen, listen.Name) {
			continue
		}
		for _, a := range listen.Addresses {
			selected = append(selected, a)
			if m.Protocol == shaper.AnyProtocol || m.Protocol == a.Protocol {
				met = append(met, a)
			}
		}
		if m.Protocol == shaper.UDP || !listen.Accepts(shaper.TCP) {
			continue
		}
		for _, counts := range []struct {
			key, instead string
			there        bool
		}{
			{"packets", "use rate", limit.Packets.N > 0},
			{"overhead", "leave it out", limit.Overhead > 0},
			{"quota", "count bytes", limit.Quota.Unit == quota.Packets},
		} {
			if counts.there {
				t.errorf(counts.key, "listener %q proxies TCP, where a byte stream has no packets to count; match protocol \"udp\", or %s", listen.Name, counts.instead)
				return
			}
		}
	}
	if len(met) == 0 {
		l.add(match.child("protocol"), fmt.Sprintf("protocol: no matched listener has a %s address", m.Protocol))
		return
	}
	for i, ports := range m.Port {
		if !slices.ContainsFunc(selected, func(a shaper.Address) bool { return intersects(a.Ports, ports) }) {
			l.add(match.child("port").elem(i), fmt.Sprintf("port: no matched listener has port %s", ports))
		}
	}
	accepts := func(listen shaper.Listener) bool {
		return len(listen.AcceptProxyFrom) > 0 && (len(m.Listen) == 0 || slices.Contains(m.Listen, listen.Name))
	}
	if limit.Key&shaper.KeyTLV != 0 && !slices.ContainsFunc(l.c.Listen, accepts) {
		t.errorf("key", "%q: no matched listener has accept_proxy_from, so no connection has this TLV", shaper.TLVName(limit.TLV))
	}
	if limit.RefuseWith == shaper.RefuseReject && !slices.ContainsFunc(met, func(a shaper.Address) bool { return a.Protocol == shaper.UDP }) {
		t.errorf("refuse_with", "\"reject\" is for UDP, and no matched listener has a udp:// address; use \"reset\" or \"close\"")
	}
	if !slices.ContainsFunc(met, func(a shaper.Address) bool { return canMatch(a, m) }) {
		l.add(match, "match: no listener has the protocol, the ports and the address family: nothing can match")
	}
}

// checkFamilies reports sources and destinations without a common address family.
func (l *loader) checkFamilies(t table, limit shaper.Limit) {
	m := limit.Match
	common := len(m.Source) == 0 || len(m.Destination) == 0 || slices.ContainsFunc(m.Source, func(s netip.Prefix) bool {
		return slices.ContainsFunc(m.Destination, func(d netip.Prefix) bool { return s.Addr().Is4() == d.Addr().Is4() })
	})
	if !common {
		l.add(t.at.child("match"), "match: source and destination have no address family in common: nothing can match")
	}
}

// canMatch reports whether traffic to a can match the ports and sources of m.
func canMatch(a shaper.Address, m shaper.Match) bool {
	return (len(m.Port) == 0 || slices.ContainsFunc(m.Port, func(p shaper.PortRange) bool { return intersects(a.Ports, p) })) &&
		(len(m.Source) == 0 || slices.ContainsFunc(m.Source, func(p netip.Prefix) bool { return p.Addr().Is4() == a.Addr.Is4() }))
}
