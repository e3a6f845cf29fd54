package main

import (
	"context"
	"fmt"
	"net/netip"

	"shaperd.dev/shaperd/test/lab"
)

var (
	outer  = netip.MustParseAddrPort("10.9.0.1:5432") // of the program
	inner  = netip.MustParseAddrPort("10.9.1.2:5432") // of the relay that counts
	server = netip.MustParseAddrPort("10.9.1.2:5433")
)

// atOnce is the cap.
const atOnce = 20

// program is what stands between the clients and the server.
type program struct {
	name     string
	cap      int // of transactions at once that is to be checked, or 0
	promises bool
	start    func(ctx context.Context, b lab.Binaries, h *lab.Host) (stop func() error, err error)
}

var programs = [...]program{
	{"shaperd, no cap", 0, false, shaperd("")},
	{"shaperd, 20 transactions", atOnce, true, shaperd(`slot_for = "transaction"`)},
	{"shaperd, 20 turns, turn_gap 5ms", 0, false, shaperd("slot_for = \"turn\"\nturn_gap = \"5ms\"")},
	{"shaperd, 20 connections", atOnce, false, shaperd(`slot_for = "connection"`)},
	{"haproxy, maxconn 20", atOnce, false, haproxy},
}

// shaperd has a limit with a cap and the given key, or none.
func shaperd(slots string) func(context.Context, lab.Binaries, *lab.Host) (func() error, error) {
	return func(ctx context.Context, b lab.Binaries, h *lab.Host) (func() error, error) {
		limit := ""
		if slots != "" {
			limit = fmt.Sprintf(`[[limit]]
name = "bears"
match = { protocol = "tcp" }
max_connections = %d
queue_timeout = "1m"
%s
`, atOnce, slots)
		}
		d, err := lab.StartDaemon(ctx, lab.DaemonOptions{Binary: b.Shaperd, Host: h, Config: fmt.Sprintf(`[daemon]
metrics = ""
dashboard = ""
[[listen]]
name = "l"
address = ["tcp://%s"]
downstream = [%q]
%s`, outer, inner, limit)})
		if err != nil {
			return nil, err
		}
		return d.Close, nil
	}
}

func haproxy(ctx context.Context, b lab.Binaries, h *lab.Host) (func() error, error) {
	_, stop, err := b.StartHAProxy(ctx, h, outer, inner, fmt.Sprint("maxconn ", atOnce))
	return stop, err
}
