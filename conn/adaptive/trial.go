package adaptive

import (
	"math"

	"shaperd.dev/shaperd/leaky"
)

// trial is what one limit has given while the gate was full.
type trial struct {
	inFlight   float64 // mean
	throughput float64 // answers a second
	latency    float64 // mean seconds
	error      float64 // of throughput, relative standard deviation
	mid        float64 // instant in seconds
	demand     float64 // part of the time in which the gate was full
}

// newTrial returns what d says, which began at.
func newTrial(d sums, at leaky.Time) trial {
	return trial{
		inFlight: d.fullInFlight / d.full, throughput: d.fullAnswers / d.full, latency: d.fullLatency / max(d.fullAnswers, 1),
		mid: (seconds(at) + seconds(d.at)) / 2, demand: d.full / seconds(d.at-at),
	}
}

// holding returns how many seconds a place is taken for each answer (Little's law), or 0 when that is not known. It is
// bounded: after an outage that was long, what is to be waited for is not that.
func (t trial) holding() float64 {
	if t.throughput == 0 {
		return 0
	}
	return min(t.inFlight/t.throughput, maxTrial)
}

// elasticityOf returns the elasticity of throughput that three trials show, of which the first and the last were at one
// limit, with its variance.
func elasticityOf(t [3]trial) (x, variance float64, ok bool) {
	a, b, c := t[0], t[1], t[2]
	f := (b.mid - a.mid) / (c.mid - a.mid) // what the limit of a and c would have given at b's time
	dn := math.Log(b.inFlight) - (1-f)*math.Log(a.inFlight) - f*math.Log(c.inFlight)
	dx := math.Log(b.throughput) - (1-f)*math.Log(a.throughput) - f*math.Log(c.throughput)
	if math.Abs(dn) < 0.03 || math.IsNaN(dn) {
		return 0, 0, false
	}
	// Each trial is in three comparisons, whose errors go together.
	return dx / dn, 4 * (square(a.error) + square(b.error) + square(c.error)) / 3 / square(dn), true
}

// estimate is a Kalman filter of one number, which measures how noisy its observations are.
type estimate struct {
	mean, variance float64
	noise          float64 // of observations, as a multiple of the variance that they claim
	surprises      int     // in a row, negative below
}

var unknown = estimate{mean: 0.6, variance: 0.25, noise: 1}

// update takes an observation of the variance it claims. The trials it comes from have a relative error.
func (e *estimate) update(x, variance, error float64) {
	e.variance += square(0.04) * min(1, square(0.04/max(error, 0.001))) // it may change over so many answers
	total := e.variance + e.noise*variance
	off := x - e.mean
	switch sd := math.Sqrt(total); {
	case off > 2.5*sd:
		e.surprises = max(e.surprises, 0) + 1
	case off < -2.5*sd:
		e.surprises = min(e.surprises, 0) - 1
	default:
		e.surprises = 0
	}
	if e.surprises >= 2 || e.surprises <= -2 { // it has changed
		e.variance = max(e.variance, 0.2)
		total = e.variance + e.noise*variance
		e.surprises = 0
	}
	e.noise = min(max(e.noise+0.05*(1.5*off*off/(e.variance+variance)-e.noise), 0.3), 20)
	off = min(max(off, -3*math.Sqrt(total)), 3*math.Sqrt(total))
	gain := e.variance / total
	e.mean = min(max(e.mean+gain*off, -2), 1.2)
	e.variance *= 1 - gain
}
