package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// The limits that protect the downstream.
const (
	totalRate      = 2 << 20    // bytes a second, all sources together
	sourceRate     = 1792 << 10 // bytes a second, each source
	messageRate    = 150        // datagrams a second, all sources together
	maxConnections = 10

	// Per source: with one polite and the greedy source active all slots are in use, and
	// the other polite source waits for its turn.
	sourceConnections = 9
)

const metricsAddr = "127.0.0.1:9464" // inside the shaper

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
rate        = "%[4]dKiB/s"

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
rate  = "%[6]dKiB/s"

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
`, metricsAddr, fmt.Sprintf("%v:%d", proxyAddr, port), fmt.Sprintf("%v:%d", downstreamAddr, port),
		sourceRate>>10, maxConnections, totalRate>>10, messageRate, sourceConnections)
}

// A daemon is a running shaperd.
type daemon struct {
	host   *lab.Host
	dir    string // of the configuration
	cmd    *exec.Cmd
	log    bytes.Buffer // read only after exit
	exited chan error
}

// startDaemon starts the binary inside the host and waits until it is ready.
func startDaemon(ctx context.Context, h *lab.Host, binary string) (*daemon, error) {
	dir, err := lab.TempDir()
	if err != nil {
		return nil, err
	}
	d := &daemon{host: h, dir: dir, exited: make(chan error, 1)}
	config := filepath.Join(dir, "shaperd.toml")
	if err := os.WriteFile(config, []byte(configuration()), 0o644); err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	socket := filepath.Join(dir, "notify")
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	defer notify.Close()
	d.cmd = exec.Command(binary, "run", "--config", config, "--drain-timeout", "2s")
	d.cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+socket, "SHAPERD_CONTROL=")
	d.cmd.Stdout, d.cmd.Stderr = &d.log, &d.log
	if err := h.Start(d.cmd); err != nil {
		os.RemoveAll(dir)
		return nil, fmt.Errorf("start %s: %w", binary, err)
	}
	go func() { d.exited <- d.cmd.Wait() }()
	if err := d.awaitReady(ctx, notify); err != nil {
		return nil, errors.Join(err, d.stop())
	}
	return d, nil
}

// awaitReady waits for the readiness notification, like a service manager.
func (d *daemon) awaitReady(ctx context.Context, notify *net.UnixConn) error {
	ready := make(chan error, 1)
	go func() {
		_ = notify.SetReadDeadline(time.Now().Add(5 * time.Second))
		buf := make([]byte, 4096)
		for {
			n, err := notify.Read(buf)
			if err != nil || slices.Contains(strings.Split(string(buf[:n]), "\n"), "READY=1") {
				ready <- err
				return
			}
		}
	}()
	select {
	case err := <-ready:
		if err != nil {
			return fmt.Errorf("shaperd is not ready: %w", err)
		}
		return nil
	case err := <-d.exited:
		d.exited <- err
		return errors.New("shaperd ended before it was ready")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stop ends the daemon as a service manager would. It returns an error when the daemon
// had already ended, does not end in time, or does not end cleanly.
func (d *daemon) stop() error {
	defer os.RemoveAll(d.dir)
	failure := ""
	select {
	case err := <-d.exited:
		failure = fmt.Sprintf("shaperd ended unexpectedly: %v", err)
	default:
		_ = d.cmd.Process.Signal(unix.SIGTERM)
		select {
		case err := <-d.exited:
			if err != nil {
				failure = fmt.Sprintf("shaperd ended with: %v", err)
			}
		case <-time.After(6 * time.Second):
			_ = d.cmd.Process.Kill()
			<-d.exited
			failure = "shaperd still ran 6 s after SIGTERM"
		}
	}
	if failure == "" {
		return nil
	}
	text := d.log.String()
	return fmt.Errorf("%s; its output:\n%s", failure, text[max(0, len(text)-4000):])
}

// A refusal is a count of refused traffic from the daemon's metrics.
type refusal struct {
	limit, reason, unit string
	count               int
}

// refusals returns the refusals in the daemon's metrics.
func (d *daemon) refusals() ([]refusal, error) {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
			err = d.host.Do(func() error { c, err = new(net.Dialer).DialContext(ctx, network, addr); return err })
			return c, err
		},
	}
	client := http.Client{Transport: transport, Timeout: 5 * time.Second}
	resp, err := client.Get("http://" + metricsAddr + "/metrics")
	if err != nil {
		return nil, fmt.Errorf("fetch metrics: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("fetch metrics: %w", err)
	}
	return parseRefusals(string(text)), nil
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
