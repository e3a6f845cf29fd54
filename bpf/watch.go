package bpf

import (
	"runtime"
	"sync/atomic"

	"shaperd/leaky"
	"shaperd/shaper"
)

// In the owner of a watch, as watch.h has it: watchBusy is set while a program is at it, and
// from bit 48 on there are so many bits of the policy's generation.
const (
	watchBusy       = 1 << 63
	watchGeneration = 1<<15 - 1
)

// freeWatches has the next bucket watched that comes along: of each limit of p that has
// several, and of each whose watch is of another policy than the one in force; or of all.
func (k *kernel) freeWatches(p *shaper.Policy, n numbers, all bool) {
	for i := range p.Len() {
		if l := p.Limit(i); l.OfAttachments() && (all || l.Key != 0 || k.watchesAnother(n.limits[l.Name])) {
			k.freeWatch(n.limits[l.Name])
		}
	}
}

// watchesAnother reports whether a watch of a limit is that of another policy.
func (k *kernel) watchesAnother(limit uint32) bool {
	for meter := range k.watches[limit].Meter {
		owner := atomic.LoadUint64(&k.watches[limit].Meter[meter].Owner)
		if owner != 0 && uint32(owner>>48)&watchGeneration != k.Generation&watchGeneration {
			return true
		}
	}
	return false
}

// forgetTimes forgets what was measured, allowed and taken back under the policy before, by
// which no packet goes any more: at another rate it is other time.
func (k *kernel) forgetTimes() {
	for i := range k.watches {
		for meter := range k.watches[i].Meter {
			w := &k.watches[i].Meter[meter]
			atomic.StoreUint64(&w.Worst, 0)
			atomic.StoreUint64(&w.Allowed, 0)
			atomic.StoreUint64(&w.Refunded, 0)
		}
	}
}

func (k *kernel) freeWatch(limit uint32) {
	for meter := range k.watches[limit].Meter {
		// In this order, as who takes the watch writes the one and then the other.
		atomic.StoreUint64(&k.owners[limit][meter], 0)
		owner := &k.watches[limit].Meter[meter].Owner
		for range 1000 { // a program is at it for 50 ns; else it is set free the next time
			was := atomic.LoadUint64(owner)
			if was&watchBusy == 0 && atomic.CompareAndSwapUint64(owner, was, 0) {
				break
			}
			runtime.Gosched()
		}
	}
}

// violations returns how many units of a limit left beyond what they were allowed.
func (k *kernel) violations(limit uint32) (sum uint64) {
	for meter := range k.watches[limit].Meter {
		sum += atomic.LoadUint64(&k.watches[limit].Meter[meter].Violations)
	}
	return sum
}

// worst returns the largest excess under a limit since it was last asked for, and what was
// allowed: of bytes or of packets, whichever is more beyond that, as [leaky.Meter] has it.
// The excess is read first, as programs write what is allowed first.
func (k *kernel) worst(limit uint32) (worst, allowed leaky.Time) {
	for meter := range k.watches[limit].Meter {
		w := &k.watches[limit].Meter[meter]
		excess, most := leaky.Time(atomic.SwapUint64(&w.Worst, 0)), leaky.Time(atomic.LoadUint64(&w.Allowed))
		if allowed == 0 || excess.Sub(most) > worst.Sub(allowed) {
			worst, allowed = excess, most
		}
	}
	return worst, allowed
}

// addPromise adds what was seen of a limit since the last time, and violations, to what
// metrics show.
func (k *kernel) addPromise(to *shaper.Promise, limit uint32, violations uint64) {
	worst, allowed := k.worst(limit)
	to.Worst.Store(max(to.Worst.Load(), uint64(worst)))
	to.Allowed.Store(max(to.Allowed.Load(), uint64(allowed)))
	to.Violations.Add(violations)
}
