package convert

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
)

// stream converts the block "stream".
func (n *nginx) stream(stream *ngDirective) {
	for _, d := range stream.block {
		switch {
		case d.name() == "upstream" && d.block != nil && len(d.words) == 2:
			n.upstreams[d.words[1]] = d
			d.used = true
		case d.name() == "limit_conn_zone" && len(d.words) == 3:
			zone, _, _ := strings.Cut(strings.TrimPrefix(d.words[2], "zone="), ":")
			n.zones[zone] = d
			d.used = true
		}
	}
	for _, d := range stream.block {
		if d.name() == "server" && d.block != nil {
			d.used = true
			if why := n.server(d, stream); why != "" {
				n.leaveOut(d.line, d.text(), "%s", why)
				continue
			}
			n.leaveOutRest(d.block)
		}
	}
	for _, d := range stream.block {
		if d.name() == "upstream" && d.used {
			n.leaveOutRest(d.block)
		}
	}
	n.leaveOutRest(stream.block)
}

func (n *nginx) leaveOutRest(block []*ngDirective) {
	for _, d := range block {
		if !d.used {
			n.leaveOut(d.line, d.text(), "%s", ngReason(d, "it has no counterpart"))
		}
	}
}

// A ngUpstream is a server that connections are forwarded to.
type ngUpstream struct {
	d        *ngDirective
	address  string
	weight   int
	maxConns int // 0 is no bound
}

// server converts a block "server", or returns why it cannot be converted.
func (n *nginx) server(d, stream *ngDirective) (why string) {
	if n.full("listen") {
		return tooMany
	}
	var addresses []string
	udp := 0
	var listen *ngDirective
	for _, l := range d.block {
		if l.name() != "listen" || len(l.words) < 2 {
			continue
		}
		l.used = true
		address, isUDP, why := n.ngListen(l)
		if why != "" {
			return why
		}
		if isUDP {
			udp++
		}
		if listen == nil {
			listen = l
		}
		addresses = append(addresses, address)
	}
	if listen == nil {
		return "it has no listen"
	}
	if udp > 0 && udp < len(addresses) {
		return "it listens for TCP and for UDP: make it two servers"
	}
	pass := find("proxy_pass", d.block)
	if pass == nil {
		return "it has no proxy_pass"
	}
	if ssl := find("proxy_ssl", d.block, stream.block); ssl != nil && ssl.words[1] != "off" {
		return "shaperd does not open TLS connections"
	}
	upstream := n.upstreams[pass.words[1]]
	servers, why := n.servers(pass, upstream)
	if why != "" {
		return why
	}
	name := pass.words[1]
	if upstream == nil {
		_, port, _ := net.SplitHostPort(listen.words[1])
		name = "listen-" + port
		if port == "" {
			name = "listen-" + listen.words[1]
		}
	}
	t := n.add("listen", name, d.line, d.text())
	t.set("address", quoteList(addresses), listen.line, listen.text())
	n.downstreams(t, pass, upstream, servers)
	n.timeouts(t, udp > 0, d.block, stream.block)
	if proxy := find("proxy_protocol", d.block, stream.block); proxy != nil && proxy.words[1] == "on" {
		t.set("send_proxy", `"v1"`, proxy.line, proxy.text())
	}
	n.maxConns(t, d, upstream, servers)
	n.limitConn(t, d, stream)
	for _, side := range []string{"upload", "download"} {
		n.rate(t, udp > 0, side, d, stream)
	}
	return ""
}

// servers returns what a server forwards to, or why that cannot be converted.
func (n *nginx) servers(pass, upstream *ngDirective) (all []ngUpstream, why string) {
	if upstream == nil {
		to := pass.words[1]
		if host, _, err := net.SplitHostPort(to); err != nil || host == "" || strings.ContainsAny(to, "$") {
			return nil, fmt.Sprintf("%q is neither an upstream nor an address with a port", to)
		}
		return []ngUpstream{{d: pass, address: to, weight: 1}}, ""
	}
	zone := find("zone", upstream.block) != nil
	for _, d := range upstream.block {
		if d.name() != "server" || len(d.words) < 2 {
			continue
		}
		d.used = true
		s := ngUpstream{d: d, address: d.words[1], weight: 1}
		if host, _, err := net.SplitHostPort(s.address); err != nil || host == "" {
			return nil, fmt.Sprintf("%q is not an address with a port", s.address)
		}
		spare := false
		for _, option := range d.words[2:] {
			key, value, _ := strings.Cut(option, "=")
			number, err := strconv.Atoi(value)
			switch {
			case key == "weight" && err == nil && number >= 1 && number <= 256:
				s.weight = number
			case key == "max_conns" && err == nil && number >= 0 && number <= 1<<20:
				s.maxConns = number
				if number > 0 && !zone {
					n.leaveOut(d.line, option, "without a zone nginx counts in each worker process; shaperd counts all")
				}
			case key == "backup" || key == "down":
				n.leaveOut(d.line, d.text(), "shaperd uses all downstreams")
				spare = true
			default:
				n.leaveOut(d.line, option, "an option of a server that shaperd does not have; see eject, check and slow_start")
			}
		}
		if !spare {
			all = append(all, s)
		}
	}
	if len(all) == 0 {
		return nil, "it has no server"
	}
	return all, ""
}

func (n *nginx) downstreams(t *table, pass, upstream *ngDirective, servers []ngUpstream) {
	if len(servers) == 1 {
		t.set("downstream", quote(servers[0].address), servers[0].d.line, servers[0].d.text())
		return
	}
	var all []string
	capped := false
	for _, s := range servers {
		one := "{ address = " + quote(s.address)
		if s.weight != 1 {
			one += fmt.Sprintf(", weight = %d", s.weight)
		}
		if s.maxConns > 0 {
			one += fmt.Sprintf(", max_connections = %d", s.maxConns)
			capped = true
		}
		all = append(all, one+" }")
	}
	t.set("downstream", "["+strings.Join(all, ", ")+"]", servers[0].d.line, "the servers of "+upstream.text())
	if capped {
		n.leaveOut(pass.line, pass.text(), "when all servers have max_conns, nginx refuses a connection, and shaperd lets it wait for up to connect_timeout")
	}
	for _, d := range upstream.block {
		switch {
		case d.name() == "least_conn":
			d.used = true
			t.option("balance", `"least-connections"`, d.line, d.text())
		case d.name() == "hash" && len(d.words) > 1 && isSource(d.words[1]):
			d.used = true
			t.option("balance", `"source-hash"`, d.line, d.text())
		}
	}
}

func isSource(variable string) bool {
	return slices.Contains([]string{"$remote_addr", "$binary_remote_addr", "${remote_addr}", "${binary_remote_addr}"}, variable)
}

// timeouts sets the timeouts of a listener. Without a directive they are those of nginx.
func (n *nginx) timeouts(t *table, udp bool, blocks ...[]*ngDirective) {
	idle := "tcp_idle_timeout"
	if udp {
		idle = "udp_idle_timeout"
	}
	for _, k := range []struct{ name, directive, normal string }{
		{"connect_timeout", "proxy_connect_timeout", "60s"},
		{idle, "proxy_timeout", "10m"},
	} {
		if udp && k.name == "connect_timeout" {
			continue
		}
		d := find(k.directive, blocks...)
		if d == nil {
			v, _ := ngTime(k.normal)
			t.implied(k.name, duration(v), "the default of "+k.directive)
			continue
		}
		if v, ok := ngTime(d.words[1]); ok && len(d.words) == 2 {
			t.option(k.name, duration(v), d.line, d.text())
		} else {
			n.leaveOut(d.line, d.text(), "not a time")
		}
	}
}

// maxConns converts the max_conns of a single server, which the servers that forward to it share.
func (n *nginx) maxConns(listen *table, d, upstream *ngDirective, servers []ngUpstream) {
	if len(servers) > 1 || servers[0].maxConns == 0 {
		return
	}
	if t := n.limited["upstream "+upstream.words[1]]; t != nil {
		t.addListen(listen.name)
		return
	}
	t := n.add("limit", upstream.words[1]+"-max-conns", servers[0].d.line, servers[0].d.text())
	n.limited["upstream "+upstream.words[1]] = t
	t.match(listen.name, d.line, d.text())
	t.set("max_connections", strconv.Itoa(servers[0].maxConns), servers[0].d.line, fmt.Sprintf("max_conns=%d", servers[0].maxConns))
	t.implied("queue_timeout", `"0s"`, "nginx refuses at once")
}

// limitConn converts the directives limit_conn of a server, or those of the stream if it has none.
func (n *nginx) limitConn(listen *table, d, stream *ngDirective) {
	named := func(block []*ngDirective) (found []*ngDirective) {
		for _, d := range block {
			if d.name() == "limit_conn" {
				d.used = true
				found = append(found, d)
			}
		}
		return found
	}
	found := named(d.block)
	if len(found) == 0 {
		found = named(stream.block)
	}
	dry := find("limit_conn_dry_run", d.block, stream.block)
	for _, l := range found {
		if why := n.oneLimitConn(listen, d, stream, l, dry); why != "" {
			n.leaveOut(l.line, l.text(), "%s", why)
		}
	}
}

// A ngZoneUse is how servers use a zone.
type ngZoneUse struct {
	most     int
	observed bool
}

func (n *nginx) oneLimitConn(listen *table, d, stream, l, dry *ngDirective) (why string) {
	if len(l.words) != 3 {
		return "it is not a zone and a number"
	}
	name := l.words[1]
	most, ok := count(l.words[2])
	zone := n.zones[name]
	switch {
	case !ok:
		return "not a number of connections from 1 to 1048576"
	case zone == nil:
		return fmt.Sprintf("there is no limit_conn_zone %q", name)
	case !isSource(zone.words[1]):
		return fmt.Sprintf("the key of its zone is %s, not $binary_remote_addr", zone.words[1])
	}
	observed := dry != nil && dry.words[1] == "on"
	use := ngZoneUse{most, observed}
	if t := n.limited["zone "+name]; t != nil {
		if n.uses[name] != use {
			return "another server has the same zone with another number, or only one of both has limit_conn_dry_run"
		}
		t.addListen(listen.name)
		return ""
	}
	n.uses[name] = use
	t := n.add("limit", name, l.line, l.text())
	n.limited["zone "+name] = t
	t.match(listen.name, d.line, d.text())
	t.set("key", `"source"`, zone.line, zone.text())
	t.ipv6Prefix(listensIPv6(stream))
	t.set("max_connections", strconv.Itoa(most), l.line, l.text())
	t.implied("queue_timeout", `"0s"`, "nginx refuses at once")
	if observed {
		t.set("observe", "true", dry.line, dry.text())
	}
	return ""
}

// rate converts proxy_upload_rate or proxy_download_rate.
func (n *nginx) rate(listen *table, udp bool, side string, d, stream *ngDirective) {
	r := find("proxy_"+side+"_rate", d.block, stream.block)
	if r == nil {
		return
	}
	bytes, ok := scaled(r.words[1], map[string]uint64{"": 1, "k": 1 << 10, "m": 1 << 20})
	switch {
	case !ok || len(r.words) != 2:
		n.leaveOut(r.line, r.text(), "not a number of bytes")
		return
	case bytes == 0:
		return
	case udp:
		n.leaveOut(r.line, r.text(), "shaperd drops datagrams that would wait longer than max_delay: choose that first")
		return
	}
	t := n.add("limit", listen.name+"-"+side, r.line, r.text())
	t.match(listen.name, d.line, d.text())
	t.implied("key", `"connection"`, "nginx limits each connection")
	if side == "download" {
		t.set("direction", `"from-downstream"`, r.line, r.text())
	}
	t.set("rate", bytesIn(bytes, time.Second), r.line, r.text()+"; nginx passes up to that many bytes at once")
}

// listensIPv6 reports whether a server of a stream listens on an IPv6 address.
func listensIPv6(stream *ngDirective) bool {
	return slices.ContainsFunc(stream.block, func(d *ngDirective) bool {
		return slices.ContainsFunc(d.block, func(l *ngDirective) bool {
			return l.name() == "listen" && len(l.words) > 1 && strings.HasPrefix(l.words[1], "[")
		})
	})
}
