package adaptive

import (
	"math"

	"shaperd.dev/shaperd/leaky"
)

// climb begins to multiply the limit.
func (c *Controller) climb(factor float64, now leaky.Time) {
	c.phase, c.factor, c.before, c.n, c.run, c.rest = climbing, factor, trial{}, 0, 0, 0
	c.begin(now)
}

// climbOn goes on as long as more in flight pays.
func (c *Controller) climbOn(t trial, now leaky.Time) {
	if from := c.before; from.inFlight > 0 {
		if t.inFlight < 1.1*from.inFlight {
			c.settle(t.inFlight, Demand, now)
			return
		}
		if e := math.Log(t.throughput/from.throughput) / math.Log(t.inFlight/from.inFlight); e < 0.5 {
			// A slope meets a plateau there.
			c.settle(from.inFlight*math.Pow(t.inFlight/from.inFlight, min(max(e, 0), 1)), MoreCostsNothing, now)
			return
		}
	}
	if c.right >= c.max || c.isSlow(t) {
		c.settle(min(t.inFlight, c.right), Slow, now)
		return
	}
	c.before = t
	c.move(max(t.inFlight, c.right)*c.factor, MorePays, now)
}

// descend halves the limit, which gave from.
func (c *Controller) descend(from trial, why Reason, now leaky.Time) {
	c.phase, c.n, c.run, c.rest = descending, 0, 0, 0
	c.before = from
	c.move(from.inFlight/2, why, now)
	c.begin(now)
}

// descendOn goes on as long as less in flight costs nothing.
func (c *Controller) descendOn(t trial, now leaky.Time) {
	from := c.before
	if t.inFlight > 0.9*from.inFlight {
		c.settle(t.inFlight, LessCosts, now)
		return
	}
	if e := math.Log(from.throughput/t.throughput) / math.Log(from.inFlight/t.inFlight); e > elasticity {
		c.settle(t.inFlight*min(max(from.throughput/t.throughput, 1), from.inFlight/t.inFlight), LessCosts, now)
		return
	}
	if t.inFlight < 4 {
		c.settle(t.inFlight, LessCostsNothing, now)
		return
	}
	c.before = t
	c.move(t.inFlight/2, LessCostsNothing, now)
}

// settle goes back to comparing, around limit.
func (c *Controller) settle(limit float64, why Reason, now leaky.Time) {
	c.move(limit, why, now)
	c.phase, c.before, c.n, c.run = comparing, trial{}, 0, 0
	c.estimate.mean, c.estimate.variance = elasticity, 0.15
}
