package monitor

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// monitorOf returns a monitor with one sample of one limit, and the policy.
func monitorOf(t *testing.T, l shaper.Limit) (*Monitor, *shaper.Policy) {
	t.Helper()
	s := shaper.New(1024)
	p, err := s.Compile([]shaper.Limit{l}, []shaper.Listener{{Name: "l", Addresses: []shaper.Address{{Protocol: shaper.TCP}}}}, nil, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	s.Swap(p, leaky.Second)
	m := New(s, downstreamsOf(new(shaper.DownstreamState)), slog.New(slog.DiscardHandler))
	t.Cleanup(m.Close)
	return m, p
}

// Charts start with the history and continue with live events, so both must cover the same
// time.
func TestMonitor_HistoryEqualsLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the monitor takes no sample of its own in between
		m, p := monitorOf(t, shaper.Limit{Name: "a", Rate: 8e6, MaxDelay: 5 * time.Second})
		state := p.State(0)
		now := time.Now()
		// 12 s ago a unit was delayed by 2 s, and 5 s ago 20 connections were refused.
		for i := range 20 {
			switch i {
			case 8:
				state.QueueDelay.Observe(2 * time.Second)
			case 15:
				state.Connections.Add(shaper.Refuse, shaper.QueueFull, 20)
			}
			m.Sample(now.Add(time.Duration(i+1) * time.Second))
		}
		var l api.Limit
		l.MaxDelay, l.QueueTimeout = 5, 1
		m.FillLimit(&l, p, 0)
		kept := m.History().Limits["a"]
		if got, want := kept.P99[len(kept.P99)-1], l.QueueDelay.P99; got != want || want < 1 {
			t.Errorf("p99 is %v in the history and %v live, want the same, above 1 s", got, want)
		}
		if got, want := kept.Refused[len(kept.Refused)-1], sumOf(l.RefusedRate); got != want || want != 2 {
			t.Errorf("refused are %v in the history and %v live, want 2 a second", got, want)
		}
	})
}

func sumOf(rates map[string]float64) (all float64) {
	for _, r := range rates {
		all += r
	}
	return all
}

// Quantiles do not exceed the maximum delay, as far as the histogram classes allow.
func TestQuantiles_BoundedByMaxDelay(t *testing.T) {
	const classes = len(shaper.HistogramBounds) + 1
	for _, test := range []struct {
		name       string
		waits      time.Duration // 100 times
		most, want float64       // seconds
	}{
		{"within a class", 110 * time.Millisecond, 0.2, 0.199},
		{"a little late", 101 * time.Millisecond, 0.1, 0.1},
		{"a class above", 300 * time.Millisecond, 0.2, 0.4975},
		{"no bound in reach", 110 * time.Millisecond, 5, 0.2485},
	} {
		var h shaper.Histogram
		for range 100 {
			h.Observe(test.waits)
		}
		var is, was [classes]uint64
		for i := range is {
			is[i] = h.Counts[i].Load()
		}
		if got := quantiles(&is, &was, test.most).P99; got < test.want-1e-9 || got > test.want+1e-9 {
			t.Errorf("%s: p99 is %v, want %v", test.name, got, test.want)
		}
	}
}

// A limit is throttling if the delay is noticeable.
func TestMonitor_Throttling(t *testing.T) {
	for _, test := range []struct {
		name            string
		passed, delayed uint64 // bytes
		by              time.Duration
		waiting         int64
		want            bool
	}{
		{"nothing passes", 0, 0, 0, 0, false},
		{"nothing is delayed", 1e6, 0, 0, 0, false},
		{"a little, by a little", 1e6, 2e4, time.Millisecond, 0, false},
		{"a little, by much", 1e6, 2e4, 20 * time.Millisecond, 0, true},
		{"much, by a little", 1e6, 1e6, 400 * time.Microsecond, 0, true},
		{"a connection waits", 1e6, 0, 0, 1, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // the monitor takes no sample of its own in between
				m, p := monitorOf(t, shaper.Limit{Name: "a", Rate: 8e6, MaxDelay: time.Second})
				state, now := p.State(0), time.Now()
				m.Sample(now)
				state.Bytes.Add(shaper.Pass, shaper.None, test.passed)
				state.Bytes.Add(shaper.Delay, shaper.ByRate, test.delayed)
				if test.delayed > 0 {
					state.QueueDelay.Observe(test.by)
				}
				state.Waiting.Add(test.waiting)
				m.Sample(now.Add(time.Second))
				var l api.Limit
				l.MaxDelay = 1
				if m.FillLimit(&l, p, 0); l.Throttling != test.want {
					t.Errorf("throttling is %v, with %v of the bytes delayed, by %v (p99)", l.Throttling, l.DelayedShare, l.QueueDelay.P99)
				}
			})
		})
	}
}
