// Package metrics exports the counters of a daemon to Prometheus. They are read at each scrape,
// in the goroutine of its request; between scrapes nothing runs.
package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// Proxy is the proxy plane.
type Proxy interface {
	// Lateness returns the histogram and the sum of the lateness of units: see pacer.Pacer.Lateness.
	Lateness() ([len(pacer.LatenessBounds) + 1]uint64, time.Duration)
	// DecisionTimes returns the histogram and the sum of how long decisions on new connections and UDP flows took.
	DecisionTimes() (bounds []time.Duration, counts []uint64, sum time.Duration)

	// Downstreams returns the state of all downstreams, and Listeners that of all listeners.
	Downstreams() []shaper.DownstreamStatus
	Listeners() []shaper.ListenerStatus

	// Quotas calls a function for the quota of each key of which something was used; for some perhaps twice. QuotaError returns
	// why the file of quotas cannot be written, or nil.
	Quotas(func(*shaper.QuotaStatus))
	QuotaError() error
}

// Packets is the packet plane, or none.
type Packets interface {
	// PacketStatus returns the state of the plane, and updates the counters of its limits;
	// false if there is no packet plane.
	PacketStatus() (PacketStatus, bool, error)
}

// PacketStatus is the state of a packet plane.
type PacketStatus struct {
	Attachments []api.AttachmentStatus
	Buckets     struct {
		Live, Capacity                          int
		EvictedDrained, EvictedBacklogged, Lost uint64
	}
}

// Daemon describes itself.
type Daemon interface {
	Describe(*api.Status) // fills in the fields that it knows
	SharedMetrics() Shared
}

// Handler returns the handler of scrapes: the metrics of c, of the process, and of the Go runtime.
func Handler(c *Collector) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		c,
	)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
}
