package adaptive

import (
	"math"

	"shaperd.dev/shaperd/leaky"
)

// stir tells whether throughput is still what it was when a rest began.
type stir struct {
	began sums
	first float64 // throughput of the first window; 0 before it has ended
}

func (s *stir) check(c *Controller, now leaky.Time) (up, stirred bool) {
	if now < c.settledAt || s.began.at == 0 {
		s.began, s.first = c.sums, 0
		return false, false
	}
	d := c.since(s.began)
	if d.full < max(1, 2*c.now.holding()) || d.fullAnswers < square(c.variation/0.025) {
		return false, false
	}
	x := d.fullAnswers / d.full
	s.began = c.sums
	if s.first == 0 {
		s.first = x
		return false, false
	}
	change := math.Log(x / s.first)
	return change > 0, math.Abs(change) > max(0.06, 2.5*math.Sqrt2*c.variation/math.Sqrt(d.fullAnswers))
}

// guard cuts the limit at once when throughput falls by a third. If that was wrong, comparisons bring it back. A server
// that works on for clients that have left is seen by this alone: what it has to do is more than the limit counts.
type guard struct {
	began sums
	bad   int
	sum   float64 // over bad windows, of the part of throughput that was left
}

// checkFall reports whether it has cut the limit.
func (c *Controller) checkFall(now leaky.Time) bool {
	g := &c.guard
	if c.now.throughput == 0 || c.phase == climbing || c.phase == descending {
		*g = guard{began: c.sums}
		return false
	}
	d := c.since(g.began)
	if d.full < max(0.25, 2*c.now.holding()) {
		return false
	}
	inFlight := d.fullInFlight / d.full
	want := c.now.throughput * min(1, inFlight/c.now.inFlight) * d.full
	if want < 20 {
		return false
	}
	g.began = c.sums
	switch got := d.fullAnswers; {
	case got == 0 && d.left == 0: // it stands still
	case got < want/1.5 && want-got > 3*c.variation*math.Sqrt(want):
		g.bad++
		g.sum += got / want
	default:
		g.bad, g.sum = 0, 0
	}
	if g.bad < 3 {
		return false
	}
	left := g.sum / float64(g.bad)
	c.cut(max(0.5, left)*float64(c.limit), Fall, now)
	c.now.throughput *= left
	c.now.inFlight = float64(c.limit)
	*g = guard{began: c.sums}
	return true
}

// cut lowers the limit, and compares anew from there.
func (c *Controller) cut(to float64, why Reason, now leaky.Time) {
	c.move(to, why, now)
	c.phase, c.before, c.n, c.run, c.rest = comparing, trial{}, 0, 0, 0
	c.estimate.variance = max(c.estimate.variance, 0.25)
	c.begin(now)
}

// ceiling bounds the limit for a time after connections have failed.
type ceiling struct {
	limit  float64
	end    leaky.Time
	length float64 // seconds of the last one
}

// checkFailures reports whether it has cut the limit, because a tenth and more of the connections fail. When most fail the
// server is down, which is the business of a circuit breaker.
func (c *Controller) checkFailures(now leaky.Time) bool {
	if c.settling {
		return false
	}
	d := c.since(c.began)
	if d.failures < 5 || d.failures < 0.1*(d.failures+d.answers) || d.failures > d.answers {
		return false
	}
	l := &c.ceiling
	if l.length == 0 || now > l.end+120*leaky.Second {
		l.length = 30
	} else {
		l.length = min(2*l.length, 600)
	}
	l.limit, l.end = max(c.min, 0.8*float64(c.limit)), now+ticks(l.length)
	c.cut(l.limit, Failures, now)
	return true
}

// crowd looks for a server that has become slow while nobody waits at the gate, since all the clients there are have been
// let in. That it is slow says nothing yet of how many it bears: half of them are let in for a trial.
type crowd struct {
	began   sums
	latency float64 // seconds, of when that last cost throughput
	next    leaky.Time
}

// checkCrowd reports whether it has begun a descent.
func (c *Controller) checkCrowd(now leaky.Time) bool {
	w := &c.crowd
	d := c.since(w.began)
	t := seconds(now - w.began.at)
	if t < 2 || d.answers < minAnswers && t < maxTrial {
		return false
	}
	w.began = c.sums
	w.latency *= 1 - forgets*t
	inFlight := d.allInFlight / t
	if d.full > t/20 || d.answers < minAnswers || inFlight < 4 || inFlight < 2*c.min || c.phase == descending || now < w.next {
		return false
	}
	latency := d.latency / d.answers
	if c.best.latency == 0 || latency < 2*c.best.latency || latency < 1.5*w.latency {
		return false
	}
	w.latency, w.next = latency, now+10*leaky.Second
	c.phase, c.n, c.run, c.rest = descending, 0, 0, 0
	c.before = trial{inFlight: inFlight, throughput: d.answers / t, latency: latency}
	c.move(inFlight/2, Crowd, now)
	c.begin(now)
	return true
}

// forgets is the part of a latency that is forgotten each second: 10 % an hour.
const forgets = 0.1 / 3600

// best is the least mean latency, which is forgotten slowly.
type best struct {
	began   sums
	latency float64 // seconds; 0 when it is not known
}

func (b *best) update(now *sums) {
	d := now.since(b.began)
	t := seconds(now.at - b.began.at)
	if d.answers < 30 || t < 0.25 {
		return
	}
	b.latency *= 1 + forgets*t
	if mean := d.latency / d.answers; b.latency == 0 || mean < b.latency {
		b.latency = mean
	}
	b.began = *now
}
