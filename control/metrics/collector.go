package metrics

import (
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/monitor"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// Collector reads the counters at each scrape. Label values are names from the configuration or
// members of closed enums, never taken from traffic.
type Collector struct {
	Shaper     *shaper.Shaper
	Proxy      Proxy
	Packets    Packets
	Daemon     Daemon
	Monitor    *monitor.Monitor
	Reloads    *monitor.Reloads
	Clock      func() leaky.Time // of the rankings
	LogDropped func() uint64     // number of log records dropped
	Version    string
}

// Describe sends nothing: the set of metrics depends on the configuration.
func (c *Collector) Describe(chan<- *prometheus.Desc) {}

// Collect sends all metrics.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	to := sink(ch)
	c.collectPackets(to) // first: it updates the counters of the limits
	policy := c.Shaper.Policy()
	c.collectLimits(to, policy)
	for n := range policy.Classes() {
		class := policy.ClassState(n)
		to.counter(classConns, class.Admitted.Load(), class.Name, shaper.Pass.String())
		to.counter(classConns, class.Refused.Load(), class.Name, shaper.Refuse.String())
	}
	c.collectListeners(to, policy)
	c.collectReloads(to)
	c.collectOverrides(to)
	c.collectShared(to)
	c.collectQuotas(to, policy)
	b := c.Shaper.TableUsage()
	to.gauge(bucketEntries, float64(b.Entries))
	to.gauge(bucketCapacity, float64(b.Capacity))
	to.counter(bucketEvictions, b.EvictedDrained, "drained")
	to.counter(bucketEvictions, b.EvictedBacklogged, "backlogged")
	counts, sum := c.Proxy.Lateness()
	to.histogram(pacerLate, pacer.LatenessBounds[:], func(i int) uint64 { return counts[i] }, sum)
	bounds, decided, took := c.Proxy.DecisionTimes()
	to.histogram(decisionTime, bounds, func(i int) uint64 { return decided[i] }, took)
	to.counter(logDropped, c.LogDropped())
	to.gauge(buildInfo, 1, c.Version, runtime.Version())
}

func (c *Collector) collectLimits(to sink, policy *shaper.Policy) {
	for i := range policy.Len() {
		l, s := policy.Limit(i), policy.State(i)
		mode := shaper.Mode(l.Observe).String()
		for _, m := range []struct {
			desc   *prometheus.Desc
			counts *shaper.Counters
		}{{limitBytes, &s.Bytes}, {limitPkts, &s.Packets}, {limitConns, &s.Connections}} {
			for v := range shaper.NumVerdicts {
				for r := range shaper.NumReasons {
					if n := m.counts[v][r].Load(); n > 0 || v == 0 && r == 0 {
						to.counter(m.desc, n, l.Name, mode, shaper.Verdict(v).String(), shaper.Reason(r).String())
					}
				}
			}
		}
		to.gauge(inFlight, float64(s.InFlight.Load()), l.Name)
		to.gauge(waiting, float64(s.Waiting.Load()), l.Name)
		if l.Rate > 0 || l.Packets.N > 0 {
			to.gauge(maxDelay, l.MaxDelay.Seconds(), l.Name)
		}
		to.delays(waitTime, &s.SlotWait, l.Name)
		to.delays(queueDelay, &s.QueueDelay, l.Name)
		if l.Rate > 0 {
			to.gauge(limitRate, float64(l.Rate)/8, l.Name)
		}
		if l.MaxConnections > 0 {
			to.gauge(limitMaxConns, float64(l.MaxConnections), l.Name)
		}
		if found := s.Adaptive.Load(); found != nil && found.Limit > 0 {
			to.gauge(limitAdapted, float64(found.Limit), l.Name)
		}
		if found := s.Shed.Load(); found != nil {
			to.gauge(limitShed, found.Share, l.Name, mode)
			for _, signal := range found.Signals {
				to.gauge(limitSignal, boolValue(signal.Err == ""), l.Name, signal.Name)
			}
		}
		if p, sampled := c.Monitor.Conformance(s); sampled && l.Rate > 0 {
			to.gauge(limitSigma, p.Sigma, l.Name)
			to.gauge(limitAllowed, p.Allowed, l.Name)
		}
		to.counter(limitViolations, s.Conformance.Violations.Load(), l.Name)
		if l.Shared && l.NewConnections.N > 0 {
			to.counter(limitTickets, s.UsedTickets.Load(), l.Name, "used")
			to.counter(limitTickets, s.VoidTickets.Load(), l.Name, "void")
		}
		to.gauge(limitObserves, boolValue(l.Observe), l.Name)
		if l.Key != 0 && (l.Rate > 0 || l.Packets.N > 0) {
			share, keys := s.Keys.HeaviestShare(c.Clock())
			to.gauge(limitHeaviest, share, l.Name)
			to.gauge(limitBusyKeys, float64(keys), l.Name)
		}
		if l.Key != 0 && l.Key&shaper.KeyConnection == 0 {
			to.gauge(limitKeysRefused, float64(s.Keys.Dropped(c.Clock())), l.Name)
		}
		if l.Penalty != nil {
			blocked, would := policy.Penalized(i)
			to.gauge(penalized, float64(blocked), l.Name, shaper.Enforce.String())
			to.gauge(penalized, float64(would), l.Name, shaper.Observe.String())
			for observe, counts := range map[shaper.Mode]*shaper.PenaltyCounters{shaper.Enforce: &s.Penalties, shaper.Observe: &s.ObservedPenalties} {
				to.counter(penaltiesImposed, counts.Imposed.Load(), l.Name, observe.String())
				to.counter(penaltiesEvicted, counts.Evicted.Load(), l.Name, observe.String())
			}
		}
		if l.Algorithm.HasHistory() {
			u := c.Shaper.HistoryUsage(s, c.Clock())
			to.gauge(limitHistories, float64(u.Entries), l.Name)
			to.gauge(limitHistoryBytes, float64(u.Bytes), l.Name)
			to.counter(limitHistoryEvictions, u.Evicted, l.Name)
		}
		if l.InPacketPlane() {
			to.counter(limitMarked, s.Marked.Load(), l.Name)
		}
	}
}

func (c *Collector) collectQuotas(to sink, policy *shaper.Policy) {
	if policy.Quotas() == 0 {
		return
	}
	type usage struct {
		most       float64
		keys, over int
	}
	usages := map[string]*usage{}
	for i := range policy.Quotas().All {
		usages[policy.Limit(i).Name] = &usage{}
	}
	c.Proxy.Quotas(func(q *shaper.QuotaStatus) {
		u := usages[q.Limit]
		if u == nil {
			return // the policy was changed
		}
		u.keys++
		u.most = max(u.most, float64(q.Used)/float64(q.Quota.Amount))
		if q.Used >= q.Quota.Amount {
			u.over++
		}
	})
	for limit, u := range usages {
		to.gauge(quotaUsed, u.most, limit)
		to.gauge(quotaKeys, float64(u.keys), limit)
		to.gauge(quotaUsedUp, float64(u.over), limit)
	}
	to.gauge(quotaFileUp, boolValue(c.Proxy.QuotaError() == nil))
}

func (c *Collector) collectListeners(to sink, policy *shaper.Policy) {
	for _, n := range policy.Listeners() {
		to.gauge(listenerOpen, float64(n.Open.Load()), n.Name)
		to.gauge(listenerFlows, float64(n.Flows.Load()), n.Name)
		to.gauge(listenerMaxFlows, float64(n.MaxFlows.Load()), n.Name)
		to.counter(listenerBytes, n.ToDownstream.Load(), n.Name, shaper.ToDownstream.String())
		to.counter(listenerBytes, n.FromDownstream.Load(), n.Name, shaper.FromDownstream.String())
		to.counter(listenerAccepted, n.Accepted.Load(), n.Name)
		to.counter(listenerOpened, n.FlowsOpened.Load(), n.Name)
		to.counter(listenerEvicted, n.FlowsEvicted.Load(), n.Name)
		to.counter(listenerRefused, n.FlowsRefused.Load(), n.Name)
		to.counter(listenerSuppressed, n.RepliesSuppressed.Load(), n.Name)
		to.counter(listenerDial, n.DialErrors.Load(), n.Name)
		for e := range n.Ended {
			to.counter(listenerEnded, n.Ended[e].Load(), n.Name, shaper.Ending(e).String())
		}
		to.counter(listenerSend, n.SendErrors.Load(), n.Name)
	}
	for _, l := range c.Proxy.Listeners() {
		to.gauge(listenerWaiting, float64(l.Waiting), l.Listen)
		to.gauge(listenerHeld, boolValue(l.Held), l.Listen, "held")
		to.gauge(listenerHeld, boolValue(l.Down), l.Listen, "down")
		to.gauge(listenerRamp, l.Rate, l.Listen)
	}
	for _, d := range c.Proxy.Downstreams() {
		to.gauge(downstreamUp, boolValue(d.Up && !d.Drained), d.Listen, d.Downstream)
		to.gauge(downstreamDrained, boolValue(d.Drained), d.Listen, d.Downstream)
		to.gauge(downstreamConns, float64(d.InFlight), d.Listen, d.Downstream)
		s := d.State
		to.delays(downstreamConnect, &s.Connect, d.Listen, d.Downstream)
		to.delays(downstreamFirstByte, &s.FirstByte, d.Listen, d.Downstream)
		to.delays(downstreamAnswer, &s.Answer, d.Listen, d.Downstream)
		to.delays(downstreamRTT, &s.RTT, d.Listen, d.Downstream)
		to.counter(downstreamBytes, s.ToDownstream.Load(), d.Listen, d.Downstream, shaper.ToDownstream.String())
		to.counter(downstreamBytes, s.FromDownstream.Load(), d.Listen, d.Downstream, shaper.FromDownstream.String())
		to.counter(downstreamDials, s.DialsRefused.Load(), d.Listen, d.Downstream, "refused")
		to.counter(downstreamDials, s.DialsTimedOut.Load(), d.Listen, d.Downstream, "timeout")
		to.counter(downstreamDials, s.DialsFailed.Load(), d.Listen, d.Downstream, "other")
		to.counter(downstreamResets, s.Resets.Load(), d.Listen, d.Downstream)
		to.counter(downstreamBreaker, s.BreakerOpened.Load(), d.Listen, d.Downstream)
		to.counter(downstreamICMP, s.ICMPErrors.Load(), d.Listen, d.Downstream)
		to.counter(downstreamRetrans, s.Retransmits.Load(), d.Listen, d.Downstream)
		to.seconds(downstreamBusy, s.Busy.Load(), d.Listen, d.Downstream)
		to.seconds(downstreamLimited, s.ReceiverLimited.Load(), d.Listen, d.Downstream)
	}
}

func (c *Collector) collectPackets(to sink) {
	s, ok, err := c.Packets.PacketStatus()
	if !ok {
		return
	}
	if err != nil {
		to.gauge(packetReadable, 0)
		return
	}
	to.gauge(packetReadable, 1)
	for _, a := range s.Attachments {
		if a.UnmatchedPatterns != "" {
			continue
		}
		to.gauge(attachmentUp, boolValue(a.Up), a.Name, a.Interface, a.Direction, a.Mode)
		if a.Queue != nil {
			to.gauge(attachmentQueue, float64(a.Queue.Packets), a.Name, a.Interface, a.Direction)
			to.gauge(attachmentBacklog, float64(a.Queue.Bytes), a.Name, a.Interface, a.Direction)
			to.counter(attachmentDrops, a.Queue.Drops, a.Name, a.Interface, a.Direction)
		}
	}
	to.gauge(packetBuckets, float64(s.Buckets.Live))
	to.gauge(packetCapacity, float64(s.Buckets.Capacity))
	to.counter(packetEvictions, s.Buckets.EvictedDrained, "drained")
	to.counter(packetEvictions, s.Buckets.EvictedBacklogged, "backlogged")
	to.counter(packetLost, s.Buckets.Lost)
}

// collectOverrides collects the changes that operators made at runtime.
func (c *Collector) collectOverrides(to sink) {
	var s api.Status
	c.Daemon.Describe(&s)
	keys := 0
	for _, o := range s.Overrides {
		keys += len(o.Set)
	}
	to.gauge(configInfo, 1, s.Revision)
	to.gauge(bypassOn, boolValue(s.Bypass != nil))
	to.gauge(sourceErrors, float64(len(s.SourceErrors)))
	to.gauge(stateSaveFailed, boolValue(s.StateError != ""))
	to.gauge(overriddenKeys, float64(keys))
	to.gauge(blockedPrefixes, float64(len(s.Blocks)))
}

func (c *Collector) collectReloads(to sink) {
	last := c.Reloads.Status()
	to.gauge(reloadOK, boolValue(last.OK))
	to.gauge(reloadTime, float64(last.Loaded.UnixMilli())/1e3)
	to.gauge(reloadSeconds, last.Duration)
	succeeded, failed := c.Reloads.Counts()
	to.counter(reloadTotal, succeeded, "success")
	to.counter(reloadTotal, failed, "failure")
}

// sink is where metrics go.
type sink chan<- prometheus.Metric

func (s sink) gauge(d *prometheus.Desc, v float64, labels ...string) {
	s <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (s sink) counter(d *prometheus.Desc, v uint64, labels ...string) {
	s <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}

// seconds adds a counter of microseconds.
func (s sink) seconds(d *prometheus.Desc, us uint64, labels ...string) {
	s <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(us)/1e6, labels...)
}

func (s sink) histogram(d *prometheus.Desc, bounds []time.Duration, count func(int) uint64, sum time.Duration, labels ...string) {
	buckets := make(map[float64]uint64, len(bounds))
	var n uint64
	for i, bound := range bounds {
		n += count(i)
		buckets[bound.Seconds()] = n
	}
	n += count(len(bounds))
	s <- prometheus.MustNewConstHistogram(d, n, sum.Seconds(), buckets, labels...)
}

func (s sink) delays(d *prometheus.Desc, h *shaper.Histogram, labels ...string) {
	s.histogram(d, shaper.HistogramBounds[:], func(i int) uint64 { return h.Counts[i].Load() }, time.Duration(h.Sum.Load()), labels...)
}

func boolValue(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
