package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// equalShare returns the rate per connection for a program that cannot share a rate
// between connections. This favors the program, because all connections are always busy.
func (t task) equalShare() (rate int64, setting string) {
	if t.flows <= 1 {
		return t.rate, ""
	}
	return t.rate / int64(t.flows), fmt.Sprintf("1/%d of the rate per connection, because it cannot share a rate", t.flows)
}

// startHAProxy starts HAProxy 3 with its own C library.
func startHAProxy(ctx context.Context, t task) (*running, error) {
	var b strings.Builder
	// HAProxy reserves two descriptors per splice pipe.
	fmt.Fprintf(&b, "global\n  maxconn %d\n  maxpipes 500\n  nbthread %d\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 120s\n  timeout server 120s\n  timeout queue 60s\n",
		max(2000, t.conns+100), threads)
	if t.rate == 0 {
		b.WriteString("  option splice-auto\n")
	}
	fmt.Fprintf(&b, "frontend f\n  bind %s\n", atProxy)
	if t.rate > 0 {
		fmt.Fprintf(&b, "  filter bwlim-in up limit %d key src table t_up min-size 2896\n  tcp-request content set-bandwidth-limit up\n", t.rate)
	}
	fmt.Fprintf(&b, "  default_backend b\nbackend b\n  server s %s", atDownstream)
	if t.slots > 0 {
		fmt.Fprintf(&b, " maxconn %d", t.slots)
	}
	b.WriteString("\n")
	if t.rate > 0 {
		b.WriteString("backend t_up\n  stick-table type ip size 100k expire 60s store bytes_in_rate(1s)\n")
	}
	for i := range t.idleLimits {
		fmt.Fprintf(&b, "backend idle%d\n  stick-table type ip size 100k expire 60s store bytes_in_rate(1s)\n", i)
	}
	dir, path, err := writeConfig("haproxy.cfg", b.String())
	if err != nil {
		return nil, err
	}
	command := slices.Clone(t.bins.haproxy3)
	if t.reloads {
		// The master re-executes itself by name, which must include its C library.
		script := filepath.Join(dir, "haproxy")
		text := fmt.Sprintf("#!/bin/sh\nexec %s --argv0 \"$0\" %s \"$@\"\n", command[0], strings.Join(command[1:], " "))
		if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
			return nil, err
		}
		command = []string{script, "-W"}
	}
	command = append(command, "-db", "-f", path)
	r, err := startProxy(ctx, t, dir, command[0], command[1:]...)
	if err == nil && t.reloads {
		r.done = "Loading success"
		r.reload = func() error { return r.process.Signal(unix.SIGUSR2) }
		if err = r.process.awaitOutput(ctx, r.done, 1); err != nil { // it ignores signals until then
			_ = r.stop()
			return nil, err
		}
	}
	return r, err
}

// threads is the number of threads per program: one per processor.
const threads = 2

func startNginx(ctx context.Context, t task) (*running, error) {
	part, setting := t.equalShare()
	protocol := ""
	if t.udp {
		protocol = " udp reuseport"
	}
	level := "crit"
	if t.reloads {
		level = "notice"
	}
	var b strings.Builder
	fmt.Fprintf(&b, `load_module /usr/lib/nginx/modules/ngx_stream_module.so;
daemon off;
pid nginx.pid;
error_log stderr %s;
worker_processes %d;
worker_rlimit_nofile 20000;
events { worker_connections 19000; }
stream {
`, level, threads)
	for i := range t.idleLimits {
		fmt.Fprintf(&b, "  limit_conn_zone $binary_remote_addr zone=idle%d:1m;\n", i)
	}
	fmt.Fprintf(&b, "  upstream u { zone u 64k; server %s", atDownstream)
	if t.slots > 0 {
		fmt.Fprintf(&b, " max_conns=%d", t.slots)
	}
	fmt.Fprintf(&b, "; }\n  server { listen %s%s; proxy_half_close on; proxy_pass u;", atProxy, protocol)
	if t.udp {
		b.Reset()
		fmt.Fprintf(&b, "load_module /usr/lib/nginx/modules/ngx_stream_module.so;\ndaemon off;\npid nginx.pid;\nerror_log stderr crit;\n"+
			"worker_processes %d;\nevents { worker_connections 19000; }\nstream {\n  server { listen %s udp reuseport; proxy_pass %s;", threads, atProxy, atDownstream)
	}
	if part > 0 {
		fmt.Fprintf(&b, " proxy_upload_rate %d;", part)
	}
	b.WriteString(" }\n}\n")
	dir, path, err := writeConfig("nginx.conf", b.String())
	if err != nil {
		return nil, err
	}
	// The workers switch users and could not enter root's directory.
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	r, err := startProxy(ctx, t, dir, "/usr/sbin/nginx", "-p", dir, "-c", path)
	if err == nil {
		r.setting = setting
		r.done = ": reconfiguring"
		r.reload = func() error { return r.process.Signal(unix.SIGHUP) }
	}
	return r, err
}

func startToxiproxy(ctx context.Context, t task) (*running, error) {
	const api = "127.0.0.1:8474"
	dir, _, err := writeConfig("unused", "")
	if err != nil {
		return nil, err
	}
	p, err := startProcess(t.net.Middle, dir, t.bins.toxiproxy, "-host", "127.0.0.1", "-port", "8474")
	if err != nil {
		return nil, err
	}
	r := &running{to: atProxy, process: p}
	if err := p.AwaitListening(ctx, p.host, netip.MustParseAddrPort(api), false); err != nil {
		_ = p.stop()
		return nil, err
	}
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
			err = t.net.Middle.Do(func() error { c, err = new(net.Dialer).DialContext(ctx, network, addr); return err })
			return c, err
		},
	}}
	post := func(path string, body any) error {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		answer, err := client.Post("http://"+api+path, "application/json", bytes.NewReader(b))
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if answer.StatusCode >= 300 {
			return fmt.Errorf("toxiproxy: %s for %s", answer.Status, path)
		}
		return nil
	}
	err = post("/proxies", map[string]any{"name": "t", "listen": atProxy.String(), "upstream": atDownstream.String(), "enabled": true})
	if part, setting := t.equalShare(); err == nil && part > 0 {
		r.setting = setting
		err = post("/proxies/t/toxics", map[string]any{
			"type": "bandwidth", "stream": "upstream",
			"attributes": map[string]any{"rate": part / 1000},
		})
	}
	if err == nil {
		err = p.AwaitListening(ctx, p.host, atProxy, false)
	}
	if err != nil {
		_ = p.stop()
		return nil, err
	}
	return r, nil
}

func startRedir(ctx context.Context, t task) (*running, error) {
	dir, _, err := writeConfig("unused", "")
	if err != nil {
		return nil, err
	}
	args := []string{"-n"}
	part, setting := t.equalShare()
	if part > 0 {
		args = append(args, "-m", fmt.Sprint(8*part))
	}
	r, err := startProxy(ctx, t, dir, "redir", append(args, atProxy.String(), atDownstream.String())...)
	if err == nil {
		r.setting = setting
	}
	return r, err
}

// startNaive starts the harness's own naive proxy.
func startNaive(ctx context.Context, t task) (*running, error) {
	dir, _, err := writeConfig("unused", "")
	if err != nil {
		return nil, err
	}
	protocol := "tcp"
	if t.udp {
		protocol = "udp"
	}
	return startProxy(ctx, t, dir, t.bins.naive, protocol, atProxy.String(), atDownstream.String(),
		fmt.Sprint(t.rate), fmt.Sprint(t.slots))
}

// The kernel's qdiscs count overhead bytes per segment in addition to its payload.
const (
	segment  = 1448
	overhead = 66
)

// wireRate converts a payload rate to a rate that includes headers.
func wireRate(rate int64) int64 { return rate * (segment + overhead) / segment }

// burstFor returns a burst of one millisecond, at least two packets.
func burstFor(rate int64) int64 { return max(2*(segment+overhead), rate/1000) }

func startTBF(_ context.Context, t task) (*running, error) {
	rate := wireRate(t.rate)
	err := t.net.Middle.Run("tc", "qdisc", "replace", "dev", lab.MiddleRight, "root", "tbf",
		"rate", fmt.Sprintf("%dbps", rate), "burst", fmt.Sprint(burstFor(rate)), "latency", "50ms")
	return kernelShaper(t), err
}

func startHTB(_ context.Context, t task) (*running, error) {
	run := func(args ...string) error { return t.net.Middle.Run("tc", args...) }
	err := run("qdisc", "replace", "dev", lab.MiddleRight, "root", "handle", "1:", "htb")
	rate := wireRate(t.rate)
	for i := range max(t.keys, 1) {
		class := fmt.Sprintf("1:%x", i+1)
		if err == nil {
			err = run("class", "add", "dev", lab.MiddleRight, "parent", "1:", "classid", class, "htb",
				"rate", fmt.Sprintf("%dbps", rate), "burst", fmt.Sprint(burstFor(rate)), "cburst", fmt.Sprint(burstFor(rate)))
		}
		if err == nil {
			err = run("filter", "add", "dev", lab.MiddleRight, "parent", "1:", "protocol", "ip", "prio", "1",
				"u32", "match", "ip", "src", source(i).String()+"/32", "flowid", class)
		}
	}
	return kernelShaper(t), err
}

func kernelShaper(t task) *running {
	return &running{to: atDownstream, cleanup: func() error { return t.net.Middle.Run("tc", "qdisc", "del", "dev", lab.MiddleRight, "root") }}
}
