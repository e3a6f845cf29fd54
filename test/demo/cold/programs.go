package main

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"

	"shaperd.dev/shaperd/test/lab"
)

var (
	outer = netip.MustParseAddrPort("10.9.0.1:7000") // of the program
	inner = netip.MustParseAddrPort("10.9.1.2:7000") // of the server
)

// program is what stands between the clients and the server.
type program struct {
	name  string
	start func(ctx context.Context, b lab.Binaries, h *lab.Host) (stop func() error, err error)
	ours  bool
}

var programs = [...]program{
	{"shaperd, breaker, refuse", shaperd("50/s", ""), true},
	{"shaperd, breaker, hold", shaperd("50/s", `on_down = "hold"`), true},
	{"shaperd, breaker, slow_start 30s", shaperd("1000/s", `slow_start = "30s"`), true},
	{"haproxy, maxconn", haproxy(""), false},
	{"haproxy, mark-down, check", haproxy("check inter 1s rise 1 fall 1 observe layer4 error-limit 5 on-error mark-down"), false},
	{"haproxy, the same, slowstart 30s", haproxy("check inter 1s rise 1 fall 1 observe layer4 error-limit 5 on-error mark-down slowstart 30s"), false},
	{"nginx, max_conns", startNginx, false},
}

func shaperd(ramp, more string) func(context.Context, lab.Binaries, *lab.Host) (func() error, error) {
	return func(ctx context.Context, b lab.Binaries, h *lab.Host) (func() error, error) {
		d, err := lab.StartDaemon(ctx, lab.DaemonOptions{Binary: b.Shaperd, Host: h, Config: fmt.Sprintf(`[daemon]
metrics = ""
dashboard = ""
[[listen]]
name = "l"
address = ["tcp://%s"]
downstream = [{ address = %q, max_connections = %d }]
breaker = { after = 5, of = ["dial", "reset"], for = "1s", probe = 1 }
ramp = %q
%s
connect_timeout = "1m"
max_queue = 10000
`, outer, inner, bears, ramp, more)})
		if err != nil {
			return nil, err
		}
		return d.Close, nil
	}
}

func haproxy(options string) func(context.Context, lab.Binaries, *lab.Host) (func() error, error) {
	return func(ctx context.Context, b lab.Binaries, h *lab.Host) (func() error, error) {
		_, stop, err := b.StartHAProxy(ctx, h, outer, inner, fmt.Sprintf("maxconn %d %s", bears, options))
		return stop, err
	}
}

func startNginx(ctx context.Context, _ lab.Binaries, h *lab.Host) (func() error, error) {
	_, stop, err := lab.StartPeer(ctx, h, fmt.Sprintf(`load_module /usr/lib/nginx/modules/ngx_stream_module.so;
daemon off;
pid nginx.pid;
error_log /dev/null;
worker_processes 1;
events { worker_connections 4000; }
stream {
	upstream one {
		server %s max_conns=%d max_fails=5 fail_timeout=1s;
		server %[1]s backup;
	}
	server {
		listen %[3]s;
		proxy_connect_timeout 5s;
		proxy_pass one;
	}
}
`, inner, bears, outer), outer, func(path string) []string { return []string{"/usr/sbin/nginx", "-p", filepath.Dir(path), "-c", path} })
	return stop, err
}
