package netns

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// every returns count events of n units, gap apart.
func every(gap time.Duration, count, n int) []lab.Event {
	var events []lab.Event
	for i := range count {
		events = append(events, lab.Event{At: time.Duration(i) * gap, N: n})
	}
	return events
}

// TestEnvelope tests what the checks accept and what they reject.
func TestEnvelope(t *testing.T) {
	e := envelope{rate: 1e6, burst: 5000, unit: "bytes"}
	steady := every(time.Millisecond, 1000, 1000)
	burst := func(n int) []lab.Event {
		events := every(time.Millisecond, 1000, 1000)
		events[500].N += n
		return events
	}
	sawtooth := every(20*time.Millisecond, 50, 20000)
	stalled := stallReport{{late: 10 * time.Millisecond}}
	long := stallReport{{late: 500 * time.Millisecond}}
	for _, test := range []struct {
		name   string
		events []lab.Event
		stalls stallReport
		ok     bool
	}{
		{"steady", steady, nil, true},
		{"nothing", nil, nil, false},
		{"small burst", burst(3900), nil, true},
		{"burst", burst(4100), nil, false},
		{"burst with a stall", burst(13900), stalled, true},
		{"burst beyond the stall", burst(14100), stalled, false},
		{"burst beyond the stall allowance", burst(60000), long, false},
		{"sawtooth with a single stall", sawtooth, stallReport{{late: 20 * time.Millisecond}}, false},
	} {
		if err := e.checkBurst(test.events, test.stalls); (err == nil) != test.ok {
			t.Errorf("%s: %v", test.name, err)
		}
	}
	for _, test := range []struct {
		name   string
		gap    time.Duration
		stalls stallReport
		ok     bool
	}{
		{"exact", time.Millisecond, nil, true},
		{"nothing", 0, nil, false},
		{"1.5 % fast", 985 * time.Microsecond, nil, true},
		{"3 % fast", 970 * time.Microsecond, nil, false},
		{"3 % fast with a stall", 970 * time.Microsecond, stalled, false},
		{"3 % slow", 1031 * time.Microsecond, nil, false},
		{"3 % slow with stalls of 2 %", 1031 * time.Microsecond, stallReport{{late: 20 * time.Millisecond}}, true},
	} {
		count := 1000
		if test.gap == 0 {
			count = 0
		}
		if err := e.checkMean(every(test.gap, count, 1000), 0.02, test.stalls); (err == nil) != test.ok {
			t.Errorf("mean, %s: %v", test.name, err)
		}
	}
}

func TestStallReport_MaxWithin(t *testing.T) {
	at := func(due time.Duration, late time.Duration) stall {
		return stall{at: time.Unix(0, 0).Add(due), late: late}
	}
	r := stallReport{at(90*time.Millisecond, 4*time.Millisecond), at(0, 1*time.Millisecond), at(100*time.Millisecond, 2*time.Millisecond), at(200*time.Millisecond, 5*time.Millisecond)}
	for window, want := range map[time.Duration]time.Duration{
		10 * time.Millisecond:  5 * time.Millisecond,
		11 * time.Millisecond:  6 * time.Millisecond,
		101 * time.Millisecond: 7 * time.Millisecond,
		111 * time.Millisecond: 11 * time.Millisecond,
		time.Second:            12 * time.Millisecond,
	} {
		if got := r.maxWithin(window); got != want {
			t.Errorf("%v within %v, want %v", got, window, want)
		}
	}
	if got := stallReport(nil).maxWithin(time.Second); got != 0 {
		t.Errorf("%v without a stall", got)
	}
}
