package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/test/lab"
)

// A daemon is closed when its test ends, and fails it on errors.
type daemon struct {
	*lab.Daemon
	t testing.TB
}

// daemonPath returns the path of the daemon under test.
func daemonPath(t testing.TB) string {
	t.Helper()
	path, err := lab.Binary()
	must(t, err)
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
	started, err := lab.StartDaemon(t.Context(), lab.DaemonOptions{Host: h.Host, Config: config, Args: args, Stored: stored})
	must(t, err)
	d := &daemon{started, t}
	t.Cleanup(d.cleanUp)
	return d
}

// reload changes the daemon's configuration, and waits until the reload succeeds or fails.
func (d *daemon) reload(config string) {
	d.t.Helper()
	must(d.t, d.Reload(d.t.Context(), config))
}

func (d *daemon) awaitNotify(want string) {
	d.t.Helper()
	must(d.t, d.Await(d.t.Context(), want))
}

// terminate sends SIGTERM. The daemon may exit from now on.
func (d *daemon) terminate() {
	d.t.Helper()
	must(d.t, d.Terminate())
}

// waitExit waits until the daemon exits, and fails the test if it does not exit cleanly.
func (d *daemon) waitExit(most time.Duration) {
	d.t.Helper()
	if err := d.AwaitExit(most); err != nil {
		d.t.Error(err)
	}
}

// awaitLog waits until the daemon's log contains a text.
func (d *daemon) awaitLog(text string) {
	d.t.Helper()
	waitFor(d.t, patience, func() error {
		if !strings.Contains(d.Log.String(), text) {
			return fmt.Errorf("the log lacks %q", text)
		}
		return nil
	})
}

func (d *daemon) cleanUp() {
	if d.Running() {
		d.checkConformance()
	}
	if err := d.Close(); err != nil {
		d.t.Error(err)
	}
	if d.t.Failed() {
		d.t.Logf("shaperd wrote:\n%s", &d.Log)
	}
}

// checkConformance fails the test if the daemon reports a violation of any limit. Other
// checks use the packets themselves.
func (d *daemon) checkConformance() {
	limits, err := d.api().Limits(context.Background()) // the test's context has ended
	if err != nil {
		d.t.Errorf("read conformance: %v", err)
	}
	for _, l := range limits {
		if c := l.Conformance; c.Violations > 0 {
			d.t.Errorf("limit %q: %d violations: largest excess %.0f, allowed %.0f", l.Name, c.Violations, c.SigmaMax, c.Allowed)
		}
	}
}

// api returns a client of the control socket.
func (d *daemon) api() *api.Client { return api.NewClient(d.Control) }

// metrics scrapes the daemon.
func (d *daemon) metrics() lab.Metrics {
	d.t.Helper()
	m, err := lab.ParseMetrics(d.scrape())
	must(d.t, err)
	return m
}

// awaitMetric waits until the metrics with a name and labels have a sum. The daemon may count what its client sees a little
// later.
func (d *daemon) awaitMetric(want float64, name string, labels ...string) {
	d.t.Helper()
	waitFor(d.t, patience, func() error {
		if m := d.metrics(); m.Sum(name, labels...) != want {
			return fmt.Errorf("%s of %q is %v, want %v\n%s", name, labels, m.Sum(name, labels...), want, m)
		}
		return nil
	})
}

// scrape returns the daemon's metrics as text.
func (d *daemon) scrape() string {
	d.t.Helper()
	text, err := d.Scrape()
	must(d.t, err)
	return text
}

// cpuTime returns the CPU time used by the daemon's threads.
func (d *daemon) cpuTime() (sum time.Duration) {
	d.t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", d.PID()))
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
