package control

import (
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"shaperd/leaky"
	"shaperd/shaper"
)

// collector reads the counts at each scrape. Labels are names and words of the
// configuration and of closed enums, never of traffic.
type collector struct{ *Options }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("shaperd_"+name, help, labels, nil)
}

var (
	limitLabels = []string{"limit", "mode", "verdict", "reason"}

	limitBytes = desc("limit_bytes_total", "Payload bytes by what the limit decided, or would decide when it only observes.", limitLabels...)
	limitPkts  = desc("limit_packets_total", "Datagrams, and packets at attachments, by what the limit decided, or would decide.", limitLabels...)
	limitConns = desc("limit_connections_total", "Connections by what the limit decided, or would decide.", limitLabels...)
	inFlight   = desc("limit_connections_in_flight", "Connections that hold a slot of the limit.", "limit")
	waiting    = desc("limit_connections_waiting", "Connections that wait for a slot of the limit.", "limit")
	waitTime   = desc("limit_connection_wait_seconds", "How long connections waited for the slot they got.", "limit")
	maxDelay   = desc("limit_max_delay_seconds", "How long a unit may wait in a queue of the limit.", "limit")
	queueDelay = desc("limit_queue_delay_seconds", "How long delayed units waited in the limit's queues.", "limit")

	listenerOpen      = desc("listener_connections_open", "TCP connections that are forwarded.", "listener")
	listenerFlows     = desc("listener_udp_flows", "UDP flows that are forwarded.", "listener")
	listenerBytes     = desc("listener_bytes_total", "Payload bytes forwarded.", "listener", "direction")
	listenerAccepted  = desc("listener_connections_accepted_total", "TCP connections accepted.", "listener")
	listenerOpened    = desc("listener_udp_flows_opened_total", "UDP flows opened.", "listener")
	listenerMaxFlows  = desc("listener_udp_flows_max", "UDP flows that the listener may have at once; 0 without a UDP address.", "listener")
	listenerEvicted   = desc("listener_udp_flows_evicted_total", "UDP flows that ended to make room for another one.", "listener")
	listenerRefused   = desc("listener_udp_flows_refused_total", "Datagrams dropped because there was no room for their flow.", "listener")
	downstreamUp      = desc("downstream_up", "1 when the downstream gets connections and can be reached, 0 when checks or dials fail, it has no address, or an operator has drained it.", "listener", "downstream")
	downstreamDrained = desc("downstream_drained", "1 when an operator has the downstream get no connections.", "listener", "downstream")
	downstreamConns   = desc("downstream_connections", "TCP connections and UDP flows that the downstream has of this listener.", "listener", "downstream")
	listenerWithheld  = desc("listener_udp_answers_withheld_total", "Answers to UDP sources that would have amplified what they sent.", "listener")
	listenerDial      = desc("listener_dial_errors_total", "TCP connections and UDP flows for which no downstream could be reached.", "listener")
	listenerEnded     = desc("listener_connections_ended_total", "TCP connections by how they ended.", "listener", "reason")
	listenerSend      = desc("listener_send_errors_total", "Datagrams that a socket did not take, that came back as an error, or that were not kept while their flow waited.", "listener")

	bucketEntries   = desc("buckets", "Buckets in the table. Those of limits in use by an open flow are not among them.")
	bucketCapacity  = desc("buckets_capacity", "Buckets the table has room for.")
	bucketEvictions = desc("buckets_evicted_total", "Buckets that made room for another one, by whether they still owed something, which the other one then inherited.", "state")

	limitMarked = desc("limit_marked_packets_total", "Packets marked CE as they had to wait long.", "limit")

	attachmentUp      = desc("attachment_up", "1 when packets at the interface meet the limits, 0 when they do not; the interface is empty where one that is named is missing. It is left out while no interface matches the patterns.", "attachment", "interface", "direction", "mode")
	attachmentQueue   = desc("attachment_queue_packets", "Packets that the interface's queue holds.", "attachment", "interface", "direction")
	attachmentBacklog = desc("attachment_queue_bytes", "Bytes that the interface's queue holds, headers included.", "attachment", "interface", "direction")
	attachmentDrops   = desc("attachment_queue_drops_total", "Packets that the interface's queue dropped after they had been charged: the interface is slower than what is sent there.", "attachment", "interface", "direction")

	packetBuckets   = desc("packet_buckets", "Buckets of the packet plane that owe something.")
	packetCapacity  = desc("packet_buckets_capacity", "Buckets the packet plane's table has places for.")
	packetEvictions = desc("packet_buckets_evicted_total", "Buckets of the packet plane that made room for another one, by whether they still owed something, which the other one then inherited.", "state")
	packetLost      = desc("packet_buckets_lost_total", "Packets refused because other CPUs took every place they tried.")
	packetErrors    = desc("packet_plane_readable", "0 when the packet plane could not be read.")

	limitRate    = desc("limit_rate_bytes", "Bytes a second that each bucket of the limit is held to, where it has a rate.", "limit")
	limitMost    = desc("limit_connections_max", "Connections in flight that each key of the limit may have, where it caps them.", "limit")
	limitSigma   = desc("limit_sigma_bytes", "The largest excess over rate x time, in any interval, of what left a bucket of the limit in the last minute.", "limit")
	limitAllowed = desc("limit_sigma_allowed_bytes", "What that excess may be: burst, one unit, and what a late wake-up gives back.", "limit")
	limitBroken  = desc("limit_promise_broken_total", "Units that left a bucket of the limit beyond that.", "limit")

	bypassed  = desc("bypass", "1 when an operator has everything pass.")
	overrides = desc("overrides", "Keys of limits that operators have set since the configuration was loaded.")
	blocked   = desc("blocked_prefixes", "Source prefixes that operators block.")
	unsaved   = desc("orders_unsaved", "1 when what operators ordered could not be written down: a restart forgets it, or brings back what was.")
	linesLost = desc("log_lines_lost_total", "Lines of the log that nobody took.")
	buildInfo = desc("build_info", "1, for the version of the daemon and of Go.", "version", "goversion")

	late = desc("pacer_late_seconds", "How late the pacing thread woke up.")

	reloadOK      = desc("config_reload_success", "1 when the last reload succeeded, 0 when the old configuration stayed.")
	reloadTime    = desc("config_reload_timestamp_seconds", "When the configuration in force was loaded.")
	reloadSeconds = desc("config_reload_duration_seconds", "How long the last reload took.")
	reloadTotal   = desc("config_reloads_total", "Reloads by result, the first load among them.", "result")
)

// Describe sends nothing: the metrics depend on the configuration.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	c.collectPackets(gauge, counter) // first: it brings the counts up to date
	policy := c.Shaper.Policy()
	for i := range policy.Len() {
		l, s := policy.Limit(i), policy.State(i)
		mode := "enforce"
		if l.Observe {
			mode = "observe"
		}
		for _, m := range []struct {
			desc   *prometheus.Desc
			counts *shaper.Counts
		}{{limitBytes, &s.Bytes}, {limitPkts, &s.Packets}, {limitConns, &s.Connections}} {
			for v := range shaper.Verdicts {
				for r := range shaper.Reasons {
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
		ch <- histogram(waitTime, &s.Wait, l.Name)
		ch <- histogram(queueDelay, &s.Queue, l.Name)
		if l.Rate > 0 {
			gauge(limitRate, float64(l.Rate)/8, l.Name)
		}
		if l.Connections > 0 {
			gauge(limitMost, float64(l.Connections), l.Name)
		}
		if p, watched := c.Monitor.promiseOf(s); watched && l.Rate > 0 {
			gauge(limitSigma, p.Sigma, l.Name)
			gauge(limitAllowed, p.Allowed, l.Name)
		}
		counter(limitBroken, s.Promise.Violations.Load(), l.Name)
		if l.OfAttachments() {
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
		counter(listenerWithheld, n.Withheld.Load(), n.Name)
		counter(listenerDial, n.DialErrors.Load(), n.Name)
		for e := range n.Ended {
			counter(listenerEnded, n.Ended[e].Load(), n.Name, shaper.Ending(e).String())
		}
		counter(listenerSend, n.SendErrors.Load(), n.Name)
	}
	for _, d := range c.Proxy.Downstreams() {
		gauge(downstreamUp, oneIf(d.Up && !d.Drained), d.Listen, d.Downstream)
		gauge(downstreamDrained, oneIf(d.Drained), d.Listen, d.Downstream)
		gauge(downstreamConns, float64(d.InFlight), d.Listen, d.Downstream)
	}
	b := c.Shaper.Buckets()
	gauge(bucketEntries, float64(b.Entries))
	gauge(bucketCapacity, float64(b.Capacity))
	counter(bucketEvictions, b.EvictedDrained, "drained")
	counter(bucketEvictions, b.EvictedIndebted, "indebted")
	ch <- c.late()
	c.collectReloads(gauge, counter)
	c.collectWishes(gauge)
	counter(linesLost, c.LogLost())
	gauge(buildInfo, 1, c.Version, runtime.Version())
}

// collectWishes tells what operators want otherwise than the configuration.
func (c *collector) collectWishes(gauge func(*prometheus.Desc, float64, ...string)) {
	var s Status
	c.Daemon.Describe(&s)
	keys := 0
	for _, o := range s.Overrides {
		keys += len(o.Set)
	}
	gauge(bypassed, oneIf(s.Bypass != nil))
	gauge(unsaved, oneIf(s.Unsaved != ""))
	gauge(overrides, float64(keys))
	gauge(blocked, float64(len(s.Blocks)))
}

func (c *collector) collectPackets(gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, uint64, ...string)) {
	s, ok, err := c.Packets.PacketStatus()
	if !ok {
		return
	}
	if err != nil {
		gauge(packetErrors, 0)
		return
	}
	gauge(packetErrors, 1)
	for _, a := range s.Attachments {
		if a.Waits != "" {
			continue
		}
		gauge(attachmentUp, oneIf(a.Up), a.Name, a.Interface, a.Direction, a.Mode)
		if a.Queue != nil {
			gauge(attachmentQueue, float64(a.Queue.Packets), a.Name, a.Interface, a.Direction)
			gauge(attachmentBacklog, float64(a.Queue.Bytes), a.Name, a.Interface, a.Direction)
			counter(attachmentDrops, a.Queue.Drops, a.Name, a.Interface, a.Direction)
		}
	}
	gauge(packetBuckets, float64(s.Buckets.Live))
	gauge(packetCapacity, float64(s.Buckets.Capacity))
	counter(packetEvictions, s.Buckets.EvictedDrained, "drained")
	counter(packetEvictions, s.Buckets.EvictedIndebted, "indebted")
	counter(packetLost, s.Buckets.Lost)
}

func (c *collector) collectReloads(gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, uint64, ...string)) {
	c.Reloads.mu.Lock()
	defer c.Reloads.mu.Unlock()
	gauge(reloadOK, oneIf(!c.Reloads.failed))
	gauge(reloadTime, float64(c.Reloads.last.UnixMilli())/1e3)
	gauge(reloadSeconds, c.Reloads.took.Seconds())
	counter(reloadTotal, c.Reloads.ok, "success")
	counter(reloadTotal, c.Reloads.notOkay, "failure")
}

func oneIf(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

func (c *collector) late() prometheus.Metric {
	counts, sum := c.Proxy.Late()
	return constHistogram(late, leaky.LateBounds[:], func(i int) uint64 { return counts[i] }, sum)
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
