package main

import (
	"context"
	"fmt"
	"regexp"
	"strconv"

	"shaperd.dev/shaperd/test/lab"
)

// The limits that protect the downstream.
const (
	totalRate      = 2_000_000 // bytes a second, all sources together
	sourceRate     = 1_750_000 // bytes a second, each source
	messageRate    = 150       // datagrams a second, all sources together
	maxConnections = 10

	// Per source: with one polite and the greedy source active all slots are in use, and
	// the other polite source waits for its turn.
	sourceConnections = 9
)

// configuration returns the daemon's configuration.
func configuration() string {
	return fmt.Sprintf(`[daemon]
metrics = %q

[[listen]]
name       = "gateway"
address    = ["tcp://%[2]s", "udp://%[2]s"]
downstream = [%[3]q]

# No source gets everything.
[[limit]]
name        = "bytes-per-source"
match       = { listen = ["gateway"], protocol = "tcp" }
key         = ["source"]
ipv4_prefix = 24
rate        = "%[4]dkB/s"

[[limit]]
name            = "connections-per-source"
match           = { listen = ["gateway"], protocol = "tcp" }
key             = ["source"]
ipv4_prefix     = 24
max_connections = %[8]d
queue_timeout   = "3s"

# Never more connections, and never a higher rate, than the gateway can handle.
[[limit]]
name            = "connections"
match           = { listen = ["gateway"], protocol = "tcp" }
max_connections = %[5]d
queue_timeout   = "3s"

[[limit]]
name  = "bytes"
match = { listen = ["gateway"], protocol = "tcp" }
rate  = "%[6]dkB/s"

[[limit]]
name        = "messages-per-source"
match       = { listen = ["gateway"], protocol = "udp" }
key         = ["source"]
ipv4_prefix = 24
packets     = "80pps"

[[limit]]
name    = "messages"
match   = { listen = ["gateway"], protocol = "udp" }
packets = "%[7]dpps"
`, lab.MetricsAddr, fmt.Sprintf("%v:%d", proxyAddr, port), fmt.Sprintf("%v:%d", downstreamAddr, port),
		sourceRate/1000, maxConnections, totalRate/1000, messageRate, sourceConnections)
}

// startDaemon starts the binary inside the host and waits until it is ready.
func startDaemon(ctx context.Context, h *lab.Host, binary string) (*lab.Daemon, error) {
	return lab.StartDaemon(ctx, lab.DaemonOptions{Binary: binary, Host: h, Config: configuration(), Args: []string{"--drain-timeout", "2s"}})
}

// A refusal is a count of refused traffic from the daemon's metrics.
type refusal struct {
	limit, reason, unit string
	count               int
}

var refused = regexp.MustCompile(`(?m)^shaperd_limit_(packets|connections)_total` +
	`\{limit="([^"]*)",mode="enforce",reason="([^"]*)",verdict="refuse"\} (\S+)$`)

func parseRefusals(metrics string) (list []refusal) {
	for _, m := range refused.FindAllStringSubmatch(metrics, -1) {
		unit := m[1]
		if unit == "packets" {
			unit = "datagrams"
		}
		if count, err := strconv.ParseFloat(m[4], 64); err == nil && count > 0 {
			list = append(list, refusal{limit: m[2], reason: m[3], unit: unit, count: int(count)})
		}
	}
	return list
}
