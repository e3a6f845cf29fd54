package netns

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// every returns count events of n units, gap apart.
func every(gap time.Duration, count, n int) []event {
	var events []event
	for i := range count {
		events = append(events, event{time.Duration(i) * gap, n})
	}
	return events
}

func TestSigma(t *testing.T) {
	const rate = 1000 // units a second: one a millisecond
	steady := every(time.Millisecond, 100, 1)
	late := every(time.Millisecond, 100, 1)
	for i := 50; i < 60; i++ {
		late[i].at = 60 * time.Millisecond // ten held up, then sent at once
	}
	idle := every(time.Millisecond, 100, 1)
	for i := 50; i < 100; i++ {
		idle[i].at += time.Second // no credit is due for this
	}
	credit := append(every(time.Millisecond, 50, 1), event{time.Second, 400}, event{time.Second, 50})
	for _, test := range []struct {
		name   string
		events []event
		want   float64
	}{
		{"none", nil, 0},
		{"one unit", []event{{5, 1}}, 1},
		{"one large unit", []event{{5, 1448}}, 1448},
		{"steady", steady, 1},
		{"idle", idle, 1},
		{"all at once", every(0, 100, 1), 100},
		{"twice the rate", every(500*time.Microsecond, 101, 1), 51},
		{"held up", late, 11}, // 50 to 60 at 60 ms
		{"credit for idle time", credit, 450},
		{"half the rate", every(2*time.Millisecond, 100, 1), 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := sigma(test.events, rate); math.Abs(got-test.want) > 1e-6 {
				t.Errorf("sigma is %v, want %v", got, test.want)
			}
		})
	}
}

// TestSigmaOracle compares with the definition: the worst of all intervals.
func TestSigmaOracle(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 200 {
		var events []event
		var at time.Duration
		for range 1 + r.IntN(40) {
			at += time.Duration(r.IntN(int(2 * time.Millisecond)))
			events = append(events, event{at, 1 + r.IntN(1500)})
		}
		rate := 1 + 2e6*r.Float64()
		want := 0.0
		_, in := worstInterval(events, rate)
		for i := range events {
			for k := i; k < len(events); k++ {
				n := float64(total(events[i : k+1]))
				want = max(want, n-rate*(events[k].at-events[i].at).Seconds())
			}
		}
		if got := sigma(events, rate); math.Abs(got-want) > 1e-3 {
			t.Fatalf("sigma of %v at %v is %v, want %v", events, rate, got, want)
		}
		if got := float64(total(in)) - rate*(in[len(in)-1].at-in[0].at).Seconds(); math.Abs(got-want) > 1e-3 {
			t.Fatalf("the worst interval of %v at %v has a sigma of %v, want %v", events, rate, got, want)
		}
	}
}

func TestMeanAndGaps(t *testing.T) {
	events := every(time.Millisecond, 1001, 10)
	if got := meanRate(events); math.Abs(got-10000) > 1e-6 {
		t.Errorf("mean rate is %v, want 10000", got)
	}
	if got := total(between(events, 100*time.Millisecond, 200*time.Millisecond)); got != 1000 {
		t.Errorf("between 100 and 200 ms are %d, want 1000", got)
	}
	events[500].at += 300 * time.Microsecond
	sorted := gaps(events)
	for _, test := range []struct {
		p    float64
		want time.Duration
	}{
		{0, 700 * time.Microsecond},
		{50, time.Millisecond},
		{99, time.Millisecond},
		{100, 1300 * time.Microsecond},
	} {
		if got := percentile(sorted, test.p); got != test.want {
			t.Errorf("gap at %v %% is %v, want %v", test.p, got, test.want)
		}
	}
}

// TestEnvelope holds the checks to both sides: what they accept, and what not.
func TestEnvelope(t *testing.T) {
	e := envelope{rate: 1e6, burst: 5000, unit: "bytes"}
	steady := every(time.Millisecond, 1000, 1000)
	burst := func(n int) []event {
		events := every(time.Millisecond, 1000, 1000)
		events[500].n += n
		return events
	}
	sawtooth := every(20*time.Millisecond, 50, 20000)
	stalled := stallReport{{late: 10 * time.Millisecond}}
	long := stallReport{{late: 500 * time.Millisecond}}
	for _, test := range []struct {
		name   string
		events []event
		stalls stallReport
		ok     bool
	}{
		{"steady", steady, nil, true},
		{"nothing", nil, nil, false},
		{"small burst", burst(3900), nil, true},
		{"burst", burst(4100), nil, false},
		{"burst with a stall", burst(13900), stalled, true},
		{"burst beyond the stall", burst(14100), stalled, false},
		{"a stall does not excuse everything", burst(60000), long, false},
		{"sawtooth that a stall would excuse each time", sawtooth, stallReport{{late: 20 * time.Millisecond}}, false},
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

func TestOwner(t *testing.T) {
	for _, test := range []struct {
		name string
		pid  int
		ok   bool
	}{
		{"shaperd-123-4-client", 123, true},
		{"shaperd-123", 0, false},
		{"shaperd-x-1-client", 0, false},
		{"shaperd--1-1-client", 0, false},
		{"other-123-4-client", 0, false},
	} {
		if pid, ok := owner(test.name); ok != test.ok || ok && pid != test.pid {
			t.Errorf("owner of %s is %d, %v, want %d, %v", test.name, pid, ok, test.pid, test.ok)
		}
	}
}
