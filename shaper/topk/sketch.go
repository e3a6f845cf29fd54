// Package topk finds the heaviest keys of a stream in bounded memory. [Sketch] does so by one
// weight, [Ranking] by the three that operators ask for.
package topk

import (
	"cmp"
	"container/heap"
	"math"
	"slices"
	"time"

	"shaperd.dev/shaperd/leaky"
)

// Size is the number of keys that a [Sketch] keeps. It overestimates the weight of a key
// by at most the total of all keys divided by Size.
const Size = 256

// Sketch tracks the keys with the largest weights, of any number of keys, in bounded memory:
// Space-Saving (Metwally, Agrawal and El Abbadi, ICDT 2005) over weights with forward decay
// (Cormode, Shkapenyuk, Srivastava and Xu, ICDE 2009): later additions are scaled by a
// growing factor, so that no entry has to be touched to age. The weight of a steady stream
// is its rate per second. It is not safe for concurrent use.
type Sketch[K comparable] struct {
	// HalfLife is the time in which an addition decays to half.
	HalfLife time.Duration

	entries  []*entry[K] // a heap, the lightest first
	byKey    map[K]*entry[K]
	landmark leaky.Time // time at which the decay factor was 1
}

type entry[K comparable] struct {
	key               K
	weight, overcount float64 // relative to the landmark
	index             int     // in the heap
}

// Estimate is the weight of a key per second, overestimated by at most Error.
type Estimate struct{ Value, Error float64 }

// maxDoublings bounds the decay factor to 2^maxDoublings; beyond it all weights are scaled
// down.
const maxDoublings = 64

// decayFactor returns the factor of additions at now.
func (s *Sketch[K]) decayFactor(now leaky.Time) float64 {
	n := float64(now.Sub(s.landmark)) / float64(leaky.FromDuration(s.HalfLife))
	if n > maxDoublings {
		scale := math.Exp2(-n)
		for _, e := range s.entries {
			e.weight *= scale
			e.overcount *= scale
		}
		s.landmark, n = now, 0
	}
	return math.Exp2(n)
}

// Add adds n to the weight of k.
func (s *Sketch[K]) Add(k K, n float64, now leaky.Time) {
	n *= s.decayFactor(now)
	e := s.byKey[k]
	switch {
	case e != nil:
		e.weight += n
	case len(s.entries) < Size:
		if s.byKey == nil {
			s.byKey = map[K]*entry[K]{}
		}
		e = &entry[K]{key: k, weight: n}
		s.byKey[k] = e
		heap.Push((*lightestFirst[K])(s), e)
		return
	default:
		e = s.entries[0]
		delete(s.byKey, e.key)
		s.byKey[k] = e
		e.key, e.overcount = k, e.weight
		e.weight += n
	}
	heap.Fix((*lightestFirst[K])(s), e.index)
}

// Weight returns the weight of k at now. For a key that is not kept it is 0, and Error is
// the most that it may be.
func (s *Sketch[K]) Weight(k K, now leaky.Time) Estimate {
	if len(s.entries) == 0 {
		return Estimate{}
	}
	perSecond := math.Ln2 / s.HalfLife.Seconds() / s.decayFactor(now)
	if e := s.byKey[k]; e != nil {
		return Estimate{e.weight * perSecond, e.overcount * perSecond}
	}
	if len(s.entries) < Size {
		return Estimate{}
	}
	return Estimate{0, s.entries[0].weight * perSecond}
}

// heaviestShare returns which part of all that was added the heaviest key has at least: an entry that is replaced leaves its weight to
// the next one, so none is lost. And it returns how many have a weight of 1 per second or more; without these the share is 0.
func (s *Sketch[K]) heaviestShare(now leaky.Time) (share float64, keys int) {
	most, total := 0.0, 0.0
	if len(s.entries) == 0 {
		return 0, 0
	}
	perSecond := math.Ln2 / s.HalfLife.Seconds() / s.decayFactor(now)
	for _, e := range s.entries {
		total += e.weight
		most = max(most, e.weight-e.overcount)
		if e.weight*perSecond >= 1 {
			keys++
		}
	}
	if keys == 0 {
		return 0, 0
	}
	return most / total, keys
}

// copy returns a deep copy without byKey entries; buildIndex adds them.
func (s *Sketch[K]) copy() *Sketch[K] {
	c := &Sketch[K]{HalfLife: s.HalfLife, landmark: s.landmark, entries: make([]*entry[K], len(s.entries)), byKey: make(map[K]*entry[K], len(s.entries))}
	entries := make([]entry[K], len(s.entries))
	for i, e := range s.entries {
		entries[i] = *e
		c.entries[i] = &entries[i]
	}
	return c
}

// buildIndex fills byKey of a copy.
func (s *Sketch[K]) buildIndex() {
	for _, e := range s.entries {
		s.byKey[e.key] = e
	}
}

// Heaviest returns up to n keys, the heaviest first.
func (s *Sketch[K]) Heaviest(n int) []K {
	all := slices.Clone(s.entries)
	slices.SortFunc(all, func(a, b *entry[K]) int { return cmp.Compare(b.weight, a.weight) })
	keys := make([]K, min(n, len(all)))
	for i := range keys {
		keys[i] = all[i].key
	}
	return keys
}

type lightestFirst[K comparable] Sketch[K]

func (h *lightestFirst[K]) Len() int           { return len(h.entries) }
func (h *lightestFirst[K]) Less(i, j int) bool { return h.entries[i].weight < h.entries[j].weight }
func (h *lightestFirst[K]) Swap(i, j int) {
	h.entries[i], h.entries[j] = h.entries[j], h.entries[i]
	h.entries[i].index, h.entries[j].index = i, j
}

func (h *lightestFirst[K]) Push(x any) {
	e := x.(*entry[K])
	e.index = len(h.entries)
	h.entries = append(h.entries, e)
}

func (h *lightestFirst[K]) Pop() any { panic("entries are replaced, not removed") }
