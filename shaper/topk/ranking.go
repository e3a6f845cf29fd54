package topk

import (
	"cmp"
	"container/heap"
	"math"
	"slices"
	"sync"
	"time"

	"shaperd.dev/shaperd/leaky"
)

// TopKSize is the number of keys that a [TopK] keeps. It overestimates the weight of a key
// by at most the total of all keys divided by TopKSize.
const TopKSize = 256

// TopK tracks the keys with the largest weights, of any number of keys, in bounded memory:
// Space-Saving (Metwally, Agrawal and El Abbadi, ICDT 2005) over weights with forward decay
// (Cormode, Shkapenyuk, Srivastava and Xu, ICDE 2009): later additions are scaled by a
// growing factor, so that no entry has to be touched to age. The weight of a steady stream
// is its rate per second. It is not safe for concurrent use.
type TopK[K comparable] struct {
	// HalfLife is the time in which an addition decays to half.
	HalfLife time.Duration

	entries  []*topEntry[K] // a heap, the lightest first
	byKey    map[K]*topEntry[K]
	landmark leaky.Time // time at which the decay factor was 1
}

type topEntry[K comparable] struct {
	key               K
	weight, overcount float64 // relative to the landmark
	index             int     // in the heap
}

// Weight is the weight of a key per second, overestimated by at most Error.
type Weight struct{ Value, Error float64 }

// maxDoublings bounds the decay factor to 2^maxDoublings; beyond it all weights are scaled
// down.
const maxDoublings = 64

// decayFactor returns the factor of additions at now.
func (t *TopK[K]) decayFactor(now leaky.Time) float64 {
	n := float64(now.Sub(t.landmark)) / float64(leaky.FromDuration(t.HalfLife))
	if n > maxDoublings {
		scale := math.Exp2(-n)
		for _, e := range t.entries {
			e.weight *= scale
			e.overcount *= scale
		}
		t.landmark, n = now, 0
	}
	return math.Exp2(n)
}

// Add adds n to the weight of k.
func (t *TopK[K]) Add(k K, n float64, now leaky.Time) {
	n *= t.decayFactor(now)
	e := t.byKey[k]
	switch {
	case e != nil:
		e.weight += n
	case len(t.entries) < TopKSize:
		if t.byKey == nil {
			t.byKey = map[K]*topEntry[K]{}
		}
		e = &topEntry[K]{key: k, weight: n}
		t.byKey[k] = e
		heap.Push((*topHeap[K])(t), e)
		return
	default:
		e = t.entries[0]
		delete(t.byKey, e.key)
		t.byKey[k] = e
		e.key, e.overcount = k, e.weight
		e.weight += n
	}
	heap.Fix((*topHeap[K])(t), e.index)
}

// Weight returns the weight of k at now. For a key that is not kept it is 0, and Error is
// the most that it may be.
func (t *TopK[K]) Weight(k K, now leaky.Time) Weight {
	if len(t.entries) == 0 {
		return Weight{}
	}
	perSecond := math.Ln2 / t.HalfLife.Seconds() / t.decayFactor(now)
	if e := t.byKey[k]; e != nil {
		return Weight{e.weight * perSecond, e.overcount * perSecond}
	}
	if len(t.entries) < TopKSize {
		return Weight{}
	}
	return Weight{0, t.entries[0].weight * perSecond}
}

// copy returns a deep copy without byKey entries; buildIndex adds them.
func (t *TopK[K]) copy() *TopK[K] {
	c := &TopK[K]{HalfLife: t.HalfLife, landmark: t.landmark, entries: make([]*topEntry[K], len(t.entries)), byKey: make(map[K]*topEntry[K], len(t.entries))}
	entries := make([]topEntry[K], len(t.entries))
	for i, e := range t.entries {
		entries[i] = *e
		c.entries[i] = &entries[i]
	}
	return c
}

// buildIndex fills byKey of a copy.
func (t *TopK[K]) buildIndex() {
	for _, e := range t.entries {
		t.byKey[e.key] = e
	}
}

// Heaviest returns up to n keys, the heaviest first.
func (t *TopK[K]) Heaviest(n int) []K {
	all := slices.Clone(t.entries)
	slices.SortFunc(all, func(a, b *topEntry[K]) int { return cmp.Compare(b.weight, a.weight) })
	keys := make([]K, min(n, len(all)))
	for i := range keys {
		keys[i] = all[i].key
	}
	return keys
}

type topHeap[K comparable] TopK[K]

func (h *topHeap[K]) Len() int           { return len(h.entries) }
func (h *topHeap[K]) Less(i, j int) bool { return h.entries[i].weight < h.entries[j].weight }
func (h *topHeap[K]) Swap(i, j int) {
	h.entries[i], h.entries[j] = h.entries[j], h.entries[i]
	h.entries[i].index, h.entries[j].index = i, j
}

func (h *topHeap[K]) Push(x any) {
	e := x.(*topEntry[K])
	e.index = len(h.entries)
	h.entries = append(h.entries, e)
}

func (h *topHeap[K]) Pop() any { panic("entries are replaced, not removed") }

// Usage is the usage of a key in some time.
type Usage struct {
	Bytes   uint64        // bytes that left
	Waited  time.Duration // sum of the delays of all units
	Dropped uint64        // refused datagrams, packets and connections
}

// SortKey is a measure by which keys are ranked.
type SortKey uint8

// The sort keys.
const (
	SortByRate SortKey = iota // bytes
	SortByDelay
	SortByDrops
	numSortKeys
)

// HeavyHitter is a key with its weights.
type HeavyHitter[K comparable] struct {
	Key    K
	Weight [numSortKeys]Weight // bytes, seconds waited, and units refused, each per second
}

// halfLives are the half-lives by sort key. Drops decay slowly, since operators look for
// them after a complaint.
var halfLives = [numSortKeys]time.Duration{5 * time.Second, 5 * time.Second, time.Minute}

// HalfLife returns the time in which a weight decays to half.
func (s SortKey) HalfLife() time.Duration { return halfLives[s] }

// Ranking ranks keys by each sort key. The zero Ranking is ready for use. It is safe for
// concurrent use.
type Ranking[K comparable] struct {
	mu   sync.Mutex
	tops [numSortKeys]TopK[K]
}

// Add adds usage of k.
func (r *Ranking[K]) Add(k K, usage Usage, now leaky.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(k, usage, now)
}

// TryAdd is Add without waiting: it returns false if the ranking is in use.
func (r *Ranking[K]) TryAdd(k K, usage Usage, now leaky.Time) bool {
	if !r.mu.TryLock() {
		return false
	}
	defer r.mu.Unlock()
	r.add(k, usage, now)
	return true
}

func (r *Ranking[K]) add(k K, usage Usage, now leaky.Time) {
	for sortKey, n := range [numSortKeys]float64{float64(usage.Bytes), usage.Waited.Seconds(), float64(usage.Dropped)} {
		if n > 0 {
			r.tops[sortKey].HalfLife = halfLives[sortKey]
			r.tops[sortKey].Add(k, n, now)
		}
	}
}

// Heaviest returns up to n keys by a sort key, the heaviest first, with all their weights
// at now.
func (r *Ranking[K]) Heaviest(by SortKey, n int, now leaky.Time) []HeavyHitter[K] {
	var tops [numSortKeys]*TopK[K]
	r.mu.Lock()
	for sortKey := range r.tops {
		tops[sortKey] = r.tops[sortKey].copy()
	}
	r.mu.Unlock() // adders do not wait for the rest
	for _, t := range tops {
		t.buildIndex()
	}
	keys := tops[by].Heaviest(n)
	heavy := make([]HeavyHitter[K], len(keys))
	for i, k := range keys {
		heavy[i].Key = k
		for sortKey, t := range tops {
			heavy[i].Weight[sortKey] = t.Weight(k, now)
		}
	}
	return heavy
}
