package config

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// WriteText writes the canonical form of c, as [Config.Canonical], in a readable format.
func (c *Config) WriteText(w io.Writer) error {
	v := c.canonical()
	var b bytes.Buffer
	line := func(key string, value any) { fmt.Fprintf(&b, "  %-20s %v\n", key, value) }
	list := func(key string, values []string) {
		if len(values) > 0 {
			line(key, strings.Join(values, ", "))
		}
	}

	b.WriteString("daemon\n")
	line("observe", v.Daemon.Observe)
	line("metrics", cmp.Or(v.Daemon.Metrics, "off"))
	line("dashboard", cmp.Or(v.Daemon.Dashboard, "off"))
	line("max_buckets", v.Daemon.MaxBuckets)
	if v.Daemon.PinPath != "" {
		line("pin_path", v.Daemon.PinPath)
	}
	if v.Transparent != nil {
		b.WriteString("\ntransparent\n")
		line("rules", v.Transparent.Rules)
		line("mark", v.Transparent.Mark)
	}
	if len(v.ASN.Files) > 0 {
		b.WriteString("\nasn\n")
		list("files", v.ASN.Files)
	}
	for _, l := range v.Listen {
		fmt.Fprintf(&b, "\nlisten %s\n", l.Name)
		list("address", l.Address)
		list("downstream", stringsOf(l.Downstream))
		list("accept_proxy_from", l.AcceptProxyFrom)
		if l.SendProxy != "" {
			line("send_proxy", l.SendProxy)
		}
		if l.Transparent {
			line("transparent", true)
		}
		if l.AccessLog {
			line("access_log", true)
		}
		if l.Balance != "" {
			line("balance", l.Balance)
		}
		if l.SlowStart != nil {
			line("slow_start", l.SlowStart)
		}
		if l.Check != nil {
			line("check", l.Check)
		}
		if l.Eject != nil {
			line("eject", l.Eject)
		}
		if l.ConnectTimeout != nil {
			line("connect_timeout", l.ConnectTimeout)
		}
		for _, t := range []struct {
			key string
			d   *canonicalTime
		}{
			{"first_byte_timeout", l.FirstByteTimeout},
			{"tcp_idle_timeout", l.TCPIdleTimeout},
			{"half_close_timeout", l.HalfCloseTimeout},
			{"max_lifetime", l.MaxLifetime},
		} {
			if t.d != nil {
				line(t.key, t.d)
			}
		}
		if l.MinThroughput != nil {
			line("min_throughput", l.MinThroughput)
		}
		if l.UDPIdleTimeout != nil {
			line("udp_idle_timeout", l.UDPIdleTimeout)
			line("max_flows", l.MaxFlows)
			line("max_flows_per_source", l.MaxFlowsPerSource)
			line("amplification", *l.Amplification)
		}
	}
	for _, a := range v.Attach {
		fmt.Fprintf(&b, "\nattach %s\n", a.Name)
		list("interface", a.Interface)
		line("direction", a.Direction)
		line("mode", a.Mode)
		line("observe", a.Observe)
		line("hook", a.Hook)
		line("on_stop", a.OnStop)
		if a.Queue > 0 {
			line("queue", a.Queue)
		}
		if a.TCPIdleTimeout != nil {
			line("tcp_idle_timeout", a.TCPIdleTimeout)
		}
	}
	for _, l := range v.Limit {
		fmt.Fprintf(&b, "\nlimit %s\n", l.Name)
		l.write(line, list)
	}
	_, err := w.Write(b.Bytes())
	return err
}

func (l *canonicalLimit) write(line func(string, any), list func(string, []string)) {
	line("observe", l.Observe)
	list("match listen", l.Match.Listen)
	list("match attach", l.Match.Attach)
	if l.Match.Protocol != "" {
		line("match protocol", l.Match.Protocol)
	}
	list("match source", l.Match.Source)
	list("match destination", l.Match.Destination)
	if len(l.Match.ASN) > 0 {
		line("match asn", strings.Trim(strings.ReplaceAll(fmt.Sprint(l.Match.ASN), " ", ", "), "[]"))
	}
	list("match port", l.Match.Port)
	if l.Block {
		line("block", "all that is matched")
	} else if len(l.Key) == 0 {
		line("key", "one bucket for all")
	}
	list("key", l.Key)
	if l.IPv4Prefix > 0 {
		line("source prefix", fmt.Sprintf("/%d of IPv4, /%d of IPv6", l.IPv4Prefix, l.IPv6Prefix))
	}
	if l.Rate != nil {
		line("rate", l.Rate)
		line("burst", l.Burst)
	}
	if l.Packets != nil {
		line("packets", l.Packets)
		line("burst_packets", *l.BurstPackets)
	}
	if l.Overhead != nil {
		line("overhead", l.Overhead)
	}
	if l.MaxDelay != nil {
		line("max_delay", l.MaxDelay)
	}
	if l.Scheduling != "" {
		line("scheduling", l.Scheduling)
	}
	if l.ECNMark != nil {
		line("ecn_mark", l.ECNMark)
	}
	if l.Direction != "" {
		line("direction", l.Direction)
	}
	if l.MaxConnections > 0 {
		line("max_connections", l.MaxConnections)
	}
	if l.NewConnections != nil {
		line("new_connections", l.NewConnections)
	}
	if l.QueueTimeout != nil {
		line("queue_timeout", l.QueueTimeout)
	}
	if l.MaxQueue != nil {
		line("max_queue", *l.MaxQueue)
	}
	if l.RefuseWith != "" {
		line("refuse_with", l.RefuseWith)
	}
	if l.Reply != "" {
		line("reply", strconv.Quote(l.Reply))
	}
}
