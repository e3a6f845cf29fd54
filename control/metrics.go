// Package control serves the API of package api on the control socket, the metrics, and the
// dashboard.
package control

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

// Plane is the part of the proxy plane that metrics need.
type Plane interface {
	// Lateness returns the histogram and the sum of the lateness of units: see pacer.Pacer.Lateness.
	Lateness() ([len(pacer.LatenessBounds) + 1]uint64, time.Duration)

	// Downstreams returns the state of all downstreams.
	Downstreams() []shaper.DownstreamStatus
}

// Packets is the packet plane, or none.
type Packets interface {
	// PacketStatus returns the state of the plane, and updates the counters of its limits;
	// false if there is no packet plane.
	PacketStatus() (PacketStatus, bool, error)

	// Bucket returns the state of the bucket of k, a key of limit i of the current policy;
	// false if it is unknown.
	Bucket(i int, k shaper.Key) (shaper.BucketState, bool)
}

// PacketStatus is the state of a packet plane.
type PacketStatus struct {
	Attachments []api.AttachmentStatus
	Buckets     struct {
		Live, Capacity                          int
		EvictedDrained, EvictedBacklogged, Lost uint64
	}
}

// ServeMetrics serves /metrics at addr, a host:port; "" serves nothing.
func ServeMetrics(addr string, o *Options) (*Endpoint, error) {
	if addr == "" {
		return &Endpoint{}, nil
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metricsHandler(o))
	h := sameOrigin(mux)
	if Loopback(addr) { // on other addresses, scrapers may use any host name
		h = guardHost(addr, h)
	}
	return listen("metrics", addr, o, h)
}

func metricsHandler(o *Options) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		&collector{o},
	)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
}
