package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/test/lab"
)

var (
	outer = netip.MustParseAddrPort("10.9.0.1:5432") // of the program
	inner = netip.MustParseAddrPort("10.9.1.2:5432") // of the server
)

// program is what stands between the clients and the server.
type program struct {
	name   string
	most   int // connections at once; 0 is no bound
	adapts bool
	start  func(ctx context.Context, b lab.Binaries, h *lab.Host) (*gateway, error)
}

// gateway is a running program.
type gateway struct {
	*lab.Process
	stop  func() error
	limit func() (*api.Adaptive, error) // of shaperd
}

var shaperd = program{"shaperd, adapt", 0, true, func(ctx context.Context, b lab.Binaries, h *lab.Host) (*gateway, error) {
	config := fmt.Sprintf(`[daemon]
metrics = ""
dashboard = ""
[[listen]]
name = "l"
address = ["tcp://%s"]
downstream = [%q]
[[limit]]
name = "bears"
match = { protocol = "tcp" }
max_connections = 200
adapt = "on"
queue_timeout = "1m"
`, outer, inner)
	d, err := lab.StartDaemon(ctx, lab.DaemonOptions{Binary: b.Shaperd, Host: h, Config: config})
	if err != nil {
		return nil, err
	}
	limit := func() (*api.Adaptive, error) {
		text, err := h.Output(b.Shaperd, "limits", "bears", "--json", "--control", d.Control)
		if err != nil {
			return nil, err
		}
		var l api.Limit
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			return nil, err
		}
		return l.Adaptive, nil
	}
	return &gateway{d.Process, d.Close, limit}, nil
}}

// haproxy lets at most so many connections through at once; 0 is no bound.
func haproxy(most int) program {
	name, maxconn := "haproxy, no maxconn", ""
	if most > 0 {
		name, maxconn = fmt.Sprintf("haproxy, maxconn %d", most), fmt.Sprintf("maxconn %d", most)
	}
	return program{name, most, false, func(ctx context.Context, b lab.Binaries, h *lab.Host) (*gateway, error) {
		p, stop, err := b.StartHAProxy(ctx, h, outer, inner, maxconn)
		if err != nil {
			return nil, err
		}
		return &gateway{Process: p, stop: stop}, nil
	}}
}
