package main

import (
	"math"
	"strconv"

	"shaperd.dev/shaperd/test/lab/plot"
)

// agreement is the factor within which the ratios of two runs must agree.
const agreement = 1.15

// noise returns the factor within which the medians of two such runs agree in 19 of 20
// cases, estimated from the ratios of the repetitions. The logarithms of the ratios are
// assumed to be normal, so the standard error of a median of n is their deviation times
// sqrt(pi/2n); the difference of two medians has sqrt(2) times that, and 19 of 20 are
// within twice the result. Unlike a range, it shrinks with more repetitions. For a single
// repetition it is unknown: NaN.
func noise(ratios []float64) float64 {
	n := float64(len(ratios))
	if n < 2 {
		return math.NaN()
	}
	var mean, squares float64
	for _, x := range ratios {
		mean += math.Log(x) / n
	}
	for _, x := range ratios {
		squares += (math.Log(x) - mean) * (math.Log(x) - mean)
	}
	deviation := math.Sqrt(squares / (n - 1))
	return math.Exp(2 * math.Sqrt2 * math.Sqrt(math.Pi/2/n) * deviation)
}

// noisy reports whether two runs may well disagree. A zero among the repetitions of one
// of the two programs makes the noise unbounded.
func (r ratio) noisy() bool {
	return r.noise > agreement || math.IsNaN(r.noise) && r.min != r.max
}

// A verdict is the meaning of a ratio, with a word so that it does not depend on color.
type verdict struct{ Mark, Word string }

var (
	ahead  = verdict{"▲", "better"}
	behind = verdict{"▼", "worse"}
	even   = verdict{"=", "even"}
)

// evenRatio is the factor within which two programs count as even.
const evenRatio = 1.05

func (r ratio) verdict() verdict {
	switch {
	case r.value > evenRatio:
		return ahead
	case r.value < 1/evenRatio:
		return behind
	}
	return even
}

// verdict returns the verdict on a ratio to a program. It is empty if the program is not a peer.
func (o *outcome) verdict(r ratio) verdict {
	if !o.Peer {
		return verdict{}
	}
	return r.verdict()
}

// String returns the ratio with two or three digits, with a ~ if it is noisy.
func (r ratio) String() string {
	text := ""
	switch {
	case math.IsInf(r.value, 0):
		text = "∞"
	case r.value >= 1000:
		text = plot.Grouped(int(r.value + 0.5))
	case r.value >= 10:
		text = strconv.FormatFloat(r.value, 'f', 0, 64)
	case r.value >= 0.1:
		text = strconv.FormatFloat(r.value, 'f', 2, 64)
	default:
		text = strconv.FormatFloat(r.value, 'g', 2, 64)
	}
	if r.noisy() {
		return "~" + text
	}
	return text
}
