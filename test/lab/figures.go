package lab

import (
	"math"
	"net/netip"
	"slices"
	"time"
)

// An Event is n units at an instant: bytes of a segment, or one datagram.
type Event struct {
	At time.Duration
	N  int
}

// Bytes turns arrivals into events that count payload bytes. Segments without payload and
// TCP retransmissions are left out.
func Bytes(list []Arrival) []Event {
	type segment struct {
		from, to netip.AddrPort
		seq      uint32
	}
	sent := make(map[segment]int, len(list))
	events := make([]Event, 0, len(list))
	for _, a := range list {
		n := a.Payload
		if a.Flags != 0 {
			key := segment{a.From, a.To, a.Seq}
			n -= sent[key]
			sent[key] = max(sent[key], a.Payload)
		}
		if n > 0 {
			events = append(events, Event{a.At, n})
		}
	}
	return events
}

// Packets turns arrivals into events of one unit each.
func Packets(list []Arrival) []Event {
	events := make([]Event, len(list))
	for i, a := range list {
		events[i] = Event{a.At, 1}
	}
	return events
}

// Total returns the sum of the units of all events.
func Total(events []Event) int {
	n := 0
	for _, e := range events {
		n += e.N
	}
	return n
}

// MeanRate returns the units a second from the first event to the last one. The first
// event's units do not count: they belong to the time before it.
func MeanRate(events []Event) float64 {
	if len(events) < 2 {
		return 0
	}
	first, last := events[0], events[len(events)-1]
	return float64(Total(events[1:])) / (last.At - first.At).Seconds()
}

// Sigma returns the smallest burst that explains events at rate units a second: any
// interval of length t contains at most rate*t + sigma units. The sigma of a single event
// is its size.
func Sigma(events []Event, rate float64) float64 {
	s, _ := WorstInterval(events, rate)
	return s
}

// WorstInterval returns sigma and the events of the interval in which it occurs.
func WorstInterval(events []Event, rate float64) (sigma float64, in []Event) {
	var count float64
	least := math.Inf(1) // minimum over events of the units before the event minus rate*t
	first := 0           // index of that event
	for i, e := range events {
		free := rate * e.At.Seconds()
		if count-free < least {
			least, first = count-free, i
		}
		count += float64(e.N)
		if s := count - free - least; s > sigma {
			sigma, in = s, events[first:i+1]
		}
	}
	return sigma, in
}

// WorstWindow returns the largest number of units in any interval of the given width.
func WorstWindow(events []Event, width time.Duration) (worst int) {
	sum, oldest := 0, 0
	for _, e := range events {
		sum += e.N
		for e.At-events[oldest].At >= width {
			sum -= events[oldest].N
			oldest++
		}
		worst = max(worst, sum)
	}
	return worst
}

// MaxLevel returns the highest level from start up to end, including the level at start.
func MaxLevel(levels []Event, start, end time.Duration) (highest int) {
	before := Between(levels, 0, start)
	for _, l := range levels[max(0, len(before)-1):] {
		if l.At >= end {
			break
		}
		highest = max(highest, l.N)
	}
	return highest
}

// Gaps returns the times between successive events, sorted.
func Gaps(events []Event) []time.Duration {
	var list []time.Duration
	for i := 1; i < len(events); i++ {
		list = append(list, events[i].At-events[i-1].At)
	}
	slices.Sort(list)
	return list
}

// Between returns the events from start up to end.
func Between(events []Event, start, end time.Duration) []Event {
	at := func(e Event, t time.Duration) int { return int(e.At - t) }
	i, _ := slices.BinarySearchFunc(events, start, at)
	j, _ := slices.BinarySearchFunc(events, end, at)
	return events[i:max(i, j)]
}

// Percentile returns the value at or below which p percent of sorted lie.
func Percentile[T any](sorted []T, p float64) T {
	var none T
	if len(sorted) == 0 {
		return none
	}
	rank := int(math.Ceil(p/100*float64(len(sorted)))) - 1
	return sorted[max(0, min(rank, len(sorted)-1))]
}

// Jain returns Jain's fairness index (Jain, Chiu and Hawe, 1984) of shares: 1 when all
// are equal, 1/n when one has everything.
func Jain(shares []float64) float64 {
	var sum, squares float64
	for _, x := range shares {
		sum += x
		squares += x * x
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / (float64(len(shares)) * squares)
}

// Levels returns the number of open connections after each change, from a capture of both
// directions at the server: a connection is open from the SYN-ACK until both sides have
// sent a FIN, or either a RST. Connections in the accept queue count too.
func Levels(list []Arrival) []Event {
	const in, out = 1, 2
	var levels []Event
	closing := map[netip.AddrPort]int{} // sides of each open connection that sent a FIN
	for _, a := range list {
		if a.Flags == 0 {
			continue
		}
		peer := a.From
		if a.Outgoing {
			peer = a.To
		}
		sides, open := closing[peer]
		switch {
		case !open && a.Outgoing && a.Flags&(SYN|ACK) == SYN|ACK:
			closing[peer] = 0
			levels = append(levels, Event{a.At, len(closing)})
			continue
		case !open:
			continue
		case a.Flags&FIN != 0 && a.Outgoing:
			sides |= out
		case a.Flags&FIN != 0:
			sides |= in
		}
		closing[peer] = sides
		if sides == in|out || a.Flags&RST != 0 {
			delete(closing, peer)
			levels = append(levels, Event{a.At, len(closing)})
		}
	}
	return levels
}
