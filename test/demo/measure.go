package main

import (
	"math"
	"net/netip"
	"slices"
	"time"
)

// An event is n units at an instant.
type event struct {
	at     time.Duration
	source int // index in sources
	n      int
}

// attribute returns what came in, by source: payload bytes by TCP, and datagrams.
// Behind the shaper all packets come from its address, so the tag tells: a
// connection's first byte, or a datagram's.
func attribute(list []arrival) (bytes, datagrams []event) {
	owners := map[netip.AddrPort]int{}
	for _, a := range list {
		if a.outgoing {
			continue
		}
		if a.flags&flagSYN != 0 {
			delete(owners, a.peer)
		}
		if a.payload == 0 {
			continue
		}
		of, known := owners[a.peer]
		if !known || !a.tcp {
			of = slices.IndexFunc(sources[:], func(s source) bool { return s.tag == a.first })
		}
		switch {
		case of < 0: // nobody's
		case a.tcp:
			owners[a.peer] = of
			bytes = append(bytes, event{a.at, of, a.payload})
		default:
			datagrams = append(datagrams, event{a.at, of, 1})
		}
	}
	return bytes, datagrams
}

// only returns the events of one source.
func only(events []event, of int) []event {
	return slices.DeleteFunc(slices.Clone(events), func(e event) bool { return e.source != of })
}

// inFlight returns how many connections were open at the downstream after each
// change: from its SYN-ACK until both sides have sent a FIN, or one a RST. So
// they are counted from outside, and what waits in the accept queue counts too.
func inFlight(list []arrival) []event {
	const in, out = 1, 2
	var levels []event
	closing := map[netip.AddrPort]int{} // which sides of an open connection are
	for _, a := range list {
		if !a.tcp {
			continue
		}
		sides, open := closing[a.peer]
		switch {
		case !open && a.outgoing && a.flags&(flagSYN|flagACK) == flagSYN|flagACK:
			closing[a.peer] = 0
			levels = append(levels, event{at: a.at, n: len(closing)})
			continue
		case !open:
			continue
		case a.flags&flagFIN != 0 && a.outgoing:
			sides |= out
		case a.flags&flagFIN != 0:
			sides |= in
		}
		closing[a.peer] = sides
		if sides == in|out || a.flags&flagRST != 0 {
			delete(closing, a.peer)
			levels = append(levels, event{at: a.at, n: len(closing)})
		}
	}
	return levels
}

// most is the highest level.
func most(levels []event) (n int) {
	for _, l := range levels {
		n = max(n, l.n)
	}
	return n
}

// sigma is the smallest burst that explains events at rate units a second: in any
// interval of length t there are at most rate*t + sigma units.
func sigma(events []event, rate float64) float64 {
	var worst, count float64
	least := math.Inf(1) // of units before an event, less rate*t at the event
	for _, e := range events {
		free := rate * e.at.Seconds()
		least = min(least, count-free)
		count += float64(e.n)
		worst = max(worst, count-free-least)
	}
	return worst
}

// worstWindow is the most units within any interval of that width.
func worstWindow(events []event, width time.Duration) (worst int) {
	sum, oldest := 0, 0
	for _, e := range events {
		sum += e.n
		for e.at-events[oldest].at >= width {
			sum -= events[oldest].n
			oldest++
		}
		worst = max(worst, sum)
	}
	return worst
}

// bins adds up events by source in intervals of that width, up to end.
func bins(events []event, width, end time.Duration) [][len(sources)]int {
	b := make([][len(sources)]int, int((end+width-1)/width))
	for _, e := range events {
		if i := int(e.at / width); e.at >= 0 && i < len(b) {
			b[i][e.source] += e.n
		}
	}
	return b
}

// levelBins is the highest level in each interval of that width, up to end.
func levelBins(levels []event, width, end time.Duration) []int {
	b := make([]int, int((end+width-1)/width))
	level, next := 0, 0
	for i := range b {
		b[i] = level
		for ; next < len(levels) && levels[next].at < time.Duration(i+1)*width; next++ {
			level = levels[next].n
			b[i] = max(b[i], level)
		}
	}
	return b
}

// percentile returns the value at or below which p percent of sorted lie.
func percentile(sorted []time.Duration, p float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(math.Ceil(p/100*float64(len(sorted)))) - 1
	return sorted[max(0, min(rank, len(sorted)-1))]
}
