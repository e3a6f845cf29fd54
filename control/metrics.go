package control

import (
	"net/http"

	"shaperd.dev/shaperd/control/metrics"
)

// ServeMetrics serves /metrics, /healthz and /ready at addr, a host:port; "" serves nothing.
func ServeMetrics(addr string, o *Options) (*Endpoint, error) {
	if addr == "" {
		return &Endpoint{}, nil
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metricsHandler(o))
	o.view().withProbes(mux)
	h := sameOrigin(mux)
	if Loopback(addr) { // on other addresses, scrapers may use any host name
		h = guardHost(addr, h)
	}
	return listen("metrics", addr, o, h)
}

func metricsHandler(o *Options) http.Handler {
	return metrics.Handler(&metrics.Collector{
		Shaper: o.Shaper, Proxy: o.Proxy, Packets: o.Packets, Daemon: o.Daemon, Monitor: o.Monitor, Reloads: o.Reloads,
		Clock: o.Clock, LogDropped: o.LogDropped, Version: o.Version,
	})
}
