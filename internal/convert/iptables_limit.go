package convert

import (
	"fmt"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/shaper/config"
)

// limit returns the keys of a limit that counts what a rule does. news is whether only first packets of connections get to
// the rule.
func (r *ipRule) limit(news bool) (keys []key, why string) {
	t := &table{}
	if r.conn != nil {
		why = r.connections(t)
	} else {
		why = r.packets(t, news)
	}
	if why != "" {
		return nil, why
	}
	if r.protocol == "tcp" && (r.conn != nil || news) {
		switch {
		case r.target == "DROP":
			t.set("refuse_with", `"drop"`, r.line, "-j DROP")
		case r.rejects != "tcp-reset":
			t.implied("refuse_with", `"reset"`, "in place of --reject-with "+r.rejects)
		}
	}
	return t.keys, ""
}

// connections sets the keys of a rule with connlimit.
func (r *ipRule) connections(t *table) (why string) {
	if r.protocol != "tcp" {
		return "attachments count TCP connections alone: with -p tcp it can be converted"
	}
	most, ok := count(r.conn.amount)
	if !ok {
		return "not a number of connections from 1 to 1048576"
	}
	if r.conn.mask != "0" {
		of := "source"
		if r.conn.ofDest {
			of = "destination"
		}
		t.set("key", quote(of), r.line, "by address")
		if why := r.prefix(t, r.conn.mask); why != "" {
			return why
		}
	}
	t.set("max_connections", strconv.Itoa(most), r.line, "connlimit")
	return ""
}

// prefix sets the prefix of the key.
func (r *ipRule) prefix(t *table, mask string) (why string) {
	n, err := strconv.Atoi(mask)
	switch {
	case mask == "" || mask == "32":
		return ""
	case err != nil || n < 1 || n > 32:
		return "not a prefix of IPv4"
	}
	t.set("ipv4_prefix", mask, r.line, "mask "+mask)
	return ""
}

// hashKeys are the modes of hashlimit that shaperd has.
var hashKeys = map[string]string{
	"": "", "srcip": `"source"`, "dstip": `"destination"`, "dstport": `"port"`,
	"srcip,dstport": `["source", "port"]`, "dstip,dstport": `["destination", "port"]`,
	"srcip,srcport,dstip,dstport": `"connection"`, "srcip,dstip,srcport,dstport": `"connection"`,
}

// packets sets the keys of a rule with hashlimit.
func (r *ipRule) packets(t *table, news bool) (why string) {
	by, ok := hashKeys[r.hash.mode]
	if !ok {
		return fmt.Sprintf("shaperd has no buckets for the mode %s", r.hash.mode)
	}
	if by != "" {
		t.set("key", by, r.line, "--hashlimit-mode "+r.hash.mode)
		if strings.Contains(by, "source") || strings.Contains(by, "destination") {
			if why := r.prefix(t, r.hash.mask); why != "" {
				return why
			}
		}
	}
	amount, per, _ := strings.Cut(r.hash.amount, "/")
	period, known := hashPeriods[per]
	if n, err := strconv.ParseUint(amount, 10, 32); err == nil && known && n > 0 {
		return r.perSecond(t, fmt.Sprint(n, period), news)
	}
	if per != "s" {
		return fmt.Sprintf("%q is not a rate", r.hash.amount)
	}
	return r.bytes(t, amount, news)
}

// perSecond sets the keys of a rate of packets or connections. The burst of hashlimit includes the packet that departs.
func (r *ipRule) perSecond(t *table, rate string, news bool) (why string) {
	burst := uint64(5) // the default
	if r.hash.burst != "" {
		n, err := strconv.ParseUint(r.hash.burst, 10, 32)
		if err != nil || n == 0 {
			return "not a burst of packets"
		}
		burst = n
	}
	if !news {
		t.set("packets", quote(rate), r.line, r.hash.amount)
		t.set("burst_packets", fmt.Sprint(burst-1), r.line, fmt.Sprintf("--hashlimit-burst %d, which includes the one that departs", burst))
		t.implied("max_delay", `"0s"`, "beyond that, packets are dropped")
		return ""
	}
	if r.protocol != "tcp" {
		return "only the first packets of connections get to it, and attachments count the connections of TCP alone"
	}
	t.set("new_connections", quote(rate), r.line, r.hash.amount+" of first packets")
	t.set("burst_connections", fmt.Sprint(burst), r.line, fmt.Sprintf("--hashlimit-burst %d", burst))
	t.implied("queue_timeout", `"0s"`, "beyond that, connections are refused")
	return ""
}

// bytes sets the keys of a rate of bytes, which hashlimit counts with the headers of IP.
func (r *ipRule) bytes(t *table, amount string, news bool) (why string) {
	sizes := map[string]uint64{"b": 1, "kb": 1 << 10, "mb": 1 << 20}
	rate, ok := scaled(amount, sizes)
	headers := map[string]string{"tcp": "40B", "udp": "28B", "icmp": "20B"}[r.protocol]
	switch {
	case !ok || rate == 0:
		return fmt.Sprintf("%q is not a rate", r.hash.amount)
	case news:
		return "only the first packets of connections get to it"
	case headers == "":
		return "it counts bytes with headers, whose size depends on the protocol: with -p it can be converted"
	}
	burst := rate
	if r.hash.burst != "" {
		if burst, ok = scaled(r.hash.burst, sizes); !ok {
			return "not a burst of bytes"
		}
	}
	t.set("rate", quote(config.FormatRateBytes(min(rate, 1<<50)*8)), r.line, r.hash.amount)
	t.set("burst", quote(config.FormatSize(burst)), r.line, "--hashlimit-burst "+r.hash.burst)
	t.implied("overhead", quote(headers), "hashlimit counts the headers of IP and "+r.protocol)
	t.implied("max_delay", `"0s"`, "beyond that, packets are dropped")
	return ""
}
