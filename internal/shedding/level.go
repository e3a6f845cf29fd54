package shedding

import (
	"time"

	"shaperd.dev/shaperd/shaper"
)

const (
	// interval is how often limits look.
	interval = time.Second

	// step is by how much the share of a limit that is short grows in an interval, at a tenth above its threshold and more.
	step = 0.1

	// enough is the load below which there is enough of everything again. From there to 1 nothing changes.
	enough = 0.9

	// least is the share below which a limit sheds nothing.
	least = 0.05
)

// level is how much one limit sheds, and why.
type level struct {
	of      *shaper.LimitState
	order   int
	load    float64 // the largest of the signals, each as a part of its threshold
	share   float64
	signals []shaper.ShedSignal
}

// advance moves all levels on by one interval. While limits are short, the shares of the lowest of their orders grow, and when
// these refuse all, those of the next. When there is enough again the highest order gives back first: half of its share
// in an interval at no load, and less the closer the load is to the threshold, where what is given back would bring it over.
func advance(levels []*level) {
	first, last := 0, 0 // the lowest order that is short and can refuse more, the highest that is not and refuses
	for _, l := range levels {
		if l.load >= 1 && l.share < 1 && (first == 0 || l.order < first) {
			first = l.order
		}
		if l.load < enough && l.share > 0 && l.order > last {
			last = l.order
		}
	}
	for _, l := range levels {
		switch {
		case l.load >= 1 && l.order == first:
			if l.share += max(step/5, min(step, l.load-1)); l.share > 1-1e-9 {
				l.share = 1
			}
		case l.load < enough && l.order == last:
			if l.share *= 1 - (enough-l.load)/enough/2; l.share < least {
				l.share = 0
			}
		}
	}
}
