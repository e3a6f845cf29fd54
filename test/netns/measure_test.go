package netns

import (
	"fmt"
	"slices"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// An envelope is the bound on events: a rate in units a second, and a burst in units.
type envelope struct {
	rate, burst float64
	unit        string
}

// stallAllowance is the longest stall of the machine that excuses a burst. After a longer
// one a measurement proves nothing.
const stallAllowance = 50 * time.Millisecond

// checkBurst checks the burst of events. A stall of the machine excuses the units that it
// delayed: over all events the longest stall counts, and in most of five equal windows
// the median of the windows' longest stalls.
func (e envelope) checkBurst(events []lab.Event, stalls stallReport) error {
	if len(events) == 0 {
		return fmt.Errorf("nothing arrived")
	}
	stalls = stalls.machine()
	allowed := e.burst + e.rate*min(stalls.longest(), stallAllowance).Seconds()
	if s := lab.Sigma(events, e.rate); s > allowed {
		return fmt.Errorf("sigma is %.1f %s, want at most %.1f, plus %.1f for the longest stall of %v",
			s, e.unit, e.burst, allowed-e.burst, stalls.longest())
	}
	const windows = 5
	median := min(stalls.medianWindow(windows), stallAllowance)
	first, last := events[0].At, events[len(events)-1].At
	var sigmas []float64
	for i := range windows {
		start := first + (last-first)*time.Duration(i)/windows
		end := first + (last-first)*time.Duration(i+1)/windows
		sigmas = append(sigmas, lab.Sigma(lab.Between(events, start, end), e.rate))
	}
	slices.Sort(sigmas)
	allowed = e.burst + e.rate*median.Seconds()
	if s := sigmas[windows/2]; s > allowed {
		return fmt.Errorf("sigma exceeds %.1f %s in most of %d windows, where stalls took up to %v: %.1f", allowed, e.unit, windows, median, sigmas)
	}
	return nil
}

// checkMean compares the mean rate of events with the envelope's. It may differ by
// tolerance (0.02 is 2 %), and be lower by the time lost in stalls.
func (e envelope) checkMean(events []lab.Event, tolerance float64, stalls stallReport) error {
	got := lab.MeanRate(events)
	if most := e.rate * (1 + tolerance); got > most {
		return fmt.Errorf("mean rate is %.0f %s/s, want at most %.0f", got, e.unit, most)
	}
	if len(events) == 0 {
		return fmt.Errorf("nothing arrived")
	}
	span := events[len(events)-1].At - events[0].At
	lost := stalls.share(span)
	if least := e.rate * (1 - tolerance - lost); got < least {
		return fmt.Errorf("mean rate is %.0f %s/s, want at least %.0f (stalls of %.1f ms in all)",
			got, e.unit, least, 1000*stalls.sum())
	}
	return nil
}
