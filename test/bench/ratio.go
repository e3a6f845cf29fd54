package main

import (
	"math"
	"strconv"
)

// agreement is the factor within which the ratios of two runs are to agree.
const agreement = 1.15

// noise is the factor that the medians of two runs like this one stay within in 19 of
// 20 cases, judged by ratios of its repetitions. Logarithms of ratios are taken for
// normal, so the standard error of a median of n is their deviation times sqrt(pi/2n);
// a difference of two has sqrt(2) of it, and 19 of 20 lie within twice that. More
// repetitions make it smaller, which a range would not be. One repetition tells
// nothing of it: NaN.
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

// noisy says that two runs may well disagree. With a zero among the repetitions of one
// of two programs nothing bounds it.
func (r ratio) noisy() bool {
	return r.noise > agreement || math.IsNaN(r.noise) && r.least != r.most
}

// A verdict is what a ratio says, in words for those who see no colour.
type verdict struct{ Mark, Word string }

var (
	ahead  = verdict{"▲", "better"}
	behind = verdict{"▼", "worse"}
	even   = verdict{"=", "even"}
)

// nearlyOne is the factor within which two programs do the same.
const nearlyOne = 1.05

func (r ratio) verdict() verdict {
	switch {
	case r.value > nearlyOne:
		return ahead
	case r.value < 1/nearlyOne:
		return behind
	}
	return even
}

// verdict on a program: there is none on what is no peer.
func (o *outcome) verdict(r ratio) verdict {
	if !o.Peer {
		return verdict{}
	}
	return r.verdict()
}

// String is the ratio to two or three digits, with a ~ when it is noisy.
func (r ratio) String() string {
	text := ""
	switch {
	case math.IsInf(r.value, 0):
		text = "∞"
	case r.value >= 1000:
		text = grouped(int(r.value + 0.5))
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
