package monitor

import (
	"maps"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
)

// listenerTrack is the counters of a listener at the last samples.
type listenerTrack struct {
	at                            []time.Time // at most 11, for rates over 10 s
	up, down, refused, suppressed []uint64
}

// sampleListeners takes a sample of every listener.
func (m *Monitor) sampleListeners(p *shaper.Policy, now time.Time) {
	current := map[*shaper.ListenerState]bool{}
	for _, n := range p.Listeners() {
		current[n] = true
		t := m.listeners[n]
		if t == nil {
			t = &listenerTrack{}
			m.listeners[n] = t
		}
		t.at = lastN(append(t.at, now), 11)
		t.up, t.down = lastN(append(t.up, n.ToDownstream.Load()), 11), lastN(append(t.down, n.FromDownstream.Load()), 11)
		t.refused, t.suppressed = lastN(append(t.refused, n.FlowsRefused.Load()), 11), lastN(append(t.suppressed, n.RepliesSuppressed.Load()), 11)
	}
	maps.DeleteFunc(m.listeners, func(n *shaper.ListenerState, _ *listenerTrack) bool { return !current[n] })
}

// FillListener sets the rates of a listener over the last 10 s.
func (m *Monitor) FillListener(to *api.ListenerStatus, n *shaper.ListenerState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.listeners[n]
	if t == nil {
		return
	}
	end := len(t.at) - 1
	seconds := t.at[end].Sub(t.at[0]).Seconds()
	rate := func(counts []uint64) float64 { return perSecond(counts[end], counts[0], seconds) }
	to.ToDownstreamRate, to.FromDownstreamRate = rate(t.up), rate(t.down)
	to.FlowsRefusedRate, to.RepliesSuppressedRate = rate(t.refused), rate(t.suppressed)
}
