package config

import (
	"fmt"
	"net/netip"
	"slices"

	"shaperd/leaky"
	"shaperd/shaper"
)

// Bounds of what is compared with each other, one by one.
const (
	maxAddresses = 1024 // of all listeners
	maxPorts     = 1024 // that one limit matches
)

// checkEffect reports keys of a limit that would have none, and bursts that last
// too long.
func checkEffect(t table, limit shaper.Limit) {
	rate, packets := t.has("rate"), t.has("packets")
	shapes := rate || packets
	counts := t.has("connections") || t.has("new_connections")
	if !shapes && !counts {
		t.add(t.at, "[[limit]] limits nothing: give it rate, packets, connections or new_connections")
		return
	}
	// Written out, the default says what is so anyway.
	t.idle(rate || limit.Burst == 0, "rate", "burst")
	t.idle(packets, "packets", "burst_packets")
	t.idle(shapes, "rate or packets", "max_delay", "direction")
	t.idle(counts, "connections or new_connections", "max_wait", "max_waiting", "excess")
	t.idle(limit.Key&shaper.KeySource != 0, `"source" in key`, "ipv4_prefix", "ipv6_prefix")
	for _, key := range []string{"connections", "new_connections"} {
		if limit.Key&shaper.KeyConnection != 0 && t.has(key) {
			t.bad(key, "has no effect with \"connection\" in key, where each connection is alone")
		}
	}

	longest := leaky.FromDuration(shaper.MaxBurstTime)
	if leaky.NewRate(limit.Rate, 8e9).Cost(limit.Burst) > longest {
		t.bad("burst", "%s takes more than 30 days at %s", FormatSize(limit.Burst), FormatRate(limit.Rate))
	}
	if leaky.NewRate(limit.Packets.N, limit.Packets.Per).Cost(limit.BurstPackets) > longest {
		t.bad("burst_packets", "%d packets take more than 30 days at %s", limit.BurstPackets, FormatFrequency(limit.Packets))
	}
}

// check finds mistakes between tables. root is the place of the main file.
func (l *loader) check(root *node) {
	if len(l.listens) == 0 {
		l.add(root, "there is no [[listen]]: nothing to do")
	}
	if len(l.limits) > shaper.MaxLimits {
		l.add(l.limits[shaper.MaxLimits].at, fmt.Sprintf("%d limits, more than the %d there may be", len(l.limits), shaper.MaxLimits))
	}
	l.checkNames(l.listens)
	l.checkNames(l.limits)
	l.checkOverlaps()
	var names []string
	for _, listen := range l.c.Listen {
		names = append(names, listen.Name)
	}
	for i, limit := range l.c.Limits {
		l.checkListen(l.matched[i], names)
		l.checkMatch(l.limits[i], limit)
	}
	// With a mistake somewhere, what a limit seems to match may not be so.
	if len(l.mistakes) > 0 {
		return
	}
	listeners := l.c.Listeners()
	for i, limit := range l.c.Limits {
		l.checkReach(l.limits[i], limit, listeners)
	}
}

// checkNames reports names that stand twice.
func (l *loader) checkNames(tables []table) {
	first := map[string]*node{}
	for _, t := range tables {
		name, ok := t.values["name"].(string)
		if !ok {
			continue
		}
		at := t.at.child("name")
		if f := first[name]; f != nil {
			t.bad("name", "%s is the name of another %s at %s:%d", quote(name), t.name, f.file.name, f.line())
			continue
		}
		first[name] = at
	}
}

// checkOverlaps reports addresses that cannot both be opened.
func (l *loader) checkOverlaps() {
	if len(l.addresses) > maxAddresses {
		l.add(l.addresses[maxAddresses].at, fmt.Sprintf("%d addresses, more than the %d there may be", len(l.addresses), maxAddresses))
		return
	}
	for i, a := range l.addresses {
		for _, b := range l.addresses[:i] {
			if a.overlaps(b.Address) {
				l.add(a.at, fmt.Sprintf("address: %q overlaps %q at %s:%d", a.Address, b.Address, b.at.file.name, b.at.line()))
				break
			}
		}
	}
}

// overlaps reports whether a and b share a port of an address.
func (a Address) overlaps(b Address) bool {
	return a.Protocol == b.Protocol && intersects(a.Ports, b.Ports) &&
		a.Addr.Is4() == b.Addr.Is4() && (a.Addr == b.Addr || a.Addr.IsUnspecified() || b.Addr.IsUnspecified())
}

func intersects(a, b shaper.PortRange) bool { return a.First <= b.Last && b.First <= a.Last }

// checkListen reports names of listeners that none has.
func (l *loader) checkListen(matched []item[string], names []string) {
	for _, m := range matched {
		if slices.Contains(names, m.value) || l.full() {
			continue
		}
		msg := fmt.Sprintf("listen: there is no listener %s", quote(m.value))
		if near := nearest(m.value, names); near != "" {
			msg += fmt.Sprintf("; did you mean %q?", near)
		}
		l.add(m.at, msg)
	}
}

// checkMatch reports matches that are too many, and ASNs without data.
func (l *loader) checkMatch(t table, limit shaper.Limit) {
	match := t.at.child("match")
	if len(limit.Match.Port) > maxPorts {
		l.add(match.child("port").elem(maxPorts), fmt.Sprintf("port: %d ports and ranges, more than the %d there may be", len(limit.Match.Port), maxPorts))
	}
	if len(l.asnFiles) == 0 && len(limit.Match.ASN) > 0 {
		l.add(match.child("asn"), "asn: no [asn] files say which addresses these are")
	}
	if len(l.asnFiles) == 0 && limit.Key&shaper.KeyASN != 0 {
		t.bad("key", "\"asn\" needs [asn] files that say which addresses are whose")
	}
}

// checkReach reports limits, and ports of limits, that no traffic can meet.
func (l *loader) checkReach(t table, limit shaper.Limit, listeners []shaper.Listener) {
	m, match := limit.Match, t.at.child("match")
	var selected, met []Address
	for i, listen := range l.c.Listen {
		if len(m.Listen) > 0 && !slices.Contains(m.Listen, listen.Name) {
			continue
		}
		for _, a := range listen.Addresses {
			selected = append(selected, a)
			if m.Protocol == shaper.AnyProtocol || m.Protocol == a.Protocol {
				met = append(met, a)
			}
		}
		if limit.Packets.N > 0 && m.Protocol != shaper.UDP && listeners[i].TCP {
			t.bad("packets", "listener %q proxies TCP, where a byte stream has no packets to count; match protocol \"udp\", or use rate", listen.Name)
			return
		}
	}
	if len(met) == 0 {
		l.add(match.child("protocol"), fmt.Sprintf("protocol: no listener that is matched has a %s address", m.Protocol))
		return
	}
	for i, ports := range m.Port {
		if !slices.ContainsFunc(selected, func(a Address) bool { return intersects(a.Ports, ports) }) {
			l.add(match.child("port").elem(i), fmt.Sprintf("port: no listener that is matched has port %s", formatPorts(ports)))
		}
	}
	if !slices.ContainsFunc(met, func(a Address) bool { return meets(a, m) }) {
		l.add(match, "match: no listener has the protocol, the ports and the address family together: nothing can match")
	}
}

// meets reports whether traffic to a can have the ports and sources of m.
func meets(a Address, m shaper.Match) bool {
	return (len(m.Port) == 0 || slices.ContainsFunc(m.Port, func(p shaper.PortRange) bool { return intersects(a.Ports, p) })) &&
		(len(m.Source) == 0 || slices.ContainsFunc(m.Source, func(p netip.Prefix) bool { return p.Addr().Is4() == a.Addr.Is4() }))
}
