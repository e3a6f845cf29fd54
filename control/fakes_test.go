package control

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/control/metrics"
	"shaperd.dev/shaperd/control/monitor"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// fakeDaemon records the calls of its methods.
type fakeDaemon struct {
	mu    sync.Mutex
	calls []string
	err   error // returned by each call

	silence  atomic.Int64 // a time.Duration
	stopping atomic.Bool
}

func (d *fakeDaemon) record(what string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, what)
	return d.err
}

func (d *fakeDaemon) Describe(s *api.Status) {
	s.Version, s.State, s.Mode = "1.0", "running", "enforce"
}

func (d *fakeDaemon) Summary(*shaper.Limit) string                   { return "8Mbit/s" }
func (d *fakeDaemon) Override(limit string) (_, _ map[string]string) { return nil, nil }
func (d *fakeDaemon) Config() any                                    { return map[string]string{"daemon": "x"} }

func (d *fakeDaemon) Silence() time.Duration { return time.Duration(d.silence.Load()) }
func (d *fakeDaemon) Stopping() bool         { return d.stopping.Load() }

func (d *fakeDaemon) Explain(q ExplainRequest) (api.Explanation, error) {
	x := api.Explanation{Source: q.Source, To: q.To, Verdict: "pass", Limits: []api.LimitBucket{}, Bottlenecks: []api.Bottleneck{}, Connections: []api.Connection{}}
	return x, d.record("explain")
}

func (d *fakeDaemon) Scheduled(string) []api.Scheduled {
	return []api.Scheduled{{When: []string{"08:00-18:00"}, Set: map[string]string{"rate": "1MB/s"}, Holds: true}}
}

func (d *fakeDaemon) Configuration() api.Configuration {
	_ = d.record("configuration")
	return api.Configuration{Revision: "5f0c61d2a7be", Files: []api.ConfigFile{{Path: "/etc/shaperd/shaperd.toml", Text: "[daemon]\n"}}}
}

func (d *fakeDaemon) Revisions(context.Context) ([]api.Revision, error) {
	return []api.Revision{{Revision: "5f0c61d2a7be", Effective: true}}, d.record("revisions")
}

func (d *fakeDaemon) Rollback(_ context.Context, revision string) error {
	return d.record("rollback " + revision)
}

func (d *fakeDaemon) ResetBucket(_ context.Context, limit string, _ netip.Addr) error {
	return d.record("reset " + limit)
}

func (d *fakeDaemon) ResetQuota(_ context.Context, limit string, _ netip.Addr) error {
	return d.record("reset quota of " + limit)
}

func (d *fakeDaemon) SetLimit(_ context.Context, limit string, _ netip.Prefix, _ map[string]string, _ time.Duration, _ bool) error {
	return d.record("set " + limit)
}

func (d *fakeDaemon) UnsetLimit(_ context.Context, limit string, _ netip.Prefix, _ []string) error {
	return d.record("unset " + limit)
}

func (d *fakeDaemon) Block(_ context.Context, p netip.Prefix, _ time.Duration) error {
	return d.record("block " + p.String())
}

func (d *fakeDaemon) Unblock(_ context.Context, p netip.Prefix) error {
	return d.record("unblock " + p.String())
}

func (d *fakeDaemon) ChangeBlocks(_ context.Context, block, unblock []netip.Prefix, _ time.Duration, _ bool) (api.BlockChanges, error) {
	return api.BlockChanges{Blocked: len(block), Unblocked: len(unblock), Total: 1}, d.record("change blocks")
}

func (d *fakeDaemon) EndPenalty(_ context.Context, _ string, source netip.Prefix) error {
	return d.record("end penalty " + source.String())
}

func (d *fakeDaemon) Bypass(context.Context, bool, time.Duration) error { return d.record("bypass") }

func (d *fakeDaemon) Shared() api.Shared { return fakes.Shared() }
func (d *fakeDaemon) AddLedger(s *api.Shared) {
	s.Ledger = &api.Ledger{Hosts: []api.SharedHost{{Name: "gw1", State: "counted", Age: 0.1}}}
}

func (d *fakeDaemon) SharedMetrics() metrics.Shared { return fakes.SharedMetrics() }

func (d *fakeDaemon) ForgetHost(_ context.Context, host string) error {
	return d.record("forget " + host)
}

func (d *fakeDaemon) Reload(context.Context) error { return d.record("reload") }

func (d *fakeDaemon) HoldListener(context.Context, string, time.Duration, bool) (int, error) {
	return 3, d.record("hold")
}

func (d *fakeDaemon) DrainDownstream(context.Context, string, string, bool) error {
	return d.record("drain downstream")
}
func (d *fakeDaemon) Stop(context.Context) { _ = d.record("stop") }

// options returns Options for s with fakes.
func options(t *testing.T, s *shaper.Shaper) *Options {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	m := monitor.New(s, fakes.Proxy{}.Downstreams, log)
	t.Cleanup(m.Close)
	return &Options{
		Shaper: s, Proxy: fakes.Proxy{}, Packets: fakes.Packets{}, Clock: func() leaky.Time { return leaky.Second }, Monitor: m,
		Reloads: &monitor.Reloads{}, Events: monitor.NewEvents(10), Daemon: &fakeDaemon{}, Log: log,
		LogDropped: func() uint64 { return 2 }, Version: "1.0",
	}
}
