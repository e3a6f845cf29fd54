package adaptive

import (
	"math"

	"shaperd.dev/shaperd/leaky"
)

const (
	elasticity = 0.1   // at the limit that is aimed at
	apart      = 0.125 // the two limits that are compared are this part below and above the one held for right
	minTrial   = 0.5   // seconds
	maxTrial   = 10    // seconds, once minAnswers have come
	precision  = 0.07  // of the throughput of a trial, relative
	minAnswers = 30    // in a trial
	maxAnswers = 4000
	maxRest    = 30   // seconds between comparisons
	maxStep    = 0.35 // of the limit, as a logarithm
	pressure   = 0.25 // part of the time in which somebody must wait, for the limit to grow
	slow       = 4    // the limit does not grow while answers take so many times what they recently took at best
	forgetting = 60   // seconds without demand after which what is known is old
)

// Controller moves the limit of one gate. It is not safe for concurrent use.
type Controller struct {
	Load
	min, max float64

	limit int     // current
	right float64 // the limit held for right, between those that are compared

	phase    phase
	above    bool     // comparing: the higher limit is the current one
	factor   float64  // climbing
	before   trial    // climbing, descending: the trial before
	trials   [3]trial // comparing: the last ones
	n        int      // valid in trials
	estimate estimate
	run      int // steps in one direction, negative down

	began     sums // of the trial that runs
	settling  bool // the trial has not begun
	settledAt leaky.Time
	lag       leaky.Time // until the effect of a limit is known, besides what it takes to show
	grain     float64    // the least change of the limit that has an effect
	variation float64    // coefficient of variation of latency
	now       trial      // moving average of what is observed
	fewest    float64    // in flight in any trial; 0 before the first

	rest    float64 // seconds of the last rest
	restEnd leaky.Time
	stir    stir
	guard   guard
	ceiling ceiling
	crowd   crowd
	quiet   sums  // when something was last answered, or nobody waited
	best    least // mean latency of trials

	fullAt  leaky.Time // when somebody last waited
	changes []Change   // the last ones
}

type phase uint8

const (
	climbing   phase = iota // multiplies the limit as long as that pays
	descending              // halves it as long as that costs nothing
	comparing
	resting
)

// Change is a change of the limit that is held for right. History keeps 16.
type Change struct {
	From, To int
	Reason   Reason
	At       leaky.Time
}

const maxChanges = 16

// New returns a controller whose limit is between least and most, both at least 1. It begins low, but not below what is
// in flight.
func New(least, most, inFlight int, now leaky.Time) *Controller {
	c := &Controller{min: float64(least), max: float64(most), factor: 2, variation: 1, estimate: unknown, grain: 1}
	c.at, c.fullAt = now, now
	c.right = min(max(c.min, 4, float64(inFlight)), c.max)
	c.begin(now)
	return c
}

// resume goes on from a limit that was found before.
func (c *Controller) resume(limit int, now leaky.Time) {
	c.settle(float64(limit), Resumed, now)
	c.begin(now)
}

// restart discards what was measured, of which a part is missing, and starts comparing again at the present limit. A descent
// ends where it began.
func (c *Controller) restart(now leaky.Time) {
	if c.phase == descending {
		c.move(float64(c.Middle()), Resumed, now)
	}
	c.n, c.run, c.before, c.now = 0, 0, trial{}, trial{}
	c.stir, c.guard, c.crowd.began, c.quiet = stir{}, guard{began: c.sums}, c.sums, c.sums
	if c.phase != resting {
		c.phase = comparing
	}
	c.begin(now)
}

// Bound changes the least and the most. The limit stays where it can.
func (c *Controller) Bound(least, most int, now leaky.Time) {
	if float64(least) == c.min && float64(most) == c.max {
		return
	}
	c.min, c.max = float64(least), float64(most)
	c.move(c.right, Bounds, now)
	c.begin(now)
}

// Limit is how many may be in flight now.
func (c *Controller) Limit() int { return c.limit }

// Middle is the limit that is held for right: the middle of the two that are compared, or that from which a descent began.
func (c *Controller) Middle() int {
	if c.phase == descending {
		return int(math.Round(min(max(c.before.inFlight, c.right), c.max)))
	}
	return int(math.Round(c.right))
}

// Most is the higher of the two limits that are compared: more are not in flight, but those that were let in before.
func (c *Controller) Most() int {
	_, high := c.compared()
	return max(c.limit, c.bound(high, c.at))
}

// History returns the last changes of the middle, the newest last. It must not be modified.
func (c *Controller) History() []Change { return c.changes }

// Throughput returns the answers a second while the gate was full, or 0 when that is not known.
func (c *Controller) Throughput() float64 { return c.now.throughput }

// move sets the limit that is held for right.
func (c *Controller) move(to float64, why Reason, now leaky.Time) {
	if math.IsNaN(to) {
		return
	}
	from := c.right
	c.right = min(max(to, c.min), c.max)
	if a, b := int(math.Round(from)), int(math.Round(c.right)); a != b {
		c.changes = append(c.changes[max(0, len(c.changes)-maxChanges+1):], Change{From: a, To: b, Reason: why, At: now})
	}
}

// begin makes the limit of the phase the current one. A trial of it begins when its effect shows.
func (c *Controller) begin(now leaky.Time) {
	low, high := c.compared()
	switch {
	case c.phase != comparing:
		c.limit = c.bound(c.right, now)
	case c.above:
		c.limit = c.bound(high, now)
	default:
		c.limit = c.bound(low, now)
	}
	c.settling, c.settledAt = true, now+ticks(max(2*c.now.holding(), 0.02))+c.lag
}

// compared returns the two limits that are compared.
func (c *Controller) compared() (low, high float64) {
	low, high = math.Round(c.right/(1+apart)), math.Round(c.right*(1+apart))
	if low >= c.grain {
		low, high = low-math.Mod(low, c.grain), math.Ceil(high/c.grain)*c.grain
	}
	low = max(c.min, low)
	return low, max(low+1, high)
}

// bound returns a limit within the bounds.
func (c *Controller) bound(limit float64, now leaky.Time) int {
	if now < c.ceiling.end {
		limit = min(limit, c.ceiling.limit)
	}
	return int(min(max(math.Round(limit), c.min), c.max))
}

// Step moves the limit if there is reason to. It is to be called some ten times a second while the gate is in use.
func (c *Controller) Step(now leaky.Time) {
	c.advance(now)
	switch {
	case c.waiting > 0:
		c.fullAt = now
	case now > c.fullAt+forgetting*leaky.Second:
		c.estimate.variance = max(c.estimate.variance, 0.1)
	}
	if c.checkFailures(now) || c.checkFall(now) || c.checkCrowd(now) || c.checkSilence(now) {
		return
	}
	if c.phase == resting {
		up, stirred := c.stir.check(c, now)
		switch {
		case stirred && up:
			c.climb(1.5, now)
		case stirred || now >= c.restEnd:
			c.phase, c.n = comparing, 0
			c.estimate.variance = max(c.estimate.variance, 0.02)
			c.begin(now)
		}
		return
	}
	if t, ok := c.trial(now); ok {
		c.observe(t)
		switch c.phase {
		case climbing:
			c.climbOn(t, now)
		case descending:
			c.descendOn(t, now)
		case comparing:
			c.compare(t, now)
		}
		c.begin(now)
	}
}

// trial returns what the current limit has given, once that is known well enough.
func (c *Controller) trial(now leaky.Time) (t trial, ok bool) {
	if c.settling {
		// Connections that were let in under a higher limit end in their own time.
		if now < c.settledAt || c.inFlight > c.limit && now < c.settledAt+10*leaky.Second {
			return t, false
		}
		c.settling, c.began = false, c.sums
		return t, false
	}
	d := c.since(c.began)
	if d.fullAnswers < 1 || d.full <= 0 {
		return t, false
	}
	t = newTrial(d, c.began.at)
	want := precision
	if c.phase != comparing {
		want = 0.08
	}
	need := min(max(square(c.variation/want), minAnswers), maxAnswers)
	if d.full < max(2*t.holding(), minTrial, 3*seconds(c.lag)) || d.fullAnswers < need && d.full < maxTrial {
		return t, false
	}
	if d.fullAnswers > 10 {
		mean := max(t.latency, 1e-9)
		c.variation += 0.3 * (min(max(math.Sqrt(max(0, d.fullLatency2/d.fullAnswers-mean*mean))/mean, 0.1), 4) - c.variation)
	}
	t.error = c.variation / math.Sqrt(d.fullAnswers)
	return t, true
}

// observe keeps what throughput is to be expected.
func (c *Controller) observe(t trial) {
	weight := 0.3
	if c.now.throughput == 0 || c.phase != comparing {
		weight = 1
	}
	c.now.throughput += weight * (t.throughput - c.now.throughput)
	c.now.inFlight += weight * (t.inFlight - c.now.inFlight)
	c.now.latency = t.latency
	c.best.add(t.latency, c.at)
	if c.fewest == 0 || t.inFlight < c.fewest {
		c.fewest = t.inFlight
	}
}

// compare compares t with the two trials before, which were at the other limit and at the same: a trend cancels.
func (c *Controller) compare(t trial, now leaky.Time) {
	c.above = !c.above
	if c.n == len(c.trials) {
		copy(c.trials[:], c.trials[1:])
		c.n--
	}
	c.trials[c.n] = t
	c.n++
	if c.n < len(c.trials) {
		return
	}
	x, variance, ok := elasticityOf(c.trials)
	if !ok {
		return
	}
	c.estimate.update(x, variance, t.error)

	off := c.estimate.mean - elasticity
	sd := math.Sqrt(c.estimate.variance)
	switch {
	case off > 0 && t.demand < pressure:
		return // too little is asked for to tell, and none is needed
	case off > 0 && c.isSlow(t):
		// Others may want the same, and what more in flight gets is theirs.
		c.rest, c.run = 0, 0
		return
	case math.Abs(off) < 1.5*sd:
		if off > -0.06 && off < 0.1 && sd < 0.12 {
			c.rest = min(max(2*c.rest, 1), maxRest)
			c.restEnd = now + ticks(c.rest)
			c.phase, c.run, c.stir = resting, 0, stir{}
		}
		return
	}
	c.rest = 0
	if off > 0 {
		c.run = max(c.run, 0) + 1
	} else {
		c.run = min(c.run, 0) - 1
	}
	switch {
	case c.run >= 2 && c.estimate.mean-1.5*sd > 0.4:
		c.before = t
		c.phase, c.factor = climbing, 1.5
		c.move(t.inFlight*c.factor, MorePays, now)
		return
	case c.run <= -2 && c.estimate.mean+2*sd < elasticity && t.inFlight >= 4:
		c.descend(t, LessCostsNothing, now)
		return
	}
	step := 0.5 * off
	if n := math.Abs(float64(c.run)); n > 2 {
		step *= min(1+(n-2)/2, 3)
	}
	step = min(max(step, -maxStep), maxStep)
	if math.Abs(step)*c.right < c.grain/2 {
		step = math.Copysign(c.grain/2/c.right, step)
	}
	c.estimate.variance += min(9*step*step, 0.25)
	if math.Abs(step) > 0.1 { // the trials before are of other limits
		c.trials[0], c.n = c.trials[2], 1
	}
	why := MorePays
	if step < 0 {
		why = LessCostsNothing
	}
	c.move(c.right*math.Exp(step), why, now)
}

// isSlow reports whether answers take much longer than they recently did at best.
func (c *Controller) isSlow(t trial) bool {
	best, known := c.best.get(c.at)
	return known && t.latency > slow*best
}

func square(x float64) float64 { return x * x }
