package topk

import (
	"hash/maphash"

	"github.com/axiomhq/hyperloglog"

	"shaperd.dev/shaperd/leaky"
)

// distinct estimates how many different keys there were in the last one to two minutes, to some percent, in bounded memory: HyperLogLog
// (Heule, Nunkesser and Hall, EDBT 2013). The zero value is ready for use. It is not safe for concurrent use.
type distinct[K comparable] struct {
	minutes [2]*hyperloglog.Sketch // this one, and the one before; nil if there was nothing
	begin   leaky.Time             // of this minute
}

const minute = 60 * leaky.Second

// distinctSeed keeps others from choosing keys that look alike.
var distinctSeed = maphash.MakeSeed()

// pass lets minutes pass.
func (d *distinct[K]) pass(now leaky.Time) {
	switch passed := now.Sub(d.begin); {
	case passed < minute:
	case passed < 2*minute:
		d.minutes[1], d.minutes[0], d.begin = d.minutes[0], nil, d.begin+minute
	default:
		d.minutes, d.begin = [2]*hyperloglog.Sketch{}, now
	}
}

func (d *distinct[K]) add(k K, now leaky.Time) {
	d.pass(now)
	if d.minutes[0] == nil {
		d.minutes[0] = hyperloglog.New14()
	}
	d.minutes[0].InsertHash(maphash.Comparable(distinctSeed, k))
}

func (d *distinct[K]) estimate(now leaky.Time) uint64 {
	d.pass(now)
	all := hyperloglog.New14()
	for _, m := range d.minutes {
		if m != nil {
			_ = all.Merge(m) // fails for another precision only
		}
	}
	return all.Estimate()
}
