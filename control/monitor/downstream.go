package monitor

import (
	"maps"
	"math"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
)

// counts are those of a histogram.
type counts = [len(shaper.HistogramBounds) + 1]uint64

func load(h *shaper.Histogram) (c counts) {
	for i := range c {
		c[i] = h.Counts[i].Load()
	}
	return c
}

func total(c *counts) (n uint64) {
	for _, count := range c {
		n += count
	}
	return n
}

// downstreamSample is the counters of a downstream at one time.
type downstreamSample struct {
	at                              time.Time
	connect, firstByte, answer, rtt counts
	up, down, busy, limited         uint64
}

// downstreamTrack is the samples of a downstream: at most window+1, the newest last.
type downstreamTrack []downstreamSample

func (t downstreamTrack) ago(n int) *downstreamSample { return &t[max(0, len(t)-1-n)] }

// sampleDownstreams takes a sample of every downstream.
func (m *Monitor) sampleDownstreams(all []shaper.DownstreamStatus, now time.Time) {
	current := map[*shaper.DownstreamState]bool{}
	for i := range all {
		s := all[i].State
		current[s] = true
		if m.servers[s] == nil { // it was configured since the last sample
			m.servers[s] = downstreamTrack{{at: now.Add(-interval)}}
		}
		m.servers[s] = lastN(append(m.servers[s], downstreamSample{
			at: now, connect: load(&s.Connect), firstByte: load(&s.FirstByte), answer: load(&s.Answer), rtt: load(&s.RTT),
			up: s.ToDownstream.Load(), down: s.FromDownstream.Load(), busy: s.Busy.Load(), limited: s.ReceiverLimited.Load(),
		}), window+1)
	}
	maps.DeleteFunc(m.servers, func(s *shaper.DownstreamState, _ downstreamTrack) bool { return !current[s] })
}

// FillDownstream sets what was measured of a downstream.
func (m *Monitor) FillDownstream(to *api.DownstreamStatus, s *shaper.DownstreamState) {
	answers := load(&s.Answer)
	to.Turns, to.Resets, to.ICMPErrors, to.Retransmits = total(&answers), s.Resets.Load(), s.ICMPErrors.Load(), s.Retransmits.Load()
	to.BreakerOpened = s.BreakerOpened.Load()
	to.DialsRefused, to.DialsTimedOut, to.DialsFailed = s.DialsRefused.Load(), s.DialsTimedOut.Load(), s.DialsFailed.Load()
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.servers[s]
	if len(t) == 0 {
		return
	}
	is, was, before := t.ago(0), t.ago(10), t.ago(window)
	seconds := is.at.Sub(was.at).Seconds()
	to.TurnsRate = perSecond(total(&is.answer), total(&was.answer), seconds)
	to.ToDownstreamRate, to.FromDownstreamRate = perSecond(is.up, was.up, seconds), perSecond(is.down, was.down, seconds)
	if busy := is.busy - was.busy; busy > 0 {
		to.ReceiverLimited = min(1, float64(is.limited-was.limited)/float64(busy))
	}
	to.Connect = quantiles(&is.connect, &before.connect, math.Inf(1))
	to.FirstByte = quantiles(&is.firstByte, &before.firstByte, math.Inf(1))
	to.Answer = quantiles(&is.answer, &before.answer, math.Inf(1))
	to.RTT = quantiles(&is.rtt, &before.rtt, math.Inf(1))
}
