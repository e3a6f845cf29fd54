package control

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/monitor"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// fakeProxy is a proxy plane with two downstreams and two connections.
type fakeProxy struct{}

func (fakeProxy) Lateness() (counts [len(pacer.LatenessBounds) + 1]uint64, sum time.Duration) {
	counts[0], counts[len(counts)-1] = 3, 1
	return counts, 70 * time.Millisecond
}

func (fakeProxy) Downstreams() []shaper.DownstreamStatus {
	return []shaper.DownstreamStatus{
		{Listen: "l", Downstream: "10.0.0.5:5432", Up: true, InFlight: 3},
		{Listen: "l", Downstream: "db.local:5432"},
	}
}

func (fakeProxy) Connections(f func(*shaper.ConnectionStatus)) {
	for i, source := range []string{"192.0.2.1:1000", "[2001:db8::1]:2000"} {
		f(&shaper.ConnectionStatus{
			ID: uint64(i + 1), Protocol: shaper.TCP, Source: netip.MustParseAddrPort(source), Listen: "l", Port: 5432, Stage: "open",
			ToDownstream: uint64(1000 * i), Waited: time.Second, ThrottledBy: "aa", MostlyThrottledBy: "aa",
		})
	}
}

func (fakeProxy) Kill(id uint64) bool { return id == 1 }

func (fakeProxy) Buckets(_ int, keys ...shaper.Key) []shaper.BucketState {
	return slices.Repeat([]shaper.BucketState{{BacklogBytes: 1000, Queued: 2, NextDeparture: time.Millisecond}}, len(keys))
}

// fakePackets is a packet plane with an attachment that shapes, one whose interface is missing,
// and one without a matching interface.
type fakePackets struct{}

func (fakePackets) PacketStatus() (s PacketStatus, ok bool, err error) {
	s.Attachments = []api.AttachmentStatus{
		{Name: "lost", Direction: "ingress", Mode: "police"},
		{Name: "uplink", Interface: "eth0", Direction: "egress", Mode: "shape", Up: true, Queue: &api.QueueStatus{Packets: 7, Bytes: 7000, Drops: 3}},
		{Name: "tunnels", Direction: "ingress", Mode: "police", Up: true, UnmatchedPatterns: "wg*"}, // is in no metric
	}
	s.Buckets.Live, s.Buckets.Capacity, s.Buckets.EvictedBacklogged = 5, 2048, 1
	return s, true, nil
}

func (fakePackets) Bucket(int, shaper.Key) (shaper.BucketState, bool) {
	return shaper.BucketState{}, false
}

// fakeDaemon records the calls of its methods.
type fakeDaemon struct {
	mu    sync.Mutex
	calls []string
	err   error // returned by each call
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

func (d *fakeDaemon) Explain(q ExplainRequest) (api.Explanation, error) {
	x := api.Explanation{Source: q.Source, To: q.To, Verdict: "pass", Limits: []api.LimitBucket{}, Bottlenecks: []api.Bottleneck{}, Connections: []api.Connection{}}
	return x, d.record("explain")
}

func (d *fakeDaemon) SetLimit(_ context.Context, limit string, _ map[string]string, _ time.Duration, _ bool) error {
	return d.record("set " + limit)
}

func (d *fakeDaemon) UnsetLimit(_ context.Context, limit string, _ []string) error {
	return d.record("unset " + limit)
}

func (d *fakeDaemon) Block(_ context.Context, p netip.Prefix, _ time.Duration) error {
	return d.record("block " + p.String())
}

func (d *fakeDaemon) Unblock(_ context.Context, p netip.Prefix) error {
	return d.record("unblock " + p.String())
}

func (d *fakeDaemon) Bypass(context.Context, bool, time.Duration) error { return d.record("bypass") }

func (d *fakeDaemon) Reload(context.Context) error { return d.record("reload") }

func (d *fakeDaemon) DrainDownstream(context.Context, string, string, bool) error {
	return d.record("drain downstream")
}
func (d *fakeDaemon) Stop(context.Context) { _ = d.record("stop") }

// options returns Options for s with fakes.
func options(t *testing.T, s *shaper.Shaper) *Options {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	m := monitor.New(s, log)
	t.Cleanup(m.Close)
	return &Options{
		Shaper: s, Proxy: fakeProxy{}, Packets: fakePackets{}, Clock: func() leaky.Time { return leaky.Second }, Monitor: m,
		Reloads: &monitor.Reloads{}, Events: monitor.NewEvents(10), Daemon: &fakeDaemon{}, Log: log,
		LogDropped: func() uint64 { return 2 }, Version: "1.0",
	}
}
