package shedding

import (
	"math"
	"slices"
	"time"

	"shaperd.dev/shaperd/shaper"
)

const (
	// interval is how often limits look.
	interval = time.Second

	// step is by how much the share of a limit grows in a second, at a tenth above its threshold and more, or when all there
	// is is in use. At the threshold it grows by a fifth of that.
	step = 0.1

	// enough is the load below which there is enough of everything again. From there to 1 nothing changes.
	enough = 0.9

	// leastBack is the part of its share that a limit gives back in a second at least, once there is enough.
	leastBack = 0.05

	// least is the share below which a limit sheds nothing.
	least = 0.05
)

// level is how much one limit sheds, and why.
type level struct {
	of       *shaper.LimitState
	order    int
	observes bool
	load     float64 // the largest of the signals, each as a part of its threshold
	excess   float64 // how short it is, 0 to 1
	share    float64
	signals  []shaper.ShedSignal
	looksAt  []string // names of the signals
}

// advance moves all levels on by some seconds. While limits are short, the shares of the lowest of their orders grow; when
// these refuse all, those of the next do. When there is enough again, a limit gives back as soon as those of higher orders
// that look at the same have done so: half of its share in a second at no load, and less the closer the load is to the
// threshold, where what is given back would bring it over. Limits that observe and those that are enforced go their own ways.
func advance(levels []*level, seconds float64) {
	shares := make([]float64, len(levels))
	for i, l := range levels {
		shares[i] = l.share
		switch {
		case l.load >= 1 && !slices.ContainsFunc(levels, l.growsBefore):
			if shares[i] += max(step/5, step*min(l.excess, 1)) * seconds; shares[i] > 1-1e-9 {
				shares[i] = 1
			}
		case l.load < enough && !slices.ContainsFunc(levels, l.givesBackAfter):
			back := max(leastBack, (enough-l.load)/enough/2)
			if shares[i] *= math.Pow(1-back, seconds); shares[i] < least {
				shares[i] = 0
			}
		}
	}
	for i, l := range levels {
		l.share = shares[i]
	}
}

// growsBefore reports whether other is to shed more before l does.
func (l *level) growsBefore(other *level) bool {
	return other.observes == l.observes && other.order < l.order && other.load >= 1 && other.share < 1
}

// givesBackAfter reports whether l is to shed until other has given back.
func (l *level) givesBackAfter(other *level) bool {
	return other.observes == l.observes && other.order > l.order && other.share > 0 &&
		slices.ContainsFunc(l.looksAt, func(name string) bool { return slices.Contains(other.looksAt, name) })
}
