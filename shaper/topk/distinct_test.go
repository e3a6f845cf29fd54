package topk

import (
	"testing"

	"shaperd.dev/shaperd/leaky"
)

func TestRanking_Dropped(t *testing.T) {
	var r Ranking[uint64]
	now := 100 * leaky.Second
	if n := r.Dropped(now); n != 0 {
		t.Errorf("%d of none", n)
	}
	for i := range uint64(20_000) {
		r.Add(i%5000, Usage{Dropped: 1}, now)
		r.Add(10_000+i, Usage{Bytes: 1}, now)
		now += leaky.Second / 1000
	}
	check := func(what string, least, most uint64) {
		t.Helper()
		if n := r.Dropped(now); n < least || n > most {
			t.Errorf("%s: %d, want %d to %d", what, n, least, most)
		}
	}
	check("at once", 4800, 5200)
	now += 50 * leaky.Second
	r.Add(1e6, Usage{Dropped: 1}, now)
	check("within a minute", 4800, 5200)
	now += 61 * leaky.Second
	check("two minutes later", 1, 1)
	now += 1000 * leaky.Second
	check("long after", 0, 0)
}

func TestRanking_HeaviestShare(t *testing.T) {
	var r Ranking[uint64]
	now := 100 * leaky.Second
	if share, keys := r.HeaviestShare(now); share != 0 || keys != 0 {
		t.Error(share, keys)
	}
	for i := range uint64(3) {
		r.Add(i, Usage{Bytes: 100 << i}, now)
	}
	if share, keys := r.HeaviestShare(now); share < 0.57 || share > 0.572 || keys != 3 {
		t.Errorf("%.3f of %d keys, want 4/7 of 3", share, keys)
	}
	now += 200 * leaky.Second
	if share, keys := r.HeaviestShare(now); share != 0 || keys != 0 {
		t.Errorf("%.3f of %d keys long after", share, keys)
	}
	for i := range uint64(200_000) {
		r.Add(1000+i%50_000, Usage{Bytes: 70}, now)
		r.Add(7, Usage{Bytes: 30}, now)
		now += leaky.Second / 10_000
	}
	if share, keys := r.HeaviestShare(now); share < 0.29 || share > 0.3001 || keys != Size {
		t.Errorf("%.3f of %d keys, want 0.3 of many", share, keys)
	}
}
