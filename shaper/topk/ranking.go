package topk

import (
	"sync"
	"time"

	"shaperd.dev/shaperd/leaky"
)

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
	ByRate SortKey = iota // bytes
	ByDelay
	ByDrops
	numSortKeys
)

// HeavyHitter is a key with its weights.
type HeavyHitter[K comparable] struct {
	Key    K
	Weight [numSortKeys]Estimate // bytes, seconds waited, and units refused, each per second
}

// halfLives are the half-lives by sort key. Drops decay slowly, since operators look for
// them after a complaint.
var halfLives = [numSortKeys]time.Duration{5 * time.Second, 5 * time.Second, time.Minute}

// HalfLife returns the time in which a weight decays to half.
func (s SortKey) HalfLife() time.Duration { return halfLives[s] }

// Ranking ranks keys by each sort key. The zero Ranking is ready for use. It is safe for
// concurrent use.
type Ranking[K comparable] struct {
	mu       sync.Mutex
	sketches [numSortKeys]Sketch[K]
	dropped  distinct[K] // keys of which something was dropped
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
			r.sketches[sortKey].HalfLife = halfLives[sortKey]
			r.sketches[sortKey].Add(k, n, now)
		}
	}
	if usage.Dropped > 0 {
		r.dropped.add(k, now)
	}
}

// Dropped estimates of how many keys something was dropped in the last one to two minutes.
func (r *Ranking[K]) Dropped(now leaky.Time) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dropped.estimate(now)
}

// HeaviestShare returns which part of the bytes of all keys the heaviest key has at least, from 0 to 1, and how many keys, up to [Size],
// have a byte a second or more. Without these it is 0.
func (r *Ranking[K]) HeaviestShare(now leaky.Time) (share float64, keys int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sketches[ByRate].heaviestShare(now)
}

// Heaviest returns up to n keys by a sort key, the heaviest first, with all their weights
// at now.
func (r *Ranking[K]) Heaviest(by SortKey, n int, now leaky.Time) []HeavyHitter[K] {
	var sketches [numSortKeys]*Sketch[K]
	r.mu.Lock()
	for sortKey := range r.sketches {
		sketches[sortKey] = r.sketches[sortKey].copy()
	}
	r.mu.Unlock() // adders do not wait for the rest
	for _, s := range sketches {
		s.buildIndex()
	}
	keys := sketches[by].Heaviest(n)
	heavy := make([]HeavyHitter[K], len(keys))
	for i, k := range keys {
		heavy[i].Key = k
		for sortKey, s := range sketches {
			heavy[i].Weight[sortKey] = s.Weight(k, now)
		}
	}
	return heavy
}
