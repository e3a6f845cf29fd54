package netns

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"
)

// An event is n units at an instant: bytes of a segment, or one datagram.
type event struct {
	at time.Duration
	n  int
}

// bytesOf turns arrivals into events that count their payload. Segments without
// any are left out, and so is what TCP sent before.
func bytesOf(list []arrival) []event {
	type place struct {
		from, to netip.AddrPort
		seq      uint32
	}
	sent := map[place]int{}
	var events []event
	for _, a := range list {
		n := a.payload
		if a.flags != 0 {
			key := place{a.from, a.to, a.seq}
			n -= sent[key]
			sent[key] = max(sent[key], a.payload)
		}
		if n > 0 {
			events = append(events, event{a.at, n})
		}
	}
	return events
}

// packetsOf turns arrivals into events that count one each.
func packetsOf(list []arrival) []event {
	events := make([]event, len(list))
	for i, a := range list {
		events[i] = event{a.at, 1}
	}
	return events
}

// sigma is the smallest burst that explains events at rate units a second: in
// any interval of length t there are at most rate*t + sigma units. One unit alone
// has its own size as sigma.
func sigma(events []event, rate float64) float64 {
	s, _ := worstInterval(events, rate)
	return s
}

// worstInterval returns sigma, and the events in the interval that has it.
func worstInterval(events []event, rate float64) (sigma float64, in []event) {
	var count float64
	least := math.Inf(1) // of units before an event, less rate*t at the event
	first := 0           // the event that has it
	for i, e := range events {
		free := rate * e.at.Seconds()
		if count-free < least {
			least, first = count-free, i
		}
		count += float64(e.n)
		if s := count - free - least; s > sigma {
			sigma, in = s, events[first:i+1]
		}
	}
	return sigma, in
}

func total(events []event) int {
	n := 0
	for _, e := range events {
		n += e.n
	}
	return n
}

// meanRate is the units a second from the first event to the last one. The first
// event's units belong to the time before it.
func meanRate(events []event) float64 {
	if len(events) < 2 {
		return 0
	}
	first, last := events[0], events[len(events)-1]
	return float64(total(events[1:])) / (last.at - first.at).Seconds()
}

// gaps returns the times between events that follow each other, sorted.
func gaps(events []event) []time.Duration {
	var list []time.Duration
	for i := 1; i < len(events); i++ {
		list = append(list, events[i].at-events[i-1].at)
	}
	slices.Sort(list)
	return list
}

// percentile returns the value below or at which p percent of sorted lie.
func percentile[T any](sorted []T, p float64) T {
	var none T
	if len(sorted) == 0 {
		return none
	}
	rank := int(math.Ceil(p/100*float64(len(sorted)))) - 1
	return sorted[max(0, min(rank, len(sorted)-1))]
}

// between returns the events from start up to end.
func between(events []event, start, end time.Duration) []event {
	at := func(e event, t time.Duration) int { return int(e.at - t) }
	i, _ := slices.BinarySearchFunc(events, start, at)
	j, _ := slices.BinarySearchFunc(events, end, at)
	return events[i:max(i, j)]
}

// An envelope is what events are held to: a rate in units a second, and the units
// that may exceed it at once.
type envelope struct {
	rate, burst float64
	unit        string
}

// stallAlibi is how long a stall of the machine may be to excuse a burst.
// Behind a longer one a measurement proves nothing.
const stallAlibi = 50 * time.Millisecond

// checkBurst holds events to the envelope. Over all of them, a stall of the
// machine excuses the units that it held up; but in most of five equal windows
// there must be no need of an excuse.
func (e envelope) checkBurst(events []event, stalls stallReport) error {
	if len(events) == 0 {
		return fmt.Errorf("nothing arrived")
	}
	allowed := e.burst + e.rate*min(stalls.longest(), stallAlibi).Seconds()
	if s := sigma(events, e.rate); s > allowed {
		return fmt.Errorf("sigma is %.1f %s, want at most %.1f + %.1f for the longest stall of %v",
			s, e.unit, e.burst, allowed-e.burst, stalls.longest())
	}
	const windows = 5
	first, last := events[0].at, events[len(events)-1].at
	var sigmas []float64
	for i := range windows {
		start := first + (last-first)*time.Duration(i)/windows
		end := first + (last-first)*time.Duration(i+1)/windows
		sigmas = append(sigmas, sigma(between(events, start, end), e.rate))
	}
	slices.Sort(sigmas)
	if s := sigmas[windows/2]; s > e.burst {
		return fmt.Errorf("sigma is beyond %.1f %s in most of %d windows: %.1f", e.burst, e.unit, windows, sigmas)
	}
	return nil
}

// checkMean compares the mean rate of events with the envelope's, which it may
// miss by tolerance (0.02 is 2 %), and fall short of by what stalls cost.
func (e envelope) checkMean(events []event, tolerance float64, stalls stallReport) error {
	got := meanRate(events)
	if most := e.rate * (1 + tolerance); got > most {
		return fmt.Errorf("mean rate is %.0f %s/s, want at most %.0f", got, e.unit, most)
	}
	if len(events) == 0 {
		return fmt.Errorf("nothing arrived")
	}
	span := events[len(events)-1].at - events[0].at
	lost := stalls.share(span)
	if least := e.rate * (1 - tolerance - lost); got < least {
		return fmt.Errorf("mean rate is %.0f %s/s, want at least %.0f (stalls of %.1f ms in all)",
			got, e.unit, least, 1000*stalls.sum())
	}
	return nil
}
