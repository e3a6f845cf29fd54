package conn

import (
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// ramp limits the rate of new connections for some time after none could pass. The rate grows by half at every step,
// until no connection has waited for it during a whole one. A server that has just started is cold, and fails again if
// all that wait come at once.
//
// The zero value lets all pass.
type ramp struct {
	interval leaky.Time // at least, between two connections; 0 is no ramp
	next     leaky.Time // when the next one may pass
	stepAt   leaky.Time // when the rate grows
	endAt    leaky.Time // not before
	waited   bool       // connections have waited for the rate since the last step
	passed   bool       // one has passed since then
}

const (
	rampStep = 3 * leaky.Second

	// maxRamp ends a ramp: connections at this interval come as fast as a loop accepts them.
	maxRamp = leaky.Second / 100_000
)

// begin begins a ramp, which takes at least some time.
func (r *ramp) begin(rate shaper.Frequency, least, now leaky.Time) {
	if *r = (ramp{}); rate.N == 0 {
		return
	}
	*r = ramp{interval: leaky.FromDuration(rate.Per) / leaky.Time(rate.N), next: now, stepAt: now + rampStep, endAt: now + least}
}

// open reports whether a connection may pass at now. One that may not must wait until next.
func (r *ramp) open(now leaky.Time) bool {
	if r.interval == 0 || now >= r.next {
		return true
	}
	r.waited = true
	return false
}

// pass records that a connection passes at now.
func (r *ramp) pass(now leaky.Time) { r.next, r.passed = now+r.interval, true }

// advance takes the steps that are due at now. waiting says that connections wait for the rate.
func (r *ramp) advance(waiting bool, now leaky.Time) {
	for r.interval > 0 && now >= r.stepAt {
		r.step(waiting)
	}
}

func (r *ramp) step(waiting bool) {
	if waiting && !r.passed && r.next <= r.stepAt { // the server has not shown yet that it bears this rate
		r.stepAt += rampStep
		return
	}
	r.passed = false
	faster := r.interval * 2 / 3
	if r.stepAt >= r.endAt && !r.waited && !waiting || faster < maxRamp {
		*r = ramp{}
		return
	}
	if left := r.next.Sub(r.stepAt); left > 0 { // what is left to wait takes less time from now on
		r.next = r.stepAt + left*2/3
	}
	r.interval, r.stepAt, r.waited = faster, r.stepAt+rampStep, waiting
}

// takes returns how long n connections that wait will take to pass from now on.
func (r *ramp) takes(n int, now leaky.Time) leaky.Time {
	sim, at := *r, now
	for n > 0 && sim.interval > 0 {
		if sim.open(at) {
			sim.pass(at)
			n--
			continue
		}
		at = max(at, min(sim.next, sim.stepAt))
		sim.advance(true, at)
	}
	return at - now
}
