package cluster

import (
	"cmp"
	"slices"
)

// level is the water level of weighted max-min fairness: a host gets what it wants, or num/den for
// each unit of its weight if that is less. If it is not limited, all get what they want.
type level struct {
	limited  bool
	num, den int64
}

// level returns the water level of a bucket, at which all of it is used. Products stay below 2^53: a
// script computes them in floating point.
func (b *bucket) level() level {
	var wants []*holder
	var weights int64
	for _, h := range b.holders {
		if h.want > 0 {
			wants = append(wants, h)
			weights += h.weight
		}
	}
	slices.SortFunc(wants, func(a, b *holder) int { return cmp.Compare(a.want*b.weight, b.want*a.weight) })
	left := Whole
	for _, h := range wants {
		if h.want*weights >= left*h.weight {
			return level{true, left, weights}
		}
		left -= h.want
		weights -= h.weight
	}
	return level{}
}

// target is what a host should have.
func (l level) target(h *holder) int64 {
	if !l.limited {
		return h.want
	}
	return min(h.want, l.num*h.weight/l.den)
}
