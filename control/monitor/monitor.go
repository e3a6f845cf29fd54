// Package monitor retains what a daemon did in the last minutes: samples of its counters
// ([Monitor]), records of its log ([Events]), and the result of the last reload ([Reloads]).
// All types are safe for concurrent use. A Monitor has one goroutine, which Close ends.
package monitor

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
)

const (
	// interval is the time between samples.
	interval = time.Second

	// window is the number of samples that rates and quantiles span.
	window = 60

	// historyLen is the number of samples in the history of the charts.
	historyLen = 300

	// violationLogInterval is the minimum time between logged violations of one limit.
	violationLogInterval = 10 * time.Second
)

// Monitor samples the counters of all limits once a second, and retains the samples for rates,
// quantiles and charts. Reading them touches no counters.
type Monitor struct {
	shaper      *shaper.Shaper
	downstreams func() []shaper.DownstreamStatus
	log         *slog.Logger

	mu        sync.Mutex
	times     []time.Time // times of the newest samples, at most historyLen
	limits    map[*shaper.LimitState]*limitTrack
	listeners map[*shaper.ListenerState]*listenerTrack
	servers   map[*shaper.DownstreamState]downstreamTrack
	stop      func()
	done      chan struct{}
	next      chan struct{} // closed by the next sample
}

// New starts a monitor of the limits of s, and of downstreams. It logs violations of the conformance of limits.
func New(s *shaper.Shaper, downstreams func() []shaper.DownstreamStatus, log *slog.Logger) *Monitor {
	ctx, cancel := context.WithCancel(context.Background())
	m := &Monitor{shaper: s, downstreams: downstreams, log: log, limits: map[*shaper.LimitState]*limitTrack{}, listeners: map[*shaper.ListenerState]*listenerTrack{}, servers: map[*shaper.DownstreamState]downstreamTrack{}, stop: cancel, done: make(chan struct{}), next: make(chan struct{})}
	m.Sample(time.Now())
	go func() {
		defer close(m.done)
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case now := <-tick.C:
				m.Sample(now)
			case <-ctx.Done():
				m.mu.Lock()
				close(m.next)
				m.mu.Unlock()
				return
			}
		}
	}()
	return m
}

// Close stops the monitor.
func (m *Monitor) Close() {
	m.stop()
	<-m.done
}

// Sample takes a sample of every limit and listener, as the monitor does by itself once a second. It
// must not be called after Close.
func (m *Monitor) Sample(now time.Time) {
	downstreams := m.downstreams()
	m.mu.Lock()
	defer m.mu.Unlock()
	policy := m.shaper.Policy()
	m.times = lastN(append(m.times, now), historyLen)
	current := map[*shaper.LimitState]bool{}
	for i := range policy.Len() {
		state := policy.State(i)
		current[state] = true
		t := m.limits[state]
		if t == nil {
			t = &limitTrack{}
			m.limits[state] = t
		}
		m.sampleLimit(t, policy, i, now)
	}
	maps.DeleteFunc(m.limits, func(s *shaper.LimitState, _ *limitTrack) bool { return !current[s] })
	m.sampleListeners(policy, now)
	m.sampleDownstreams(downstreams, now)
	close(m.next)
	m.next = make(chan struct{})
}

// lastN drops the oldest element if there are more than n.
func lastN[T any](s []T, n int) []T {
	if len(s) <= n {
		return s
	}
	copy(s, s[1:])
	return s[:n]
}

// History returns the history of the charts.
func (m *Monitor) History() api.History {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := api.History{Times: append([]time.Time{}, m.times...), Limits: map[string]api.LimitHistory{}}
	for state, t := range m.limits {
		h.Limits[state.Name] = api.LimitHistory{
			Rate: padded(t.series.Rate, len(h.Times)), Packets: padded(t.series.Packets, len(h.Times)),
			Admitted: padded(t.series.Admitted, len(h.Times)), P99: padded(t.series.P99, len(h.Times)), InFlight: padded(t.series.InFlight, len(h.Times)),
			Waiting: padded(t.series.Waiting, len(h.Times)), Refused: padded(t.series.Refused, len(h.Times)),
		}
	}
	return h
}

// padded returns s, padded with leading zeros to length n, for the time before the limit existed.
func padded[T any](s []T, n int) []T {
	return append(make([]T, max(0, n-len(s)), n), s...)
}

// Next returns a channel that is closed by the next sample or by Close.
func (m *Monitor) Next() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.next
}

// Closed reports whether the monitor is closed.
func (m *Monitor) Closed() bool {
	select {
	case <-m.done:
		return true
	default:
		return false
	}
}
