package shaper

import (
	"cmp"
	"container/heap"
	"math"
	"slices"
	"sync"
	"time"

	"shaperd/leaky"
)

// TopSize is how many keys a [Top] keeps. What it says of any key is too large by at most
// the total of all keys divided by so many.
const TopSize = 256

// Top keeps the heaviest of any number of keys in bounded memory: Space-Saving (Metwally,
// Agrawal and El Abbadi, ICDT 2005) over weights that fade by forward decay (Cormode,
// Shkapenyuk, Srivastava and Xu, ICDE 2009): what comes later is added with a growing
// weight, so that nothing has to be touched to age. A steady stream's weight is its rate a
// second. It is not safe for concurrent use.
type Top[K comparable] struct {
	// HalfLife is after how long what was added counts half.
	HalfLife time.Duration

	entries []*topEntry[K] // a heap, the lightest first
	byKey   map[K]*topEntry[K]
	since   leaky.Time // when a weight of 1 counted 1
}

type topEntry[K comparable] struct {
	key          K
	weight, over float64 // as of since
	index        int
}

// Weight is how heavy a key is, a second: at most Error too large.
type Weight struct{ Value, Error float64 }

// doublings is how often a weight may have doubled before all are scaled down.
const doublings = 64

// growth returns what an addition at now weighs.
func (t *Top[K]) growth(now leaky.Time) float64 {
	n := float64(now.Sub(t.since)) / float64(leaky.FromDuration(t.HalfLife))
	if n > doublings {
		scale := math.Exp2(-n)
		for _, e := range t.entries {
			e.weight *= scale
			e.over *= scale
		}
		t.since, n = now, 0
	}
	return math.Exp2(n)
}

// Add adds n to the weight of k.
func (t *Top[K]) Add(k K, n float64, now leaky.Time) {
	n *= t.growth(now)
	e := t.byKey[k]
	switch {
	case e != nil:
		e.weight += n
	case len(t.entries) < TopSize:
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
		e.key, e.over = k, e.weight
		e.weight += n
	}
	heap.Fix((*topHeap[K])(t), e.index)
}

// Of returns the weight of k at now. That of a key which is not kept is 0, and might be as
// much as the error more.
func (t *Top[K]) Of(k K, now leaky.Time) Weight {
	if len(t.entries) == 0 {
		return Weight{}
	}
	perSecond := math.Ln2 / t.HalfLife.Seconds() / t.growth(now)
	if e := t.byKey[k]; e != nil {
		return Weight{e.weight * perSecond, e.over * perSecond}
	}
	if len(t.entries) < TopSize {
		return Weight{}
	}
	return Weight{0, t.entries[0].weight * perSecond}
}

// copy returns a Top that goes on by itself.
func (t *Top[K]) copy() *Top[K] {
	c := &Top[K]{HalfLife: t.HalfLife, since: t.since, entries: make([]*topEntry[K], len(t.entries)), byKey: make(map[K]*topEntry[K], len(t.entries))}
	entries := make([]topEntry[K], len(t.entries))
	for i, e := range t.entries {
		entries[i] = *e
		c.entries[i] = &entries[i]
	}
	return c
}

// index makes what finds keys of a copy.
func (t *Top[K]) index() {
	for _, e := range t.entries {
		t.byKey[e.key] = e
	}
}

// Heaviest returns at most n keys, the heaviest first.
func (t *Top[K]) Heaviest(n int) []K {
	all := slices.Clone(t.entries)
	slices.SortFunc(all, func(a, b *topEntry[K]) int { return cmp.Compare(b.weight, a.weight) })
	keys := make([]K, min(n, len(all)))
	for i := range keys {
		keys[i] = all[i].key
	}
	return keys
}

type topHeap[K comparable] Top[K]

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

// Tally is what a key did: what left, how long it waited, and what was refused.
type Tally struct {
	Bytes   uint64
	Waited  time.Duration // of all units together
	Dropped uint64        // datagrams, packets and connections
}

// Trait is by what keys are heavy.
type Trait uint8

// The traits.
const (
	TraitRate Trait = iota // bytes
	TraitDelay
	TraitDrops
	numTraits
)

// Heavy is a heavy key.
type Heavy[K comparable] struct {
	Key    K
	Weight [numTraits]Weight // bytes, seconds waited, and units refused, each a second
}

// halfLives are after how long what keys did counts half. What is refused is looked for
// when somebody has complained.
var halfLives = [numTraits]time.Duration{5 * time.Second, 5 * time.Second, time.Minute}

// HalfLife is after how long what t tells of counts half.
func (t Trait) HalfLife() time.Duration { return halfLives[t] }

// Ranking keeps the heaviest keys by each trait. The zero Ranking is ready for use, by
// several goroutines.
type Ranking[K comparable] struct {
	mu   sync.Mutex
	tops [numTraits]Top[K]
}

// Add adds what k did to what it did before.
func (r *Ranking[K]) Add(k K, did Tally, now leaky.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(k, did, now)
}

// TryAdd is Add, unless somebody else is at the ranking just now: then it returns false. It
// never waits.
func (r *Ranking[K]) TryAdd(k K, did Tally, now leaky.Time) bool {
	if !r.mu.TryLock() {
		return false
	}
	defer r.mu.Unlock()
	r.add(k, did, now)
	return true
}

func (r *Ranking[K]) add(k K, did Tally, now leaky.Time) {
	for trait, n := range [numTraits]float64{float64(did.Bytes), did.Waited.Seconds(), float64(did.Dropped)} {
		if n > 0 {
			r.tops[trait].HalfLife = halfLives[trait]
			r.tops[trait].Add(k, n, now)
		}
	}
}

// Heaviest returns at most n keys by a trait, the heaviest first, with all their weights
// at now.
func (r *Ranking[K]) Heaviest(by Trait, n int, now leaky.Time) []Heavy[K] {
	var tops [numTraits]*Top[K]
	r.mu.Lock()
	for trait := range r.tops {
		tops[trait] = r.tops[trait].copy()
	}
	r.mu.Unlock() // who adds does not wait for what follows
	for _, t := range tops {
		t.index()
	}
	keys := tops[by].Heaviest(n)
	heavy := make([]Heavy[K], len(keys))
	for i, k := range keys {
		heavy[i].Key = k
		for trait, t := range tops {
			heavy[i].Weight[trait] = t.Of(k, now)
		}
	}
	return heavy
}
