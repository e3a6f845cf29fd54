// Owner: the loop's thread; any goroutine may read it.

package conn

import (
	"sync/atomic"
	"time"

	"shaperd.dev/shaperd/leaky"
)

// decisionBounds are the upper bounds of the histogram of decisionTimes.
var decisionBounds = [...]time.Duration{
	time.Microsecond, 2 * time.Microsecond, 5 * time.Microsecond,
	10 * time.Microsecond, 20 * time.Microsecond, 50 * time.Microsecond,
	100 * time.Microsecond, 200 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 5 * time.Millisecond,
}

// decisionSample is of how many decisions one is timed: reading the clock takes a part of what a decision takes.
const decisionSample = 16

// decisionTimes are how long sampled decisions on new connections and UDP flows took: their classification and their gates.
type decisionTimes struct {
	n      uint64 // decisions
	counts [len(decisionBounds) + 1]atomic.Uint64
	sum    atomic.Uint64 // ns
}

// time calls decide, and times it if it is the turn of that.
func (d *decisionTimes) time(clock func() leaky.Time, decide func()) {
	if d.n++; d.n%decisionSample != 0 {
		decide()
		return
	}
	begin := clock()
	decide()
	took := clock().Sub(begin).Duration()
	i := 0
	for i < len(decisionBounds) && took > decisionBounds[i] {
		i++
	}
	d.counts[i].Add(1)
	d.sum.Add(uint64(took))
}

// DecisionTimes returns how long decisions on new connections and UDP flows took, of one in 16 of them: how many by upper bounds, the
// last one beyond all, and the sum. It may be called from any goroutine.
func (p *Proxy) DecisionTimes() (bounds []time.Duration, counts []uint64, sum time.Duration) {
	counts = make([]uint64, len(decisionBounds)+1)
	p.moving.RLock()
	defer p.moving.RUnlock()
	for _, w := range p.workers {
		d := &w.admission.decisions
		for i := range d.counts {
			counts[i] += d.counts[i].Load()
		}
		sum += time.Duration(d.sum.Load())
	}
	return decisionBounds[:], counts, sum
}

// absorb adds what o has counted.
func (d *decisionTimes) absorb(o *decisionTimes) {
	for i := range d.counts {
		d.counts[i].Add(o.counts[i].Load())
	}
	d.sum.Add(o.sum.Load())
}
