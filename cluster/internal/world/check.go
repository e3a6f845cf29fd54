package world

import (
	"fmt"
	"strings"

	"shaperd.dev/shaperd/cluster"
)

// check looks at what all machines together may use of each bucket.
func (w *world) check() {
	floor := w.params.Floor()
	for i := range w.keys {
		var sum int64
		var lent, cold *machine // that may use more than its floor, and that is counted and takes the bucket for cold
		for _, m := range w.machines {
			if !m.up {
				continue
			}
			use := m.plane.use(i, m.time)
			sum += use
			if use > floor+1 {
				lent = m
				if cluster.IsSlots(w.keys[i]) {
					w.SlotsLent++
				} else {
					w.AboveFloor++
				}
			}
			if !m.plane.hot[i] && m.counted && m.time < m.plane.lease.End {
				cold = m
			}
		}
		if lent != nil && cold != nil && !w.Split && !cluster.IsSlots(w.keys[i]) {
			w.fail(Lent, "%s may use more than its floor of %s, and %s takes it for cold%s", lent.name, w.keys[i], cold.name, w.describe(i))
		}
		if !cluster.IsSlots(w.keys[i]) {
			w.Samples++
			w.Sum += float64(sum) / float64(cluster.Whole)
		}
		if sum > w.Worst {
			w.Worst = sum
			if sum > cluster.Whole+int64(len(w.machines)) {
				w.fail(Sum, "together hosts may use %.3f of %s%s", parts(sum), w.keys[i], w.describe(i))
			}
		}
	}
}

// checkOldLeases fails if, now that an epoch is settled, a machine may use more than its floor by
// what it got in one before.
func (w *world) checkOldLeases(epoch int64) {
	for _, m := range w.machines {
		if !m.up || m.leasedIn >= epoch {
			continue
		}
		for i, key := range w.keys {
			if use := m.plane.admits(i, m.time); use > w.params.Floor() && !cluster.IsSlots(key) {
				w.fail(Epoch, "epoch %d is settled, and %s may use %.3f of %s%s", epoch, m.name, parts(use), w.keys[i], w.describe(i))
			}
		}
	}
}

func parts(n int64) float64 { return float64(n) / float64(cluster.Whole) }

// describe describes what the machines may use of bucket i.
func (w *world) describe(i int) string {
	var b strings.Builder
	for _, m := range w.machines {
		if !m.up {
			continue
		}
		now := m.time
		status := m.host.Status(now)
		status.Shares = nil
		fmt.Fprintf(&b, "\n  %s uses %.3f, admits %.3f, alone in %v, %+v", m.name, parts(m.plane.use(i, now)), parts(m.plane.admits(i, now)),
			(m.plane.lease.AloneAt - now).Duration(), status)
	}
	return b.String()
}
