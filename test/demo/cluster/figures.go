package main

import (
	"slices"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// A flow is the bytes that arrived at the downstream: all, and those of each gateway.
type flow struct {
	all       []lab.Event
	byGateway [gateways][]lab.Event
}

func newFlow(list []lab.Arrival) (f flow) {
	f.all = lab.Bytes(list)
	for i := range f.byGateway {
		f.byGateway[i] = lab.Bytes(slices.DeleteFunc(slices.Clone(list), func(a lab.Arrival) bool { return a.From.Addr() != gatewayAddr(i) }))
	}
	return f
}

// Figures are the results of one phase.
type figures struct {
	excess  float64         // most bytes beyond the rate in any interval
	use     float64         // mean rate, as a part of the rate: there is demand for more all the time
	follows []time.Duration // of each move of the hot spot, sorted: until its gateway has its part, or never
}

// excessTime returns the excess as a time at the rate.
func (f figures) excessTime() time.Duration {
	return time.Duration(f.excess / rate * float64(time.Second))
}

// followed returns how many moves were followed before the next, and the median time.
func (f figures) followed() (n int, median time.Duration) {
	return len(f.follows) - count(f.follows, never), lab.Percentile(f.follows, 50)
}

func count[T comparable](list []T, v T) (n int) {
	for _, x := range list {
		if x == v {
			n++
		}
	}
	return n
}

// measure returns the figures of a phase.
func measure(f flow, p phase) figures {
	events := lab.Between(f.all, p.start, p.end)
	got := figures{
		excess: lab.Sigma(events, rate),
		use:    float64(lab.Total(events)) / rate / (p.end - p.start).Seconds(),
	}
	for _, move := range p.moves() {
		got.follows = append(got.follows, follow(f.byGateway[hotAt(move)], move))
	}
	slices.Sort(got.follows)
	return got
}

const (
	// followWindow is the window in which a gateway must have its part.
	followWindow = 50 * time.Millisecond

	// followPart is that part of what the others leave.
	followPart = 0.9

	never = visit
)

// follow returns how long after a move of the hot spot its new gateway passes what the others leave
// it, or never. The window in which it does so is included.
func follow(events []lab.Event, move time.Duration) time.Duration {
	need := followPart * leftByOthers * followWindow.Seconds()
	sum, oldest := 0, 0
	events = lab.Between(events, move, move+visit)
	for _, e := range events {
		sum += e.N
		for e.At-events[oldest].At > followWindow {
			sum -= events[oldest].N
			oldest++
		}
		if float64(sum) >= need {
			return e.At - move
		}
	}
	return never
}
