package topk

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
)

// The reference for a skewed stream is the exact decayed weight of every key.
func TestSketch_AgainstExactWeights(t *testing.T) {
	const seed = 7
	rng := rand.New(rand.NewPCG(seed, 0))
	zipf := rand.NewZipf(rng, 1.2, 1, 100_000)
	top := Sketch[uint64]{HalfLife: 5 * time.Second}
	exact := map[uint64]float64{}
	var total float64
	now := leaky.Second
	half := float64(leaky.FromDuration(top.HalfLife))
	for range 500_000 {
		k, n := zipf.Uint64(), float64(1+rng.IntN(1500))
		step := leaky.Time(rng.IntN(int(leaky.Second / 10_000)))
		now += step
		top.Add(k, n, now)
		exact[k] += n * math.Exp2(float64(now)/half)
		total += n * math.Exp2(float64(now)/half)
	}
	perSecond := math.Ln2 / top.HalfLife.Seconds() / math.Exp2(float64(now)/half)
	bound := total * perSecond / Size
	for _, k := range top.Heaviest(20) {
		w, want := top.Weight(k, now), exact[k]*perSecond
		if w.Value < want*0.999 || w.Value-w.Error > want*1.001 || w.Error > bound*1.001 {
			t.Errorf("seed %d: key %d: %.0f with an error of %.0f, want %.0f; the bound is %.0f", seed, k, w.Value, w.Error, want, bound)
		}
	}
	kept := map[uint64]bool{}
	for _, k := range top.Heaviest(Size) {
		kept[k] = true
	}
	for k, weight := range exact {
		if weight*perSecond > bound && !kept[k] {
			t.Errorf("seed %d: key %d weighs %.0f, more than the bound %.0f, and is not kept", seed, k, weight*perSecond, bound)
		}
	}
	if len(top.entries) != Size || len(top.byKey) != Size {
		t.Errorf("%d entries, %d by key, want %d", len(top.entries), len(top.byKey), Size)
	}
}

func TestSketch_SteadyWeightIsRate(t *testing.T) {
	top := Sketch[string]{HalfLife: 5 * time.Second}
	now := leaky.Second
	for range 6000 { // 60 s
		now += leaky.Second / 100
		top.Add("a", 10, now)
	}
	if w := top.Weight("a", now); math.Abs(w.Value-1000) > 10 || w.Error != 0 {
		t.Errorf("the weight of 1000/s is %v", w)
	}
	if w := top.Weight("a", now+leaky.FromDuration(top.HalfLife)); math.Abs(w.Value-500) > 5 {
		t.Errorf("the weight of 1000/s after a half-life is %v, want 500", w)
	}
	// After years nothing has overflowed.
	now += leaky.FromDuration(2 * 365 * 24 * time.Hour)
	top.Add("b", 1, now)
	if w := top.Weight("a", now); w.Value != 0 || math.IsNaN(w.Value) {
		t.Errorf("the weight of 1000/s after years is %v", w)
	}
	if w := top.Weight("b", now); !(w.Value > 0) {
		t.Errorf("the weight of an addition after years is %v", w)
	}
}
