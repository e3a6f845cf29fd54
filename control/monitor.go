package control

import (
	"context"
	"log/slog"
	"maps"
	"math"
	"sync"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

const (
	// second is how far samples are apart.
	second = time.Second

	// window is how many samples rates and quantiles go back.
	window = 60

	// historyLen is how many samples charts begin with.
	historyLen = 300

	// brokenEvery is how often a broken promise of one limit is logged.
	brokenEvery = 10 * time.Second
)

// Monitor looks at the counts of all limits once a second, and keeps what rates, quantiles
// and charts need. Reading what it keeps touches no counts. It may be used by several
// goroutines.
type Monitor struct {
	shaper *shaper.Shaper
	log    *slog.Logger

	mu     sync.Mutex
	times  []time.Time // of the newest samples, at most historyLen
	tracks map[*shaper.State]*track
	flows  map[*shaper.ListenerState]*traffic
	stop   func()
	done   chan struct{}
	next   chan struct{} // closed with the next sample
}

// sample is what a limit had counted at one moment.
type sample struct {
	at                             time.Time
	bytes, delayed, packets, conns uint64
	refused                        [shaper.Reasons]uint64
	queue, wait                    [len(shaper.HistogramBounds) + 1]uint64
	sigma, allowed                 float64 // of the second before
	violations                     uint64
}

// track is what is kept of one limit.
type track struct {
	samples  []sample // at most window+1, the newest last
	series   LimitHistory
	most     float64 // sigma, ever
	packets  bool    // sigma and allowed are packets
	loggedAt time.Time
}

// NewMonitor begins to watch the limits of s. A broken promise is told to log.
func NewMonitor(s *shaper.Shaper, log *slog.Logger) *Monitor {
	ctx, cancel := context.WithCancel(context.Background())
	m := &Monitor{shaper: s, log: log, tracks: map[*shaper.State]*track{}, flows: map[*shaper.ListenerState]*traffic{}, stop: cancel, done: make(chan struct{}), next: make(chan struct{})}
	m.look(time.Now())
	go func() {
		defer close(m.done)
		tick := time.NewTicker(second)
		defer tick.Stop()
		for {
			select {
			case now := <-tick.C:
				m.look(now)
			case <-ctx.Done():
				close(m.next)
				return
			}
		}
	}()
	return m
}

// Close ends it.
func (m *Monitor) Close() {
	m.stop()
	<-m.done
}

// look takes a sample of every limit.
func (m *Monitor) look(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	policy := m.shaper.Policy()
	m.times = last(append(m.times, now), historyLen)
	there := map[*shaper.State]bool{}
	for i := range policy.Len() {
		state := policy.State(i)
		there[state] = true
		t := m.tracks[state]
		if t == nil {
			t = &track{}
			m.tracks[state] = t
		}
		m.sample(t, policy, i, now)
	}
	maps.DeleteFunc(m.tracks, func(s *shaper.State, _ *track) bool { return !there[s] })
	m.listeners(policy, now)
	close(m.next)
	m.next = make(chan struct{})
}

// traffic is what a listener had moved by the last samples.
type traffic struct {
	at                          []time.Time // at most 11
	up, down, refused, withheld []uint64
}

// listeners takes a sample of every listener.
func (m *Monitor) listeners(p *shaper.Policy, now time.Time) {
	there := map[*shaper.ListenerState]bool{}
	for _, n := range p.Listeners() {
		there[n] = true
		t := m.flows[n]
		if t == nil {
			t = &traffic{}
			m.flows[n] = t
		}
		t.at = last(append(t.at, now), 11)
		t.up, t.down = last(append(t.up, n.ToDownstream.Load()), 11), last(append(t.down, n.FromDownstream.Load()), 11)
		t.refused, t.withheld = last(append(t.refused, n.FlowsRefused.Load()), 11), last(append(t.withheld, n.Withheld.Load()), 11)
	}
	maps.DeleteFunc(m.flows, func(n *shaper.ListenerState, _ *traffic) bool { return !there[n] })
}

// listener fills in what a listener did over the last 10 s, a second.
func (m *Monitor) listener(to *ListenerStatus, n *shaper.ListenerState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.flows[n]
	if t == nil {
		return
	}
	end := len(t.at) - 1
	seconds := t.at[end].Sub(t.at[0]).Seconds()
	rate := func(counts []uint64) float64 { return perSecond(counts[end], counts[0], seconds) }
	to.ToDownstreamRate, to.FromDownstreamRate = rate(t.up), rate(t.down)
	to.FlowsRefusedRate, to.AnswersWithheldRate = rate(t.refused), rate(t.withheld)
}

func (m *Monitor) sample(t *track, p *shaper.Policy, i int, now time.Time) {
	state, shape := p.State(i), p.Shape(i)
	s := sample{at: now, violations: state.Promise.Violations.Load()}
	for v := range shaper.Verdicts {
		for r := range shaper.Reasons {
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
		s.queue[c], s.wait[c] = state.Queue.Counts[c].Load(), state.Wait.Counts[c].Load()
	}
	rate := shape.Bytes
	if t.packets = rate.Unlimited(); t.packets {
		rate = shape.Packets
	}
	s.sigma = float64(rate.Units(leaky.Time(state.Promise.Worst.Swap(0))))
	s.allowed = float64(rate.Units(leaky.Time(state.Promise.Allowed.Load())))
	t.most = max(t.most, s.sigma)
	t.samples = last(append(t.samples, s), window+1)

	was := t.back(1)
	if s.violations > was.violations && now.Sub(t.loggedAt) >= brokenEvery {
		t.loggedAt = now
		m.log.Error("promise broken: more left than the limit allows", "limit", state.Name,
			"sigma", s.sigma, "allowed", s.allowed, "units", s.violations-was.violations)
	}
	h, before := &t.series, t.back(10)
	seconds, longest := now.Sub(was.at).Seconds(), longestQueue(p.Limit(i))
	h.Rate = last(append(h.Rate, perSecond(s.bytes, was.bytes, seconds)), historyLen)
	h.Packets = last(append(h.Packets, perSecond(s.packets, was.packets, seconds)), historyLen)
	h.Admitted = last(append(h.Admitted, perSecond(s.conns, was.conns, seconds)), historyLen)
	h.P99 = last(append(h.P99, quantiles(&s.queue, &t.back(window).queue, longest).P99), historyLen)
	h.InFlight = last(append(h.InFlight, state.InFlight.Load()), historyLen)
	h.Waiting = last(append(h.Waiting, state.Waiting.Load()), historyLen)
	h.Refused = last(append(h.Refused, perSecond(sum(&s.refused), sum(&before.refused), now.Sub(before.at).Seconds())), historyLen)
}

// longestQueue is how long a packet may wait under l, in seconds. At listeners nothing of
// TCP is dropped for its delay.
func longestQueue(l *shaper.Limit) float64 {
	if l.OfAttachments() {
		return l.MaxDelay.Seconds()
	}
	return math.Inf(1)
}

// last drops the oldest of more than n elements.
func last[T any](s []T, n int) []T {
	if len(s) <= n {
		return s
	}
	copy(s, s[1:])
	return s[:n]
}

// back returns the sample of n seconds ago, or the oldest one.
func (t *track) back(n int) *sample { return &t.samples[max(0, len(t.samples)-1-n)] }

func sum(counts *[shaper.Reasons]uint64) (n uint64) {
	for _, c := range counts {
		n += c
	}
	return n
}

// perSecond is 0 over no time, and where a count was set back.
func perSecond(is, was uint64, seconds float64) float64 {
	if seconds <= 0 || is < was {
		return 0
	}
	return float64(is-was) / seconds
}

func (t *track) rates(count func(*sample) uint64) Rates {
	is := t.back(0)
	over := func(n int) float64 {
		was := t.back(n)
		return perSecond(count(is), count(was), is.at.Sub(was.at).Seconds())
	}
	return Rates{S1: over(1), S10: over(10), S60: over(60)}
}

// quantiles tells where the median and the 99th percentile lie of what was counted between
// was and is, in the middle of where they may lie within their classes. Of a class that
// reaches beyond most, the longest wait there should be, the rest does not count: or else
// what waited 100 ms of at most 100 ms would seem to have waited 250.
func quantiles(is, was *[len(shaper.HistogramBounds) + 1]uint64, most float64) Delay {
	var counts [len(shaper.HistogramBounds) + 1]uint64
	var d Delay
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
			if from <= most {
				to = min(to, most)
			}
			return from + (to-from)*(rank-(seen-float64(n)))/float64(n)
		}
		return 0
	}
	d.P50, d.P99 = at(0.5), at(0.99)
	return d
}

// From where on a delay is worth a word. Shaping delays a little wherever two packets come
// at once. A flow that a limit slows down waits for each packet, and for none of them long.
const (
	noticeableShare = 0.05
	noticeableDelay = 10 * time.Millisecond
)

// measure fills in what the monitor knows of limit i of p.
func (m *Monitor) measure(to *Limit, p *shaper.Policy, i int) {
	state := p.State(i)
	to.InFlight, to.Waiting = state.InFlight.Load(), state.Waiting.Load()
	to.Refused, to.RefusedRate = map[string]uint64{}, map[string]float64{}
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.tracks[state]
	if t == nil { // it is new
		to.Promise.Kept = true
		return
	}
	is, was := t.back(0), t.back(10)
	to.Bytes = t.rates(func(s *sample) uint64 { return s.bytes })
	to.PacketsRate = t.rates(func(s *sample) uint64 { return s.packets })
	to.Admitted = t.rates(func(s *sample) uint64 { return s.conns })
	to.BytesTotal, to.PacketsTotal, to.AdmittedTotal = is.bytes, is.packets, is.conns
	if n := is.bytes - was.bytes; n > 0 {
		to.DelayedShare = float64(is.delayed-was.delayed) / float64(n)
	}
	to.QueueDelay = quantiles(&is.queue, &t.back(window).queue, longestQueue(p.Limit(i)))
	to.ConnectionWait = quantiles(&is.wait, &t.back(window).wait, to.MaxWait)
	to.Slows = to.Waiting > 0 || to.DelayedShare >= noticeableShare ||
		to.DelayedShare > 0 && to.QueueDelay.P99 >= noticeableDelay.Seconds()
	seconds := is.at.Sub(was.at).Seconds()
	for r, n := range is.refused {
		if n > 0 {
			to.Refused[shaper.Reason(r).String()] = n
			to.RefusedRate[shaper.Reason(r).String()] = perSecond(n, was.refused[r], seconds)
		}
	}
	to.Promise = t.promise()
}

func (t *track) promise() Promise {
	is, was := t.back(0), t.back(window)
	p := Promise{
		Kept: is.violations == was.violations, SigmaMost: t.most, Allowed: is.allowed,
		Violations: is.violations, InPackets: t.packets,
	}
	for i := range t.samples {
		p.Sigma = max(p.Sigma, t.samples[i].sigma)
	}
	return p
}

// promiseOf returns how a limit keeps its promise, false before it was looked at.
func (m *Monitor) promiseOf(s *shaper.State) (Promise, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.tracks[s]
	if t == nil {
		return Promise{}, false
	}
	return t.promise(), true
}

// history returns what charts begin with.
func (m *Monitor) history() History {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := History{Times: append([]time.Time{}, m.times...), Limits: map[string]LimitHistory{}}
	for state, t := range m.tracks {
		h.Limits[state.Name] = LimitHistory{
			Rate: padded(t.series.Rate, len(h.Times)), Packets: padded(t.series.Packets, len(h.Times)),
			Admitted: padded(t.series.Admitted, len(h.Times)), P99: padded(t.series.P99, len(h.Times)), InFlight: padded(t.series.InFlight, len(h.Times)),
			Waiting: padded(t.series.Waiting, len(h.Times)), Refused: padded(t.series.Refused, len(h.Times)),
		}
	}
	return h
}

// padded returns s with zeros before it, as long as n: the limit was not there yet.
func padded[T any](s []T, n int) []T {
	return append(make([]T, max(0, n-len(s)), n), s...)
}

// sampled returns a channel that is closed with the next sample, or at the end.
func (m *Monitor) sampled() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.next
}

// ended reports whether the monitor has.
func (m *Monitor) ended() bool {
	select {
	case <-m.done:
		return true
	default:
		return false
	}
}
