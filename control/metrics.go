// Package control shows what the daemon does.
package control

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"shaperd/leaky"
	"shaperd/shaper"
)

// Plane is what metrics show of a plane that holds traffic back.
type Plane interface {
	// Late returns how late units left, see leaky.Pacer.Late.
	Late() ([len(leaky.LateBounds) + 1]uint64, time.Duration)

	// Downstreams returns how all downstreams are doing.
	Downstreams() []shaper.DownstreamStatus
}

// Packets is what metrics show of a packet plane.
type Packets interface {
	// PacketStatus returns what the plane does, and brings the counts of its limits
	// up to date; false when there is none.
	PacketStatus() (PacketStatus, bool, error)

	// Bucket returns how the bucket of k, a key of limit i of the policy in force, is
	// doing; false when that cannot be known.
	Bucket(i int, k shaper.Key) (shaper.BucketState, bool)
}

// PacketStatus is what a packet plane does.
type PacketStatus struct {
	Attachments []Attachment
	Buckets     struct {
		Live, Capacity                        int
		EvictedDrained, EvictedIndebted, Lost uint64
	}
}

// Attachment is an attachment at an interface; Interface is empty when it is at none, or not at
// all that it names.
type Attachment struct {
	Name, Interface, Direction, Mode string

	Up     bool     // packets there meet the limits
	Err    string   // why not
	Waits  string   // patterns that no interface matches: nothing is wrong
	Before []string // programs and filters that packets meet before the limits
	Queue  *Queue   // nil when it holds no packets
}

// Queue is the queue of an interface.
type Queue = QueueStatus

// ServeMetrics serves /metrics at addr, a host:port; "" serves nothing.
func ServeMetrics(addr string, o *Options) (*Endpoint, error) {
	if addr == "" {
		return &Endpoint{}, nil
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metricsHandler(o))
	h := ownOrigin(mux)
	if Loopback(addr) { // elsewhere it may be scraped by any name
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
