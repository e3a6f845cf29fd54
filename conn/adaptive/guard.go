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

// guard halves the limit at once when throughput falls by a third, for a trial: it goes on if that costs nothing, and back
// if it does. A server that works on for clients that have left is seen by this alone: what it has to do is more than the
// limit counts.
type guard struct {
	began sums
	bad   int // windows in a row
}

// checkFall reports whether it has begun a descent.
func (c *Controller) checkFall(now leaky.Time) bool {
	g := &c.guard
	if c.now.throughput == 0 || c.phase == climbing || c.phase == descending {
		*g = guard{began: c.sums}
		return false
	}
	d := c.since(g.began)
	if d.full < max(0.25, 2*c.now.holding(), seconds(c.lag)) {
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
	default:
		g.bad = 0
	}
	if g.bad < 3 {
		return false
	}
	*g = guard{began: c.sums}
	c.descend(trial{inFlight: inFlight, throughput: max(d.fullAnswers/d.full, 1e-9)}, Fall, now)
	return true
}

// cut moves the limit, and compares again from there.
func (c *Controller) cut(to float64, why Reason, now leaky.Time) {
	c.move(to, why, now)
	c.phase, c.before, c.n, c.run, c.rest = comparing, trial{}, 0, 0, 0
	c.estimate.variance = max(c.estimate.variance, 0.25)
	c.begin(now)
}

// ceiling bounds the limit for a time after connections have failed.
type ceiling struct {
	limit    float64
	end      leaky.Time
	length   float64    // seconds of the last one
	before   float64    // the limit before the first cut
	ratio    float64    // of failures at the first cut
	futileTo leaky.Time // up to then failures are known to have another cause than the limit
}

// checkFailures reports whether it has moved the limit, because a tenth and more of the connections fail. When nothing is
// answered the server is down, which is the business of a circuit breaker. When about half does not help, the limit goes
// back: they fail for another reason.
func (c *Controller) checkFailures(now leaky.Time) bool {
	l := &c.ceiling
	if c.settling || now < l.futileTo {
		return false
	}
	d := c.since(c.began)
	ratio := d.failures / max(d.failures+d.answers, 1)
	again := now < l.end
	if d.failures < 5 || again && d.failures < 20 || ratio < 0.1 || d.answers == 0 {
		return false
	}
	switch {
	case again && float64(c.limit) <= max(c.min, 0.55*l.before) && ratio > 0.7*l.ratio:
		l.end, l.futileTo = now, now+ticks(10*l.length)
		c.cut(l.before, Futile, now)
		return true
	case again:
	case l.length == 0 || now > l.end+120*leaky.Second:
		l.length, l.before, l.ratio = 30, c.right, ratio
	default:
		l.length, l.before, l.ratio = min(2*l.length, 600), c.right, ratio
	}
	l.limit, l.end = max(c.min, 0.8*float64(c.limit)), now+ticks(l.length)
	c.cut(l.limit, Failures, now)
	return true
}

// crowd looks for a server that has become slow, or was never tried with fewer, while nobody waits at the gate, since all the
// clients there are have been let in. That says nothing yet of how many it bears: half of them are let in for a trial.
type crowd struct {
	began   sums
	best    least   // mean latency of windows
	latency float64 // seconds, when that last cost throughput
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
	w.latency *= 1 - t/36000 // it is forgotten
	inFlight := d.allInFlight / t
	latency := d.latency / max(d.answers, 1)
	if d.answers >= minAnswers {
		w.best.add(latency, now)
	}
	if d.full > t/20 || d.answers < minAnswers || inFlight < 4 || inFlight < 2*c.min || c.phase == descending || now < w.next {
		return false
	}
	fewerTried := c.fewest > 0 && c.fewest < 0.6*inFlight
	if best, _ := w.best.get(now); fewerTried && (latency < 2*best || latency < 1.5*w.latency) {
		return false
	}
	w.latency, w.next = latency, now+10*leaky.Second
	c.descend(trial{inFlight: inFlight, throughput: d.answers / t, latency: latency}, Crowd, now)
	return true
}

// silence is for how many seconds nothing must have been answered while the gate was full, for the limit to grow.
const silence = 10

// checkSilence raises the limit when all places may be taken by connections that ask nothing: then nothing else could
// ever be learned. It reports whether it has.
func (c *Controller) checkSilence(now leaky.Time) bool {
	if d := c.since(c.quiet); c.waiting == 0 || d.answers > 0 || d.left > 0 || d.failures > 0 || c.quiet.at == 0 {
		c.quiet = c.sums
		return false
	}
	if now < c.quiet.at+silence*leaky.Second || c.right >= c.max {
		return false
	}
	c.quiet = c.sums
	c.move(max(1.5*c.right, c.right+1), Silence, now)
	c.phase, c.n, c.run = comparing, 0, 0
	c.begin(now)
	return true
}

// least is the least of the values of the last ten to twenty minutes.
type least struct {
	value, before float64    // of these ten minutes, and of those before; 0 without any
	end           leaky.Time // of these ten minutes
}

func (l *least) add(x float64, now leaky.Time) {
	l.turn(now)
	if l.value == 0 || x < l.value {
		l.value = x
	}
}

func (l *least) get(now leaky.Time) (x float64, known bool) {
	l.turn(now)
	x = l.value
	if x == 0 || l.before > 0 && l.before < x {
		x = l.before
	}
	return x, x > 0
}

func (l *least) turn(now leaky.Time) {
	const length = 600 * leaky.Second
	switch {
	case now < l.end:
	case now < l.end+length:
		l.before, l.value, l.end = l.value, 0, l.end+length
	default:
		*l = least{end: now + length}
	}
}
