package config

import (
	"fmt"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// canonical is a configuration with all defaults, and all values in canonical spelling,
// without unused keys of limits.
type canonical struct {
	Daemon      canonicalDaemon       `json:"daemon"`
	Transparent *canonicalTransparent `json:"transparent,omitempty"`
	ASN         canonicalASN          `json:"asn"`
	Listen      []canonicalListen     `json:"listen"`
	Attach      []canonicalAttach     `json:"attach"`
	Limit       []canonicalLimit      `json:"limit"`
}

type canonicalDaemon struct {
	Observe    bool   `json:"observe"`
	Metrics    string `json:"metrics"`
	Dashboard  string `json:"dashboard"`
	MaxBuckets int    `json:"max_buckets"`
	PinPath    string `json:"pin_path,omitempty"`
}

type canonicalTransparent struct {
	Rules string `json:"rules"`
	Mark  int    `json:"mark"`
}

type canonicalASN struct {
	Files []string `json:"files"`
}

type canonicalListen struct {
	Name              string                `json:"name"`
	Address           []string              `json:"address"`
	Downstream        []canonicalDownstream `json:"downstream"`
	AcceptProxyFrom   []string              `json:"accept_proxy_from,omitempty"`
	SendProxy         string                `json:"send_proxy,omitempty"`
	Transparent       bool                  `json:"transparent,omitempty"`
	AccessLog         bool                  `json:"access_log,omitempty"`
	Balance           string                `json:"balance,omitempty"`
	SlowStart         *canonicalTime        `json:"slow_start,omitempty"`
	Check             *canonicalCheck       `json:"check,omitempty"`
	Eject             *canonicalEject       `json:"eject,omitempty"`
	ConnectTimeout    *canonicalTime        `json:"connect_timeout,omitempty"`
	FirstByteTimeout  *canonicalTime        `json:"first_byte_timeout,omitempty"`
	TCPIdleTimeout    *canonicalTime        `json:"tcp_idle_timeout,omitempty"`
	HalfCloseTimeout  *canonicalTime        `json:"half_close_timeout,omitempty"`
	MaxLifetime       *canonicalTime        `json:"max_lifetime,omitempty"`
	MinThroughput     *canonicalRate        `json:"min_throughput,omitempty"`
	UDPIdleTimeout    *canonicalTime        `json:"udp_idle_timeout,omitempty"`
	MaxFlows          int                   `json:"max_flows,omitempty"`
	MaxFlowsPerSource int                   `json:"max_flows_per_source,omitempty"`
	Amplification     *int                  `json:"amplification,omitempty"`
}

type canonicalAttach struct {
	Name           string         `json:"name"`
	Interface      []string       `json:"interface"`
	Direction      string         `json:"direction"`
	Mode           string         `json:"mode"`
	Observe        bool           `json:"observe"`
	Hook           string         `json:"hook"`
	OnStop         string         `json:"on_stop"`
	Queue          int            `json:"queue,omitempty"`
	TCPIdleTimeout *canonicalTime `json:"tcp_idle_timeout,omitempty"`
}

type canonicalLimit struct {
	Name           string              `json:"name"`
	Observe        bool                `json:"observe"`
	Match          canonicalMatch      `json:"match"`
	Key            []string            `json:"key"`
	IPv4Prefix     int                 `json:"ipv4_prefix,omitempty"`
	IPv6Prefix     int                 `json:"ipv6_prefix,omitempty"`
	Direction      string              `json:"direction,omitempty"`
	Rate           *canonicalRate      `json:"rate,omitempty"`
	Burst          *canonicalSize      `json:"burst,omitempty"`
	Packets        *canonicalFrequency `json:"packets,omitempty"`
	BurstPackets   *uint64             `json:"burst_packets,omitempty"`
	Overhead       *canonicalSize      `json:"overhead,omitempty"`
	MaxDelay       *canonicalTime      `json:"max_delay,omitempty"`
	Scheduling     string              `json:"scheduling,omitempty"`
	ECNMark        *canonicalPercent   `json:"ecn_mark,omitempty"`
	MaxConnections int                 `json:"max_connections,omitempty"`
	NewConnections *canonicalFrequency `json:"new_connections,omitempty"`
	QueueTimeout   *canonicalTime      `json:"queue_timeout,omitempty"`
	MaxQueue       *int                `json:"max_queue,omitempty"`
	Block          bool                `json:"block,omitempty"`
	RefuseWith     string              `json:"refuse_with,omitempty"`
	Reply          string              `json:"reply,omitempty"`
}

type canonicalMatch struct {
	Listen      []string `json:"listen,omitempty"`
	Attach      []string `json:"attach,omitempty"`
	Protocol    string   `json:"protocol,omitempty"`
	Source      []string `json:"source,omitempty"`
	Destination []string `json:"destination,omitempty"`
	ASN         []uint32 `json:"asn,omitempty"`
	Port        []string `json:"port,omitempty"`
}

type canonicalRate struct {
	Text           string  `json:"text"`
	BitsPerSecond  uint64  `json:"bits_per_second"`
	BytesPerSecond float64 `json:"bytes_per_second"` // exact: an eighth of an integer below 2^53
}

type canonicalSize struct {
	Text  string `json:"text"`
	Bytes uint64 `json:"bytes"`
}

type canonicalTime struct {
	Text    string  `json:"text"`
	Seconds float64 `json:"seconds"`
}

type canonicalDownstream struct {
	text           string
	Address        string `json:"address"`
	Weight         int    `json:"weight"`
	MaxConnections int    `json:"max_connections,omitempty"`
}

type canonicalCheck struct {
	Interval canonicalTime `json:"interval"`
	Timeout  canonicalTime `json:"timeout"`
	Rise     int           `json:"rise"`
	Fall     int           `json:"fall"`
}

type canonicalEject struct {
	After int           `json:"after"`
	For   canonicalTime `json:"for"`
}

func (d canonicalDownstream) String() string { return d.text }

func (c *canonicalCheck) String() string {
	return fmt.Sprintf("every %s, given up after %s; up after %d, down after %d", c.Interval.Text, c.Timeout.Text, c.Rise, c.Fall)
}

func (e *canonicalEject) String() string {
	return fmt.Sprintf("after %d failed dials, for %s", e.After, e.For.Text)
}

type canonicalPercent struct {
	Text    string `json:"text"`
	Percent int    `json:"percent"`
}

type canonicalFrequency struct {
	Text    string  `json:"text"`
	Count   uint64  `json:"count"`
	Seconds float64 `json:"seconds"` // period in which Count events may occur
}

func (v *canonicalRate) String() string      { return v.Text }
func (v *canonicalSize) String() string      { return v.Text }
func (v *canonicalTime) String() string      { return v.Text }
func (v *canonicalPercent) String() string   { return v.Text }
func (v *canonicalFrequency) String() string { return v.Text }

// Canonical returns c for encoding/json: with all defaults, all values in canonical
// spelling, and quantities also as numbers.
func (c *Config) Canonical() any { return c.canonical() }

func (c *Config) canonical() canonical {
	v := canonical{
		Daemon: canonicalDaemon{Observe: c.Daemon.Observe, Metrics: c.Daemon.Metrics, Dashboard: c.Daemon.Dashboard, MaxBuckets: c.Daemon.MaxBuckets},
		ASN:    canonicalASN{append([]string{}, c.ASN.Files...)},
		Listen: []canonicalListen{},
		Attach: []canonicalAttach{},
		Limit:  []canonicalLimit{},
	}
	listeners := c.Listeners()
	for i, l := range c.Listen {
		w := canonicalListen{Name: l.Name, Address: stringsOf(l.Addresses)}
		for _, d := range l.Downstream {
			w.Downstream = append(w.Downstream, canonicalDownstream{d.describe(), d.String(), d.Weight, d.MaxConnections})
		}
		w.AcceptProxyFrom = stringsOf(l.AcceptProxyFrom)
		if l.SendProxy != NoProxy {
			w.SendProxy = l.SendProxy.String()
		}
		if w.Transparent = l.Transparent; l.Transparent {
			v.Transparent = &canonicalTransparent{c.Transparent.Rules.String(), c.Transparent.Mark}
		}
		w.AccessLog = l.AccessLog
		if len(l.Downstream) > 1 {
			w.Balance = l.Balance.String()
			w.SlowStart = optionalDuration(l.SlowStart)
			if l.EjectAfter > 0 {
				w.Eject = &canonicalEject{l.EjectAfter, *canonicalDuration(l.EjectFor)}
			}
		}
		if c := l.Check; c.Interval > 0 {
			w.Check = &canonicalCheck{*canonicalDuration(c.Interval), *canonicalDuration(c.Timeout), c.Rise, c.Fall}
		}
		if listeners[i].TCP {
			w.ConnectTimeout = canonicalDuration(l.ConnectTimeout)
			w.FirstByteTimeout = optionalDuration(l.FirstByteTimeout)
			w.TCPIdleTimeout = optionalDuration(l.TCPIdleTimeout)
			w.HalfCloseTimeout = optionalDuration(l.HalfCloseTimeout)
			w.MaxLifetime = optionalDuration(l.MaxLifetime)
			if l.MinThroughput > 0 {
				w.MinThroughput = canonicalRateOf(l.MinThroughput)
			}
		}
		if listeners[i].UDP {
			w.UDPIdleTimeout, w.MaxFlows = canonicalDuration(l.UDPIdleTimeout), l.MaxFlows
			w.MaxFlowsPerSource, w.Amplification = l.MaxFlowsPerSource, &l.Amplification
		}
		v.Listen = append(v.Listen, w)
	}
	for _, a := range c.Attach {
		v.Daemon.PinPath = c.Daemon.PinPath
		w := canonicalAttach{
			Name: a.Name, Interface: a.Interfaces, Direction: a.Direction.String(),
			Mode: a.Mode.String(), Observe: a.Observe, Hook: a.Hook.String(), OnStop: a.OnStop.String(),
		}
		if a.Shapes() {
			w.Queue = a.Queue
		}
		if len(connectionLimits(c.Limits, a.Name)) > 0 {
			w.TCPIdleTimeout = canonicalDuration(a.IdleTimeout)
		}
		v.Attach = append(v.Attach, w)
	}
	for _, l := range c.Limits {
		v.Limit = append(v.Limit, canonicalLimitOf(l))
	}
	return v
}

func canonicalLimitOf(l shaper.Limit) canonicalLimit {
	v := canonicalLimit{
		Name:    l.Name,
		Observe: l.Observe,
		Key:     []string{},
		Match: canonicalMatch{
			Listen:      l.Match.Listen,
			Attach:      l.Match.Attach,
			Source:      stringsOf(l.Match.Source),
			Destination: stringsOf(l.Match.Destination),
			ASN:         l.Match.ASN,
		},
	}
	if l.Match.Protocol != shaper.AnyProtocol {
		v.Match.Protocol = l.Match.Protocol.String()
	}
	for _, p := range l.Match.Port {
		v.Match.Port = append(v.Match.Port, formatPorts(p))
	}
	for i, name := range shaper.FieldNames() {
		if l.Key&(1<<i) != 0 {
			v.Key = append(v.Key, name)
		}
	}
	if l.Key&shaper.KeySource != 0 {
		v.IPv4Prefix, v.IPv6Prefix = l.IPv4Prefix, l.IPv6Prefix
	}
	if l.Rate > 0 {
		v.Rate = canonicalRateOf(l.Rate)
		v.Burst = &canonicalSize{FormatSize(l.Burst), l.Burst}
		if l.Overhead > 0 {
			v.Overhead = &canonicalSize{FormatSize(uint64(l.Overhead)), uint64(l.Overhead)}
		}
	}
	if l.Packets.N > 0 {
		v.Packets = canonicalCount(l.Packets)
		if l.Packets.Per == time.Second {
			v.Packets.Text = strings.Replace(v.Packets.Text, "/s", "pps", 1)
		}
		v.BurstPackets = &l.BurstPackets
	}
	if l.Rate > 0 || l.Packets.N > 0 {
		v.MaxDelay = canonicalDuration(l.MaxDelay)
		if l.InPacketPlane() {
			v.ECNMark = &canonicalPercent{fmt.Sprintf("%d%%", l.ECNMark), l.ECNMark}
		} else {
			v.Direction = l.Direction.String()
			if l.Key&shaper.KeyConnection == 0 {
				v.Scheduling = l.Scheduling.String()
			}
		}
	}
	if l.NewConnections.N > 0 {
		v.NewConnections = canonicalCount(l.NewConnections)
	}
	counts := l.MaxConnections > 0 || l.NewConnections.N > 0
	v.Block = l.Block
	blocksTCP := l.Block && l.Match.Protocol != shaper.UDP && l.Match.Protocol != shaper.ICMP
	if counts || blocksTCP || isUDPOnly(l) || l.RefuseWith == shaper.RefuseReject {
		v.RefuseWith, v.Reply = l.RefuseWith.String(), l.Reply
	}
	if counts {
		v.MaxConnections = l.MaxConnections
		if !l.InPacketPlane() {
			v.MaxQueue = &l.MaxQueue
		}
		if !l.InPacketPlane() || l.NewConnections.N > 0 {
			v.QueueTimeout = canonicalDuration(l.QueueTimeout)
		}
	}
	return v
}

func canonicalDuration(d time.Duration) *canonicalTime {
	return &canonicalTime{FormatDuration(d), d.Seconds()}
}

// optionalDuration is canonicalDuration of a timeout, or nil if it is 0, which is never.
func optionalDuration(d time.Duration) *canonicalTime {
	if d == 0 {
		return nil
	}
	return canonicalDuration(d)
}

func canonicalRateOf(rate uint64) *canonicalRate {
	return &canonicalRate{FormatRate(rate) + " = " + FormatRateBytes(rate), rate, float64(rate) / 8}
}

func canonicalCount(f shaper.Frequency) *canonicalFrequency {
	return &canonicalFrequency{FormatFrequency(f), f.N, f.Per.Seconds()}
}

func stringsOf[T fmt.Stringer](values []T) []string {
	var s []string
	for _, v := range values {
		s = append(s, v.String())
	}
	return s
}
