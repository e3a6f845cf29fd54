package bpf

import (
	"runtime"
	"sync/atomic"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// Parts of the owner of a monitor.
const (
	ownerBusy       = 1 << kernelOwnerBitsOWNER_BUSY_BIT // set while a program uses the monitor
	ownerGeneration = ownerBusy - 1<<kernelOwnerBitsOWNER_GENERATION_SHIFT
)

// freeMonitors makes the programs monitor the next bucket that is charged: of each limit of p with
// several buckets, and of each whose monitor belongs to another policy; or of all limits.
func (k *kernel) freeMonitors(p *shaper.Policy, n numbers, all bool) {
	for i := range p.Len() {
		if l := p.Limit(i); l.InPacketPlane() && (all || l.Key != 0 || k.monitorIsStale(n.limits[l.Name])) {
			k.freeMonitor(n.limits[l.Name])
		}
	}
}

// monitorIsStale reports whether a monitor of a limit belongs to another policy.
func (k *kernel) monitorIsStale(limit uint32) bool {
	current := uint64(k.Generation) << kernelOwnerBitsOWNER_GENERATION_SHIFT
	for meter := range k.monitors[limit].Meter {
		owner := atomic.LoadUint64(&k.monitors[limit].Meter[meter].Owner)
		if owner != 0 && (owner^current)&ownerGeneration != 0 {
			return true
		}
	}
	return false
}

// resetMeasurements resets the excess, allowance and refunds measured under the old policy, which no
// packet meets any more: their times are at its rates.
func (k *kernel) resetMeasurements() {
	for i := range k.monitors {
		for meter := range k.monitors[i].Meter {
			w := &k.monitors[i].Meter[meter]
			atomic.StoreUint64(&w.MaxExcess, 0)
			atomic.StoreUint64(&w.Allowed, 0)
			atomic.StoreUint64(&w.MaxRefund, 0)
		}
	}
}

func (k *kernel) freeMonitor(limit uint32) {
	for meter := range k.monitors[limit].Meter {
		// In this order: a program that takes the monitor writes its owner first and owners second.
		atomic.StoreUint64(&k.owners[limit][meter], 0)
		owner := &k.monitors[limit].Meter[meter].Owner
		for range 1000 { // a program updates it for 50 ns; otherwise it is freed the next time
			was := atomic.LoadUint64(owner)
			if was&ownerBusy == 0 && atomic.CompareAndSwapUint64(owner, was, 0) {
				break
			}
			runtime.Gosched()
		}
	}
}

// violations returns how many units of a limit left beyond the allowed excess.
func (k *kernel) violations(limit uint32) (sum uint64) {
	for meter := range k.monitors[limit].Meter {
		sum += atomic.LoadUint64(&k.monitors[limit].Meter[meter].Violations)
	}
	return sum
}

// takeMaxExcess returns and resets the largest excess under a limit since the last call, and the allowed
// excess: of bytes or of packets, whichever is further beyond, as in [leaky.Meter]. The excess
// is read first, as programs write the allowed excess first.
func (k *kernel) takeMaxExcess(limit uint32) (worst, allowed leaky.Time) {
	for meter := range k.monitors[limit].Meter {
		w := &k.monitors[limit].Meter[meter]
		excess, most := leaky.Time(atomic.SwapUint64(&w.MaxExcess, 0)), leaky.Time(atomic.LoadUint64(&w.Allowed))
		if allowed == 0 || excess.Sub(most) > worst.Sub(allowed) {
			worst, allowed = excess, most
		}
	}
	return worst, allowed
}

// addConformance adds the excess of a limit since the last call, and violations, to the state that
// metrics show.
func (k *kernel) addConformance(to *shaper.Conformance, limit uint32, violations uint64) {
	worst, allowed := k.takeMaxExcess(limit)
	to.MaxExcess.Store(max(to.MaxExcess.Load(), uint64(worst)))
	to.MaxAllowed.Store(max(to.MaxAllowed.Load(), uint64(allowed)))
	to.Violations.Add(violations)
}
