package netns

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

const metricsAddr = "127.0.0.1:9464" // inside the shaper

// A daemon is a running shaperd.
type daemon struct {
	t          testing.TB
	host       *host
	config     string // path
	control    string // socket
	cmd        *exec.Cmd
	notify     *net.UnixConn
	log        logBuffer
	exited     chan struct{} // closed after exit, when status is set
	status     error
	expectExit bool // whether the test stopped it

	stored map[string]*os.File // descriptors in the emulated systemd store
}

// daemonPath returns the path of the daemon under test.
func daemonPath(t testing.TB) string {
	t.Helper()
	path := os.Getenv("SHAPERD_BIN")
	if path == "" {
		path = filepath.Join("..", "..", "bin", "shaperd")
	}
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("no daemon to test: %v\nrun \"make build\" first, or set SHAPERD_BIN to the binary", err)
	}
	return path
}

// shaperd starts the daemon inside the host and waits until it is ready.
func (h *host) shaperd(t testing.TB, config string, args ...string) *daemon {
	t.Helper()
	return h.shaperdWith(t, nil, config, args...)
}

// shaperdWith is like shaperd, and passes the stored descriptors of another daemon.
func (h *host) shaperdWith(t testing.TB, stored map[string]*os.File, config string, args ...string) *daemon {
	t.Helper()
	// Not the test's own directory: its name may be too long for a socket's.
	dir, err := lab.TempDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	d := &daemon{t: t, host: h, config: filepath.Join(dir, "shaperd.toml"), control: filepath.Join(dir, "control.sock"), exited: make(chan struct{})}
	socket := filepath.Join(dir, "notify")
	d.notify, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.notify.Close() })
	d.write(config)

	// The shell execs the daemon, so that LISTEN_PID is the daemon's.
	line := []string{"-c", `LISTEN_PID=$$ exec "$0" "$@"`, daemonPath(t), "run", "--config", d.config}
	d.cmd = exec.Command("sh", append(line, args...)...)
	d.cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+socket, "SHAPERD_CONTROL="+d.control)
	if len(stored) > 0 {
		var names []string
		for name, f := range stored {
			names = append(names, name)
			d.cmd.ExtraFiles = append(d.cmd.ExtraFiles, f)
		}
		d.cmd.Env = append(d.cmd.Env, fmt.Sprint("LISTEN_FDS=", len(names)), "LISTEN_FDNAMES="+strings.Join(names, ":"))
	}
	d.stored = map[string]*os.File{}
	d.cmd.Stdout, d.cmd.Stderr = &d.log, &d.log
	if err := h.Start(d.cmd); err != nil {
		t.Fatalf("start shaperd: %v", err)
	}
	go func() {
		d.status = d.cmd.Wait()
		close(d.exited)
	}()
	t.Cleanup(d.cleanUp)
	d.awaitNotify("READY=1")
	return d
}

func (d *daemon) write(config string) {
	d.t.Helper()
	next := d.config + ".next"
	if err := os.WriteFile(next, []byte(config), 0o644); err != nil {
		d.t.Fatal(err)
	}
	if err := os.Rename(next, d.config); err != nil {
		d.t.Fatal(err)
	}
}

// awaitNotify reads notifications until one has a line that starts with want.
func (d *daemon) awaitNotify(want string) {
	d.t.Helper()
	const most = 90 * time.Second // program verification is slow on a shared machine
	deadline := time.Now().Add(most)
	buf := make([]byte, 4096)
	for time.Now().Before(deadline) {
		select {
		case <-d.exited:
			d.t.Fatalf("shaperd exited (%v) before it sent %s", d.status, want)
		default:
		}
		if err := d.notify.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
			d.t.Fatal(err)
		}
		oob := make([]byte, unix.CmsgSpace(4))
		n, rights, _, _, err := d.notify.ReadMsgUnix(buf, oob)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil {
			d.t.Fatalf("read notification: %v", err)
		}
		lines := strings.Split(string(buf[:n]), "\n")
		d.updateStore(lines, oob[:rights])
		if slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, want) }) {
			return
		}
	}
	d.t.Fatalf("shaperd did not send %s within %v", want, most)
}

// updateStore stores or removes a descriptor, like systemd.
func (d *daemon) updateStore(lines []string, rights []byte) {
	d.t.Helper()
	if len(lines) != 2 || !strings.HasPrefix(lines[0], "FDSTORE") {
		return
	}
	name := strings.TrimPrefix(lines[1], "FDNAME=")
	if lines[0] == "FDSTOREREMOVE=1" {
		d.stored[name].Close()
		delete(d.stored, name)
		return
	}
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil || len(messages) != 1 {
		d.t.Fatalf("%v came with %d messages, %v", lines, len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		d.t.Fatalf("%v came with %d descriptors, %v", lines, len(fds), err)
	}
	f := os.NewFile(uintptr(fds[0]), name)
	d.t.Cleanup(func() { f.Close() })
	d.stored[name] = f
}

// reload changes the daemon's configuration, and waits until the reload succeeds or fails.
func (d *daemon) reload(config string) {
	d.t.Helper()
	d.write(config)
	d.signal(unix.SIGHUP)
	d.awaitNotify("RELOADING=1")
	d.awaitNotify("READY=1")
}

func (d *daemon) signal(sig unix.Signal) {
	d.t.Helper()
	if err := d.cmd.Process.Signal(sig); err != nil {
		d.t.Fatalf("signal shaperd: %v", err)
	}
}

// terminate sends SIGTERM. The daemon may exit from now on.
func (d *daemon) terminate() {
	d.t.Helper()
	d.expectExit = true
	d.signal(unix.SIGTERM)
}

// kill sends SIGKILL and waits for the exit.
func (d *daemon) kill() {
	d.t.Helper()
	d.expectExit = true
	d.signal(unix.SIGKILL)
	<-d.exited
}

// waitExit waits until the daemon exits, and fails the test if it does not exit cleanly.
func (d *daemon) waitExit(most time.Duration) {
	d.t.Helper()
	select {
	case <-d.exited:
		if d.status != nil {
			d.t.Errorf("shaperd ended with: %v", d.status)
		}
	case <-time.After(most):
		d.t.Errorf("shaperd still runs %v after SIGTERM", most)
	}
}

// awaitLog waits until the daemon's log contains a text.
func (d *daemon) awaitLog(text string) {
	d.t.Helper()
	waitFor(d.t, 10*time.Second, func() error {
		if !strings.Contains(d.log.String(), text) {
			return fmt.Errorf("the log lacks %q", text)
		}
		return nil
	})
}

func (d *daemon) running() bool {
	select {
	case <-d.exited:
		return false
	default:
		return true
	}
}

// cleanUp kills the daemon, and fails the test if it had exited unexpectedly or logged a crash.
func (d *daemon) cleanUp() {
	if d.running() {
		d.checkConformance()
		_ = d.cmd.Process.Kill()
		<-d.exited
	} else if !d.expectExit {
		d.t.Errorf("shaperd exited unexpectedly: %v", d.status)
	}
	text := d.log.String()
	for _, bad := range []string{"panic:", "fatal error:", "DATA RACE"} {
		if strings.Contains(text, bad) {
			d.t.Errorf("shaperd wrote %q", bad)
		}
	}
	if d.t.Failed() {
		d.t.Logf("shaperd wrote:\n%s", text)
	}
}

// checkConformance fails the test if the daemon reports a violation of any limit. Other
// checks use the packets themselves.
func (d *daemon) checkConformance() {
	var limits []struct {
		Name        string
		Conformance struct {
			Violations uint64
			SigmaMax   float64 `json:"sigma_max"`
			Allowed    float64
		}
	}
	if err := d.get("/v1/limits", &limits); err != nil {
		d.t.Errorf("read conformance: %v", err)
	}
	for _, l := range limits {
		if c := l.Conformance; c.Violations > 0 {
			d.t.Errorf("limit %q: %d violations: largest excess %.0f, allowed %.0f", l.Name, c.Violations, c.SigmaMax, c.Allowed)
		}
	}
}

// get makes a request on the daemon's control socket.
func (d *daemon) get(path string, answer any) error {
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", d.control)
		},
	}}
	r, err := client.Get("http://shaperd" + path)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", path, r.Status)
	}
	return json.NewDecoder(r.Body).Decode(answer)
}

// logBuffer stores the first 256 KiB written to it.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	const most = 256 << 10
	b.mu.Lock()
	defer b.mu.Unlock()
	if room := most - b.buf.Len(); room > 0 {
		b.buf.Write(p[:min(len(p), room)])
	}
	return len(p), nil
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// samples are metric values by series: the name with its labels, as written.
type samples map[string]float64

// metrics scrapes the daemon.
func (d *daemon) metrics() samples {
	d.t.Helper()
	m, err := parseMetrics(d.scrape())
	if err != nil {
		d.t.Fatalf("scrape metrics: %v", err)
	}
	return m
}

// scrape returns the daemon's metrics as text.
func (d *daemon) scrape() string {
	d.t.Helper()
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
		d.t.Fatalf("scrape metrics: %v", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		d.t.Fatalf("scrape metrics: %s, %v", resp.Status, err)
	}
	return string(text)
}

func parseMetrics(text string) (samples, error) {
	m := samples{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		cut := strings.LastIndexByte(line, ' ')
		if cut < 0 {
			return nil, fmt.Errorf("no value in %q", line)
		}
		v, err := strconv.ParseFloat(line[cut+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("value in %q: %w", line, err)
		}
		m[line[:cut]] = v
	}
	return m, nil
}

// sum adds the samples of all metrics whose name contains name and that have all the
// labels, each written name="value".
func (m samples) sum(name string, labels ...string) (total float64) {
	for series, v := range m {
		metric, rest, _ := strings.Cut(series, "{")
		if strings.HasSuffix(metric, "_bucket") || !strings.Contains(metric, name) {
			continue
		}
		if !slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(rest, l) }) {
			total += v
		}
	}
	return total
}

// String lists the daemon's own metrics, without those of its runtime.
func (m samples) String() string {
	var lines []string
	for series, v := range m {
		if strings.HasPrefix(series, "shaperd") && !strings.Contains(series, "_bucket{") {
			lines = append(lines, fmt.Sprintf("%s %v", series, v))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// cpuTime returns the CPU time used by the daemon's threads.
func (d *daemon) cpuTime() (sum time.Duration) {
	d.t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", d.cmd.Process.Pid))
	if err != nil || len(threads) == 0 {
		d.t.Fatalf("read processor time: no threads, %v", err)
	}
	for _, thread := range threads {
		text, err := os.ReadFile(thread)
		if errors.Is(err, fs.ErrNotExist) { // it has exited
			continue
		}
		if err != nil {
			d.t.Fatalf("read processor time: %v", err)
		}
		ns, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
		if err != nil {
			d.t.Fatalf("read processor time: %v", err)
		}
		sum += time.Duration(ns)
	}
	return sum
}
