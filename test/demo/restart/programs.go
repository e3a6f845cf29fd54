package main

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// program is what stands between the clients and the server.
type program struct {
	name, note string
	start      func(ctx context.Context, b lab.Binaries, h *lab.Host) (*gateway, error)
	announced  bool // an operator holds the listener before the server is killed
	ours       bool
}

var programs = [...]program{
	{"shaperd", `on_down = "hold", retry_unanswered, and a check that expects the server to answer`, startShaperd, false, true},
	{"shaperd, held", `"shaperd hold" before, and "shaperd resume" after`, startShaperd, true, true},
	{"haproxy", "retries 3, option redispatch, pgsql-check", startHAProxy, false, false},
	{"nginx", "stream, proxy_connect_timeout 5s", startNginx, false, false},
}

// gateway is a running program.
type gateway struct {
	*lab.Process
	stop   func() error
	verb   func(args ...string) (string, error) // of shaperd
	daemon *lab.Daemon
}

const ramp = 100 // connections per second

func startShaperd(ctx context.Context, b lab.Binaries, h *lab.Host) (*gateway, error) {
	config := fmt.Sprintf(`[daemon]
metrics = ""
dashboard = ""
[[listen]]
name = "db"
address = ["tcp://%s"]
downstream = [%q]
on_down = "hold"
retry_unanswered = true
ramp = "%d/s"
[listen.check]
interval = "200ms"
timeout = "200ms"
rise = 1
fall = 1
send = "\u0000\u0000\u0000\u0017\u0000\u0003\u0000\u0000user\u0000postgres\u0000\u0000"
expect = "R"
[[limit]]
name = "all"
max_connections = 250
`, outer, inner, ramp)
	d, err := lab.StartDaemon(ctx, lab.DaemonOptions{Binary: b.Shaperd, Host: h, Config: config})
	if err != nil {
		return nil, err
	}
	verb := func(args ...string) (string, error) {
		return h.Output(b.Shaperd, append(args, "--control", d.Control)...)
	}
	return &gateway{d.Process, d.Close, verb, d}, nil
}

// startPeer starts a program with a configuration of its own.
func startPeer(ctx context.Context, h *lab.Host, config string, command func(path string) []string) (*gateway, error) {
	p, stop, err := lab.StartPeer(ctx, h, config, outer, command)
	if err != nil {
		return nil, err
	}
	return &gateway{Process: p, stop: stop}, nil
}

func startHAProxy(ctx context.Context, b lab.Binaries, h *lab.Host) (*gateway, error) {
	return startPeer(ctx, h, fmt.Sprintf(`global
	maxconn 2000
	stats timeout 10s
defaults
	mode tcp
	timeout connect 5s
	timeout client 1m
	timeout server 1m
	timeout queue 1m
	retries 3
	option redispatch
listen db
	bind %s
	option pgsql-check user postgres
	default-server inter 200ms rise 1 fall 1 slowstart 30s maxconn 250
	server one %s check
`, outer, inner), func(path string) []string { return append(b.HAProxy, "-db", "-f", path) })
}

func startNginx(ctx context.Context, _ lab.Binaries, h *lab.Host) (*gateway, error) {
	return startPeer(ctx, h, fmt.Sprintf(`load_module /usr/lib/nginx/modules/ngx_stream_module.so;
daemon off;
pid nginx.pid;
error_log /dev/null;
worker_processes 2;
events { worker_connections 4000; }
stream {
	server {
		listen %s;
		proxy_connect_timeout 5s;
		proxy_pass %s;
	}
}
`, outer, inner), func(path string) []string {
		return []string{"/usr/sbin/nginx", "-p", filepath.Dir(path), "-c", path}
	})
}

// downTime is how long the server stays away.
const downTime = time.Second
