package main

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestStat(t *testing.T) {
	for _, test := range []struct {
		samples             []float64
		median, least, most float64
	}{
		{[]float64{3}, 3, 3, 3},
		{[]float64{4, 1}, 2.5, 1, 4},
		{[]float64{9, 1, 2}, 2, 1, 9},
		{[]float64{9, 1, 2, 4}, 3, 1, 9},
	} {
		s := stat{test.samples}
		if s.median() != test.median || s.min() != test.least || s.max() != test.most {
			t.Errorf("%v: %v, %v to %v", test.samples, s.median(), s.min(), s.max())
		}
	}
	if !math.IsNaN(stat{}.median()) {
		t.Error("an empty stat has a median")
	}
}

func TestCompare(t *testing.T) {
	for _, test := range []struct {
		name, key    string
		ours, theirs []float64
		want         float64
		ok           bool
	}{
		{"less is better", "sigma", []float64{10, 10, 10}, []float64{20, 90, 30}, 3, true},
		{"more is better", "throughput", []float64{10}, []float64{5}, 2, true},
		{"pairs, not medians", "sigma", []float64{10, 100, 1000}, []float64{20, 200, 2000}, 2, true},
		{"sign does not matter", "error", []float64{-2}, []float64{4}, 2, true},
		{"below the floor", "error", []float64{0.001}, []float64{-0.002}, 1, true},
		{"below the rate equals at the rate", "w100", []float64{1}, []float64{0.5}, 1, true},
		{"both zero", "cpu", []float64{0}, []float64{0}, 1, true},
		{"a peer at zero", "cpu", []float64{1}, []float64{0}, 0, true},
		{"zero against a peer", "cpu", []float64{0}, []float64{1}, math.Inf(1), true},
		{"unpaired repetitions ignored", "sigma", []float64{10, 10}, []float64{20}, 2, true},
		{"neither better", "gap50", []float64{1}, []float64{2}, 0, false},
		{"missing", "sigma", []float64{1}, nil, 0, false},
	} {
		of := func(samples []float64) *outcome {
			return &outcome{Figures: map[string]stat{test.key: {samples}}}
		}
		r, ok := (&cell{}).compare(test.key, of(test.ours), of(test.theirs))
		if ok != test.ok || r.value != test.want {
			t.Errorf("%s: %v, %v", test.name, r.value, ok)
		}
	}
}

func TestRatioText(t *testing.T) {
	for _, test := range []struct {
		ratio ratio
		want  string
		verdict
	}{
		{ratio{value: 1.234}, "1.23", ahead},
		{ratio{value: 12.34}, "12", ahead},
		{ratio{value: 12345}, "12,345", ahead},
		{ratio{value: math.Inf(1)}, "∞", ahead},
		{ratio{value: 1.04}, "1.04", even},
		{ratio{value: 0.96}, "0.96", even},
		{ratio{value: 0.9}, "0.90", behind},
		{ratio{value: 0.0123}, "0.012", behind},
		{ratio{value: 0}, "0", behind},
		{ratio{value: 2, min: 1, max: 3, noise: 1.5}, "~2.00", ahead},
	} {
		if got := test.ratio.String(); got != test.want || test.ratio.verdict() != test.verdict {
			t.Errorf("%v was formatted as %s, verdict %s", test.ratio.value, got, test.ratio.verdict().Word)
		}
	}
	if (&outcome{Program: ceiling}).verdict(ratio{value: 0.1}) != (verdict{}) {
		t.Error("verdict on a program that is not a peer")
	}
}

// TestNoise_FalsePositiveRate simulates pairs of runs: nearly all pairs that are not classified as
// noisy must agree, and steady programs must not be classified as noisy.
func TestNoise_FalsePositiveRate(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	run := func(n int, deviation float64) ratio {
		var s stat
		for range n {
			s.Samples = append(s.Samples, math.Exp(deviation*random.NormFloat64()))
		}
		return ratio{s.median(), s.min(), s.max(), noise(s.Samples)}
	}
	for _, n := range []int{2, 3, 5, 9} {
		for _, test := range []struct {
			deviation   float64
			least, most float64 // share of pairs that may be classified as noisy
			wrong       float64 // maximum share of pairs that disagree and are not classified as noisy
		}{
			{0.01, 0, 0.01, 0.001},
			{0.03, 0, 0.5, 0.01},
			{0.1, 0.2, 1, 0.12},
			{0.3, 0.85, 1, 0.10},
			{1, 0.97, 1, 0.03},
		} {
			const pairs = 4000
			noisy, wrong := 0, 0
			for range pairs {
				d := difference{then: run(n, test.deviation), now: run(n, test.deviation)}
				if d.noisy() {
					noisy++
				} else if !d.agrees() {
					wrong++
				}
			}
			share, missed := float64(noisy)/pairs, float64(wrong)/pairs
			t.Logf("%d repetitions, deviation %.2f: %.3f noisy, %.3f disagree unnoticed", n, test.deviation, share, missed)
			if share < test.least || share > test.most {
				t.Errorf("%d repetitions, deviation %v: %v classified as noisy", n, test.deviation, share)
			}
			if missed > test.wrong {
				t.Errorf("%d repetitions, deviation %v: %v disagree and are not classified as noisy", n, test.deviation, missed)
			}
		}
	}
}

func TestNoise_SmallSample(t *testing.T) {
	one := ratio{2, 2, 2, noise([]float64{2})}
	if one.noisy() {
		t.Error("one repetition is classified as noisy")
	}
	zero := ratio{0.5, 0, 1, noise([]float64{0, 1})}
	if !zero.noisy() {
		t.Error("zero and one are not classified as noisy")
	}
}
