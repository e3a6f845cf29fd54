package monitor

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
)

func downstreamsOf(states ...*shaper.DownstreamState) func() []shaper.DownstreamStatus {
	return func() (all []shaper.DownstreamStatus) {
		for _, s := range states {
			all = append(all, shaper.DownstreamStatus{State: s})
		}
		return all
	}
}

// TestMonitor_Downstream shows the last minute of a downstream, and totals.
func TestMonitor_Downstream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the monitor takes no sample of its own in between
		state := new(shaper.DownstreamState)
		m := New(shaper.New(10), downstreamsOf(state), slog.New(slog.DiscardHandler))
		t.Cleanup(m.Close)
		now := time.Now().Add(time.Hour)
		sample := func(seconds int, each func()) {
			for range seconds {
				each()
				now = now.Add(time.Second)
				m.Sample(now)
			}
		}
		sample(100, func() { state.Answer.Observe(3 * time.Second) })
		sample(70, func() {
			for range 5 {
				state.Answer.Observe(20 * time.Millisecond)
			}
			state.ToDownstream.Add(1000)
			state.FromDownstream.Add(3000)
			state.Busy.Add(1e6)
			state.ReceiverLimited.Add(25e4)
			state.DialsRefused.Add(1)
		})
		var d api.DownstreamStatus
		m.FillDownstream(&d, state)
		if d.Answer.P50 < 0.01 || d.Answer.P99 > 0.025 || d.Answer.Count < 290 || d.Answer.Count > 300 {
			t.Errorf("answers of the last minute: %+v", d.Answer)
		}
		if d.Turns != 450 || d.TurnsRate < 4 || d.TurnsRate > 5 || d.ToDownstreamRate < 800 || d.FromDownstreamRate > 3000 || d.ReceiverLimited != 0.25 || d.DialsRefused != 70 {
			t.Errorf("%+v", d)
		}
		var fresh api.DownstreamStatus
		m.FillDownstream(&fresh, new(shaper.DownstreamState)) // has just been configured
		if fresh != (api.DownstreamStatus{}) {
			t.Errorf("of a new one: %+v", fresh)
		}
	})
}
