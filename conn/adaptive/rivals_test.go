package adaptive

import (
	"math"
	"math/rand/v2"
)

// Controllers of others, written from their descriptions, to compare with. All take a latency for the unloaded one.

const highest = 1000

// windowed averages over a second and ten answers at least, as Netflix' WindowedLimit does.
type windowed struct {
	sum     float64
	n, most int
	dropped bool
	next    float64
	limit   float64
}

func (w *windowed) Limit() int            { return int(min(max(w.limit, 1), highest)) }
func (w *windowed) set(int, int, float64) {}
func (w *windowed) step(float64)          {}

func (w *windowed) add(took float64, inFlight int, how outcome, now float64) (mean float64, most int, dropped, due bool) {
	w.sum += took
	w.n++
	w.most = max(w.most, inFlight)
	w.dropped = w.dropped || how == failed
	if now < w.next || w.n < 10 {
		return 0, 0, false, false
	}
	mean, most, dropped = w.sum/float64(w.n), w.most, w.dropped
	*w = windowed{next: now + 1, limit: w.limit}
	return mean, most, dropped, true
}

// aimd grows by one while latency is below a target that it was told, and falls by a tenth.
type aimd struct {
	windowed
	target float64
}

func (a *aimd) end(took float64, inFlight int, how outcome, now float64) {
	mean, most, dropped, due := a.add(took, inFlight, how, now)
	switch {
	case !due:
	case dropped || mean > a.target:
		a.limit = max(1, math.Floor(0.9*a.limit))
	case 2*most >= a.Limit():
		a.limit = min(a.limit+1, highest)
	}
}

// vegas keeps a few requests in the server's queue, which it estimates from the least latency (TCP Vegas; Netflix'
// VegasLimit).
type vegas struct {
	windowed
	base   float64
	count  int
	jitter float64
	rng    *rand.Rand
}

func (v *vegas) end(took float64, inFlight int, how outcome, now float64) {
	mean, most, dropped, due := v.add(took, inFlight, how, now)
	if !due {
		return
	}
	if v.count++; v.jitter*30*v.limit <= float64(v.count) { // measure the base again
		v.jitter, v.count, v.base = 0.5+0.5*v.rng.Float64(), 0, mean
		return
	}
	if v.base == 0 || mean < v.base {
		v.base = mean
		return
	}
	inQueue := math.Ceil(v.limit * (1 - v.base/mean))
	unit := max(1, math.Floor(math.Log10(v.limit)))
	switch {
	case dropped:
		v.limit -= unit
	case float64(2*most) < v.limit:
	case inQueue <= unit:
		v.limit += 6 * unit
	case inQueue < 3*unit:
		v.limit += unit
	case inQueue > 6*unit:
		v.limit -= unit
	}
	v.limit = min(max(v.limit, 1), highest)
}

// gradient2 divides a long average of latency by the present one (Netflix' Gradient2Limit).
type gradient2 struct {
	windowed
	long, sum float64
	n         int
}

func (g *gradient2) end(took float64, inFlight int, how outcome, now float64) {
	mean, most, _, due := g.add(took, inFlight, how, now)
	if !due {
		return
	}
	if g.n++; g.n <= 10 {
		g.sum += mean
		g.long = g.sum / float64(g.n)
	} else {
		g.long += (mean - g.long) * 2 / 601
	}
	if g.long > 2*mean {
		g.long *= 0.95
	}
	if float64(most) >= g.limit/2 {
		gradient := min(max(1.5*g.long/mean, 0.5), 1)
		g.limit = min(max(0.8*g.limit+0.2*(g.limit*gradient+4), 1), highest)
	}
}

// envoy measures the latency at a limit of three once a minute, and divides it by the present one (Envoy's adaptive
// concurrency filter, with its defaults).
type envoy struct {
	windowed
	base, kept, epoch float64
	probing           bool
	samples           []float64
	updateAt, probeAt float64
	atLeast           int
	rng               *rand.Rand
}

func (e *envoy) median() float64 {
	m := quantile(e.samples, 0.5)
	e.samples = e.samples[:0]
	return m
}

func (e *envoy) probe(now float64) {
	e.probing, e.kept, e.epoch, e.samples = true, e.limit, now, e.samples[:0]
	e.limit = min(e.limit, 3)
}

func (e *envoy) end(took float64, _ int, _ outcome, now float64) {
	if now-took < e.epoch {
		return
	}
	e.samples = append(e.samples, took)
	if e.probing && len(e.samples) >= 50 {
		e.base, e.limit, e.probing = e.median(), e.kept, false
		e.probeAt, e.updateAt = now+60*(1+0.15*e.rng.Float64()), now+0.1
	}
}

func (e *envoy) step(now float64) {
	switch {
	case e.probing:
	case now >= e.probeAt:
		e.probe(now)
	case now >= e.updateAt:
		e.updateAt = now + 0.1
		if len(e.samples) == 0 {
			return
		}
		l := e.limit * min(max(1.25*e.base/e.median(), 0.5), 2)
		l = min(max(math.Floor(l+math.Sqrt(l)), 3), highest)
		if l == 3 && e.limit == 3 {
			e.atLeast++
		} else {
			e.atLeast = 0
		}
		if e.limit = l; e.atLeast >= 5 {
			e.atLeast = 0
			e.probe(now)
		}
	}
}

// bbr is the most throughput times the least latency of the last ten seconds, with a cycle of gains and a drain (in the
// manner of TCP BBR).
type bbr struct {
	windowed
	rates, latencies [40]float64
	i, phase, flat   int
	next, last       float64
	answers, latency float64
	drainAt, drained float64
	full             float64
	running          bool
}

func (b *bbr) end(took float64, _ int, how outcome, _ float64) {
	if how == answered {
		b.answers++
		b.latency += took
	}
}

func (b *bbr) step(now float64) {
	if now < b.next || b.answers == 0 {
		return
	}
	b.rates[b.i], b.latencies[b.i] = b.answers/(now-b.last), b.latency/b.answers
	b.i = (b.i + 1) % len(b.rates)
	b.next, b.last, b.answers, b.latency = now+0.25, now, 0, 0
	rate, least := 0.0, math.Inf(1)
	for i, r := range b.rates {
		if r > 0 {
			rate, least = max(rate, r), min(least, b.latencies[i])
		}
	}
	switch product := rate * least; {
	case !b.running:
		if rate > 1.25*b.full {
			b.full, b.flat = rate, 0
		} else if b.flat++; b.flat == 3 {
			b.running, b.drainAt = true, now+10
		}
		b.limit = max(2*product, 4)
	case now < b.drained:
	case now >= b.drainAt:
		b.drainAt, b.drained = now+10, now+0.2
		b.limit = product / 2
	default:
		b.limit = product*[...]float64{1.25, 0.75, 1, 1, 1, 1, 1, 1}[b.phase%8] + 1
		b.phase++
	}
	b.limit = min(b.limit, highest)
}
