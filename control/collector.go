package control

import (
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// collector reads the counters at each scrape. Label values are names from the configuration or
// members of closed enums, never taken from traffic.
type collector struct{ *Options }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("shaperd_"+name, help, labels, nil)
}

var (
	limitLabels = []string{"limit", "mode", "verdict", "reason"}

	limitBytes = desc("limit_bytes_total", "Payload bytes by the verdict of the limit, or the verdict that it would give if it observes.", limitLabels...)
	limitPkts  = desc("limit_packets_total", "Datagrams, and packets at attachments, by verdict of the limit.", limitLabels...)
	limitConns = desc("limit_connections_total", "Connections by verdict of the limit.", limitLabels...)
	inFlight   = desc("limit_connections_in_flight", "Connections that hold a slot of the limit.", "limit")
	waiting    = desc("limit_connections_waiting", "Connections that wait for a slot of the limit.", "limit")
	waitTime   = desc("limit_connection_wait_seconds", "Time that admitted connections waited for a slot of the limit.", "limit")
	maxDelay   = desc("limit_max_delay_seconds", "Maximum delay of a unit in a queue of the limit.", "limit")
	queueDelay = desc("limit_queue_delay_seconds", "Time that delayed units waited in the queues of the limit.", "limit")

	listenerOpen       = desc("listener_connections_open", "Open TCP connections.", "listener")
	listenerFlows      = desc("listener_udp_flows", "Open UDP flows.", "listener")
	listenerBytes      = desc("listener_bytes_total", "Payload bytes forwarded.", "listener", "direction")
	listenerAccepted   = desc("listener_connections_accepted_total", "TCP connections accepted.", "listener")
	listenerOpened     = desc("listener_udp_flows_opened_total", "UDP flows opened.", "listener")
	listenerMaxFlows   = desc("listener_udp_flows_max", "Maximum number of open UDP flows of the listener; 0 without a UDP address.", "listener")
	listenerEvicted    = desc("listener_udp_flows_evicted_total", "UDP flows evicted for another flow.", "listener")
	listenerRefused    = desc("listener_udp_flows_refused_total", "Datagrams dropped because their flow could not be opened.", "listener")
	downstreamUp       = desc("downstream_up", "1 if the downstream is reachable and not drained; 0 if checks or dials fail, it has no address, or an operator drained it.", "listener", "downstream")
	downstreamDrained  = desc("downstream_drained", "1 if an operator drained the downstream.", "listener", "downstream")
	downstreamConns    = desc("downstream_connections", "TCP connections and UDP flows of this listener to the downstream.", "listener", "downstream")
	listenerSuppressed = desc("listener_udp_replies_suppressed_total", "UDP replies dropped because they would have amplified traffic to an unverified source.", "listener")
	listenerDial       = desc("listener_dial_errors_total", "TCP connections and UDP flows for which no downstream was reachable.", "listener")
	listenerEnded      = desc("listener_connections_ended_total", "TCP connections ended, by reason.", "listener", "reason")
	listenerSend       = desc("listener_send_errors_total", "Datagrams dropped because a socket refused them, an ICMP error came back, or the buffer of their waiting flow was full.", "listener")

	bucketEntries   = desc("buckets", "Buckets in the table of the proxy plane, except those in use by an open flow.")
	bucketCapacity  = desc("buckets_capacity", "Capacity of the bucket table of the proxy plane.")
	bucketEvictions = desc("buckets_evicted_total", "Buckets evicted for another one, by whether they were drained or still had a backlog, which the new bucket inherits.", "state")

	limitMarked = desc("limit_marked_packets_total", "Packets marked CE because of a long queueing delay.", "limit")

	attachmentUp      = desc("attachment_up", "1 if packets at the interface are limited. The interface label is empty if a named interface is missing; there is no series while no interface matches the patterns.", "attachment", "interface", "direction", "mode")
	attachmentQueue   = desc("attachment_queue_packets", "Packets in the queue of the interface.", "attachment", "interface", "direction")
	attachmentBacklog = desc("attachment_queue_bytes", "Bytes in the queue of the interface, headers included.", "attachment", "interface", "direction")
	attachmentDrops   = desc("attachment_queue_drops_total", "Packets dropped by the queue of the interface after they were charged: the interface is slower than its traffic.", "attachment", "interface", "direction")

	packetBuckets   = desc("packet_buckets", "Buckets of the packet plane that have a backlog.")
	packetCapacity  = desc("packet_buckets_capacity", "Capacity of the bucket table of the packet plane.")
	packetEvictions = desc("packet_buckets_evicted_total", "Buckets of the packet plane evicted for another one, by whether they were drained or still had a backlog, which the new bucket inherits.", "state")
	packetLost      = desc("packet_buckets_lost_total", "Packets refused because other CPUs took every table slot that was tried.")
	packetReadable  = desc("packet_plane_readable", "1 if the state of the packet plane could be read.")

	limitRate       = desc("limit_rate_bytes", "Rate of each bucket of the limit in bytes per second, if it has one.", "limit")
	limitMaxConns   = desc("limit_connections_max", "Maximum number of connections in flight of each key of the limit, if it has one.", "limit")
	limitSigma      = desc("limit_sigma_bytes", "Largest excess over rate x time, in any interval, of the traffic of a bucket of the limit over the last minute.", "limit")
	limitAllowed    = desc("limit_sigma_allowed_bytes", "Allowed excess: burst, one unit, and the catch-up after a late wake-up.", "limit")
	limitViolations = desc("limit_conformance_violations_total", "Units that left a bucket of the limit beyond the allowed excess.", "limit")

	bypassOn        = desc("bypass", "1 while bypass is on: every limit observes.")
	overriddenKeys  = desc("overrides", "Number of limit keys that operators override at runtime.")
	blockedPrefixes = desc("blocked_prefixes", "Number of blocked source prefixes.")
	stateSaveFailed = desc("state_save_failed", "1 if runtime changes of operators could not be saved: a restart loses them, or restores outdated ones.")
	logDropped      = desc("log_records_dropped_total", "Log records dropped because the writer was blocked.")
	buildInfo       = desc("build_info", "Constant 1, labeled with the versions of the daemon and of Go.", "version", "goversion")

	pacerLate = desc("pacer_wakeup_latency_seconds", "Wake-up latency of the pacing thread.")

	reloadOK      = desc("config_reload_success", "1 if the last reload succeeded, 0 if the previous configuration stayed.")
	reloadTime    = desc("config_reload_timestamp_seconds", "Time at which the current configuration was loaded.")
	reloadSeconds = desc("config_reload_duration_seconds", "Duration of the last reload.")
	reloadTotal   = desc("config_reloads_total", "Reloads by result, including the first load.", "result")
)

// Describe sends nothing: the set of metrics depends on the configuration.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	c.collectPackets(gauge, counter) // first: it updates the counters of the limits
	policy := c.Shaper.Policy()
	for i := range policy.Len() {
		l, s := policy.Limit(i), policy.State(i)
		mode := "enforce"
		if l.Observe {
			mode = "observe"
		}
		for _, m := range []struct {
			desc   *prometheus.Desc
			counts *shaper.Counters
		}{{limitBytes, &s.Bytes}, {limitPkts, &s.Packets}, {limitConns, &s.Connections}} {
			for v := range shaper.NumVerdicts {
				for r := range shaper.NumReasons {
					if n := m.counts[v][r].Load(); n > 0 || v == 0 && r == 0 {
						counter(m.desc, n, l.Name, mode, shaper.Verdict(v).String(), shaper.Reason(r).String())
					}
				}
			}
		}
		gauge(inFlight, float64(s.InFlight.Load()), l.Name)
		gauge(waiting, float64(s.Waiting.Load()), l.Name)
		if l.Rate > 0 || l.Packets.N > 0 {
			gauge(maxDelay, l.MaxDelay.Seconds(), l.Name)
		}
		ch <- histogram(waitTime, &s.SlotWait, l.Name)
		ch <- histogram(queueDelay, &s.QueueDelay, l.Name)
		if l.Rate > 0 {
			gauge(limitRate, float64(l.Rate)/8, l.Name)
		}
		if l.MaxConnections > 0 {
			gauge(limitMaxConns, float64(l.MaxConnections), l.Name)
		}
		if p, sampled := c.Monitor.Conformance(s); sampled && l.Rate > 0 {
			gauge(limitSigma, p.Sigma, l.Name)
			gauge(limitAllowed, p.Allowed, l.Name)
		}
		counter(limitViolations, s.Conformance.Violations.Load(), l.Name)
		if l.InPacketPlane() {
			counter(limitMarked, s.Marked.Load(), l.Name)
		}
	}
	for _, n := range policy.Listeners() {
		gauge(listenerOpen, float64(n.Open.Load()), n.Name)
		gauge(listenerFlows, float64(n.Flows.Load()), n.Name)
		gauge(listenerMaxFlows, float64(n.MaxFlows.Load()), n.Name)
		counter(listenerBytes, n.ToDownstream.Load(), n.Name, shaper.ToDownstream.String())
		counter(listenerBytes, n.FromDownstream.Load(), n.Name, shaper.FromDownstream.String())
		counter(listenerAccepted, n.Accepted.Load(), n.Name)
		counter(listenerOpened, n.FlowsOpened.Load(), n.Name)
		counter(listenerEvicted, n.FlowsEvicted.Load(), n.Name)
		counter(listenerRefused, n.FlowsRefused.Load(), n.Name)
		counter(listenerSuppressed, n.RepliesSuppressed.Load(), n.Name)
		counter(listenerDial, n.DialErrors.Load(), n.Name)
		for e := range n.Ended {
			counter(listenerEnded, n.Ended[e].Load(), n.Name, shaper.Ending(e).String())
		}
		counter(listenerSend, n.SendErrors.Load(), n.Name)
	}
	for _, d := range c.Proxy.Downstreams() {
		gauge(downstreamUp, boolValue(d.Up && !d.Drained), d.Listen, d.Downstream)
		gauge(downstreamDrained, boolValue(d.Drained), d.Listen, d.Downstream)
		gauge(downstreamConns, float64(d.InFlight), d.Listen, d.Downstream)
	}
	b := c.Shaper.TableUsage()
	gauge(bucketEntries, float64(b.Entries))
	gauge(bucketCapacity, float64(b.Capacity))
	counter(bucketEvictions, b.EvictedDrained, "drained")
	counter(bucketEvictions, b.EvictedBacklogged, "backlogged")
	ch <- c.pacerLateness()
	c.collectReloads(gauge, counter)
	c.collectOverrides(gauge)
	counter(logDropped, c.LogDropped())
	gauge(buildInfo, 1, c.Version, runtime.Version())
}

// collectOverrides collects the changes that operators made at runtime.
func (c *collector) collectOverrides(gauge func(*prometheus.Desc, float64, ...string)) {
	var s api.Status
	c.Daemon.Describe(&s)
	keys := 0
	for _, o := range s.Overrides {
		keys += len(o.Set)
	}
	gauge(bypassOn, boolValue(s.Bypass != nil))
	gauge(stateSaveFailed, boolValue(s.StateError != ""))
	gauge(overriddenKeys, float64(keys))
	gauge(blockedPrefixes, float64(len(s.Blocks)))
}

func (c *collector) collectPackets(gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, uint64, ...string)) {
	s, ok, err := c.Packets.PacketStatus()
	if !ok {
		return
	}
	if err != nil {
		gauge(packetReadable, 0)
		return
	}
	gauge(packetReadable, 1)
	for _, a := range s.Attachments {
		if a.UnmatchedPatterns != "" {
			continue
		}
		gauge(attachmentUp, boolValue(a.Up), a.Name, a.Interface, a.Direction, a.Mode)
		if a.Queue != nil {
			gauge(attachmentQueue, float64(a.Queue.Packets), a.Name, a.Interface, a.Direction)
			gauge(attachmentBacklog, float64(a.Queue.Bytes), a.Name, a.Interface, a.Direction)
			counter(attachmentDrops, a.Queue.Drops, a.Name, a.Interface, a.Direction)
		}
	}
	gauge(packetBuckets, float64(s.Buckets.Live))
	gauge(packetCapacity, float64(s.Buckets.Capacity))
	counter(packetEvictions, s.Buckets.EvictedDrained, "drained")
	counter(packetEvictions, s.Buckets.EvictedBacklogged, "backlogged")
	counter(packetLost, s.Buckets.Lost)
}

func (c *collector) collectReloads(gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, uint64, ...string)) {
	last := c.Reloads.Status()
	gauge(reloadOK, boolValue(last.OK))
	gauge(reloadTime, float64(last.Loaded.UnixMilli())/1e3)
	gauge(reloadSeconds, last.Duration)
	succeeded, failed := c.Reloads.Counts()
	counter(reloadTotal, succeeded, "success")
	counter(reloadTotal, failed, "failure")
}

func boolValue(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

func (c *collector) pacerLateness() prometheus.Metric {
	counts, sum := c.Proxy.Lateness()
	return constHistogram(pacerLate, pacer.LatenessBounds[:], func(i int) uint64 { return counts[i] }, sum)
}

func histogram(d *prometheus.Desc, h *shaper.Histogram, label string) prometheus.Metric {
	return constHistogram(d, shaper.HistogramBounds[:], func(i int) uint64 { return h.Counts[i].Load() },
		time.Duration(h.Sum.Load()), label)
}

func constHistogram(d *prometheus.Desc, bounds []time.Duration, count func(int) uint64, sum time.Duration, labels ...string) prometheus.Metric {
	buckets := make(map[float64]uint64, len(bounds))
	var n uint64
	for i, bound := range bounds {
		n += count(i)
		buckets[bound.Seconds()] = n
	}
	n += count(len(bounds))
	return prometheus.MustNewConstHistogram(d, n, sum.Seconds(), buckets, labels...)
}
