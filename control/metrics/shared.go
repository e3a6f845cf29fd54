package metrics

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"shaperd.dev/shaperd/api"
)

// Shared is this host in the group that shares limits.
type Shared struct {
	api.Shared
	Calls      map[string]uint64 // to the ledger, by result; nil without a ledger
	Epochs     uint64
	Alone      time.Duration
	TookBounds []time.Duration // of the histogram of the durations of answered calls
	Took       []uint64
	TookSum    time.Duration
}

// collectShared collects what this host knows of its group.
func (c *Collector) collectShared(to sink) {
	s := c.Daemon.SharedMetrics()
	if s.State == "none" {
		return
	}
	to.gauge(sharedHosts, float64(s.Hosts))
	for i := range s.Limits {
		l := &s.Limits[i]
		share, connections := l.ColdShare, float64(l.HostConnections)
		for _, b := range l.Buckets {
			switch {
			case l.Key != "all":
			case b.Slots:
				connections = math.Round(b.Share * float64(l.MaxConnections))
			default:
				share = b.Share
			}
		}
		to.gauge(sharedShare, share, l.Limit)
		if l.MaxConnections > 0 {
			to.gauge(sharedConnections, connections, l.Limit)
		}
		if s.Calls == nil {
			continue
		}
		want, short := 0.0, 0
		for _, b := range l.Buckets {
			want = max(want, b.Want)
			if b.Short {
				short++
			}
		}
		to.gauge(sharedWant, want, l.Limit)
		to.gauge(sharedShort, float64(short), l.Limit)
	}
	if s.Calls == nil {
		return
	}
	to.gauge(sharedJoined, boolValue(s.State == "joined"))
	to.gauge(sharedCounted, boolValue(s.Counted))
	to.gauge(sharedLive, float64(s.Live))
	to.gauge(sharedDisagreeing, float64(s.Differing))
	to.gauge(sharedWithdrawn, boolValue(s.Withdrawn))
	to.gauge(sharedLeaseAge, s.LeaseAge)
	to.gauge(sharedHot, float64(s.HotBuckets))
	to.counter(sharedEpochs, s.Epochs)
	to <- prometheus.MustNewConstMetric(sharedAlone, prometheus.CounterValue, s.Alone.Seconds())
	for result, n := range s.Calls {
		to.counter(sharedCalls, n, result)
	}
	to.histogram(sharedCallTime, s.TookBounds, func(i int) uint64 { return s.Took[i] }, s.TookSum)
}
