package monitor

import (
	"math"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// sample is the counters of a limit at one moment.
type sample struct {
	at                             time.Time
	bytes, delayed, packets, conns uint64
	refused                        [shaper.NumReasons]uint64
	queue, wait                    [len(shaper.HistogramBounds) + 1]uint64
	sigma, allowed                 float64 // over the interval before
	violations                     uint64
}

// limitTrack is the samples of one limit.
type limitTrack struct {
	samples   []sample // at most window+1, the newest last
	series    api.LimitHistory
	sigmaMax  float64 // largest sigma since the start
	inPackets bool    // sigma and allowed are packets
	loggedAt  time.Time
}

func (m *Monitor) sampleLimit(t *limitTrack, p *shaper.Policy, i int, now time.Time) {
	state, shape := p.State(i), p.Shape(i)
	s := sample{at: now, violations: state.Conformance.Violations.Load()}
	for v := range shaper.NumVerdicts {
		for r := range shaper.NumReasons {
			bytes, packets, conns := state.Bytes[v][r].Load(), state.Packets[v][r].Load(), state.Connections[v][r].Load()
			if shaper.Verdict(v) == shaper.Refuse {
				s.refused[r] += packets + conns
				continue
			}
			s.bytes += bytes
			s.packets += packets
			s.conns += conns
			if shaper.Verdict(v) == shaper.Delay {
				s.delayed += bytes
			}
		}
	}
	for c := range s.queue {
		s.queue[c], s.wait[c] = state.QueueDelay.Counts[c].Load(), state.SlotWait.Counts[c].Load()
	}
	rate := shape.Bytes
	if t.inPackets = rate.Unlimited(); t.inPackets {
		rate = shape.Packets
	}
	s.sigma = float64(rate.Units(leaky.Time(state.Conformance.MaxExcess.Swap(0))))
	s.allowed = float64(rate.Units(leaky.Time(state.Conformance.MaxAllowed.Load())))
	t.sigmaMax = max(t.sigmaMax, s.sigma)
	t.samples = lastN(append(t.samples, s), window+1)

	was := t.ago(1)
	if s.violations > was.violations && now.Sub(t.loggedAt) >= violationLogInterval {
		t.loggedAt = now
		m.log.Error("conformance violated: more traffic left than the limit allows", "limit", state.Name,
			"sigma", s.sigma, "allowed", s.allowed, "violations", s.violations-was.violations)
	}
	h, before := &t.series, t.ago(10)
	seconds, longest := now.Sub(was.at).Seconds(), maxQueueDelay(p.Limit(i))
	h.Rate = lastN(append(h.Rate, perSecond(s.bytes, was.bytes, seconds)), historyLen)
	h.Packets = lastN(append(h.Packets, perSecond(s.packets, was.packets, seconds)), historyLen)
	h.Admitted = lastN(append(h.Admitted, perSecond(s.conns, was.conns, seconds)), historyLen)
	h.P99 = lastN(append(h.P99, quantiles(&s.queue, &t.ago(window).queue, longest).P99), historyLen)
	h.InFlight = lastN(append(h.InFlight, state.InFlight.Load()), historyLen)
	h.Waiting = lastN(append(h.Waiting, state.Waiting.Load()), historyLen)
	h.Refused = lastN(append(h.Refused, perSecond(sum(&s.refused), sum(&before.refused), now.Sub(before.at).Seconds())), historyLen)
}

// maxQueueDelay returns the maximum delay of a unit under l in seconds. It is infinite at
// listeners, where TCP is never dropped for its delay.
func maxQueueDelay(l *shaper.Limit) float64 {
	if l.InPacketPlane() {
		return l.MaxDelay.Seconds()
	}
	return math.Inf(1)
}

// ago returns the sample of n seconds ago, or the oldest.
func (t *limitTrack) ago(n int) *sample { return &t.samples[max(0, len(t.samples)-1-n)] }

func sum(counts *[shaper.NumReasons]uint64) (n uint64) {
	for _, c := range counts {
		n += c
	}
	return n
}

// perSecond returns a rate. It is 0 over no time, and if the counter was reset.
func perSecond(now, was uint64, seconds float64) float64 {
	if seconds <= 0 || now < was {
		return 0
	}
	return float64(now-was) / seconds
}

func (t *limitTrack) rates(count func(*sample) uint64) api.Rates {
	is := t.ago(0)
	over := func(n int) float64 {
		was := t.ago(n)
		return perSecond(count(is), count(was), is.at.Sub(was.at).Seconds())
	}
	return api.Rates{S1: over(1), S10: over(10), S60: over(60)}
}

// quantiles returns the median and the 99th percentile of the delays counted between was and
// is, interpolated within the histogram class. A class that reaches beyond maxDelay is cut
// there: otherwise a delay of 100 ms, with a maximum of 100 ms, would show as up to 250 ms.
func quantiles(is, was *[len(shaper.HistogramBounds) + 1]uint64, maxDelay float64) api.Delay {
	var counts [len(shaper.HistogramBounds) + 1]uint64
	var d api.Delay
	for i := range counts {
		counts[i] = is[i] - was[i]
		d.Count += counts[i]
	}
	at := func(share float64) float64 {
		if d.Count == 0 {
			return 0
		}
		rank, seen := share*float64(d.Count), 0.0
		for i, n := range counts {
			if seen += float64(n); n == 0 || seen < rank {
				continue
			}
			var from float64
			if i > 0 {
				from = shaper.HistogramBounds[i-1].Seconds()
			}
			if i == len(shaper.HistogramBounds) {
				return from
			}
			to := shaper.HistogramBounds[i].Seconds()
			if from <= maxDelay {
				to = min(to, maxDelay)
			}
			return from + (to-from)*(rank-(seen-float64(n)))/float64(n)
		}
		return 0
	}
	d.P50, d.P99 = at(0.5), at(0.99)
	return d
}

// Thresholds of throttling. Shaping always delays a little when two packets arrive at once. A
// flow that a limit slows down has most of its packets delayed, and none of them for long.
const (
	throttlingShare = 0.05
	throttlingDelay = 10 * time.Millisecond
)

// FillLimit sets the rates, counters and conformance of limit i of p.
func (m *Monitor) FillLimit(to *api.Limit, p *shaper.Policy, i int) {
	state := p.State(i)
	to.InFlight, to.Waiting = state.InFlight.Load(), state.Waiting.Load()
	to.Refused, to.RefusedRate = map[string]uint64{}, map[string]float64{}
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.limits[state]
	if t == nil { // not sampled yet
		to.Conformance.Conformant = true
		return
	}
	is, was := t.ago(0), t.ago(10)
	to.Bytes = t.rates(func(s *sample) uint64 { return s.bytes })
	to.PacketsRate = t.rates(func(s *sample) uint64 { return s.packets })
	to.Admitted = t.rates(func(s *sample) uint64 { return s.conns })
	to.BytesTotal, to.PacketsTotal, to.AdmittedTotal = is.bytes, is.packets, is.conns
	if n := is.bytes - was.bytes; n > 0 {
		to.DelayedShare = float64(is.delayed-was.delayed) / float64(n)
	}
	to.QueueDelay = quantiles(&is.queue, &t.ago(window).queue, maxQueueDelay(p.Limit(i)))
	to.ConnectionWait = quantiles(&is.wait, &t.ago(window).wait, to.QueueTimeout)
	to.Throttling = to.Waiting > 0 || to.DelayedShare >= throttlingShare ||
		to.DelayedShare > 0 && to.QueueDelay.P99 >= throttlingDelay.Seconds()
	seconds := is.at.Sub(was.at).Seconds()
	for r, n := range is.refused {
		if n > 0 {
			to.Refused[shaper.Reason(r).String()] = n
			to.RefusedRate[shaper.Reason(r).String()] = perSecond(n, was.refused[r], seconds)
		}
	}
	to.Conformance = t.conformance()
}

func (t *limitTrack) conformance() api.Conformance {
	is, was := t.ago(0), t.ago(window)
	p := api.Conformance{
		Conformant: is.violations == was.violations, SigmaMax: t.sigmaMax, Allowed: is.allowed,
		Violations: is.violations, InPackets: t.inPackets,
	}
	for i := range t.samples {
		p.Sigma = max(p.Sigma, t.samples[i].sigma)
	}
	return p
}

// Conformance returns the conformance of a limit; false before its first sample.
func (m *Monitor) Conformance(s *shaper.LimitState) (api.Conformance, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.limits[s]
	if t == nil {
		return api.Conformance{}, false
	}
	return t.conformance(), true
}
