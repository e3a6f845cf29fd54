package main

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSigma(t *testing.T) {
	const rate = 1000
	for _, test := range []struct {
		name   string
		events []event
		want   float64
	}{
		{"none", nil, 0},
		{"one", []event{{at: time.Second, n: 700}}, 700},
		{"at the rate", []event{{at: 0, n: 100}, {at: 100 * time.Millisecond, n: 100}, {at: 200 * time.Millisecond, n: 100}}, 100},
		{"two at once", []event{{at: time.Second, n: 100}, {at: time.Second, n: 100}}, 200},
		{"idle time earns nothing", []event{{at: 0, n: 100}, {at: time.Hour, n: 300}}, 300},
		{"half the time", []event{{at: 0, n: 100}, {at: 50 * time.Millisecond, n: 100}}, 150},
	} {
		if got := sigma(test.events, rate); math.Abs(got-test.want) > 1e-6 {
			t.Errorf("%s: sigma is %v, want %v", test.name, got, test.want)
		}
	}
}

// TestWindows compares with what a slow count of every interval gives.
func TestWindows(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	for range 200 {
		var events []event
		at := time.Duration(0)
		for range random.IntN(40) {
			at += time.Duration(random.IntN(4)) * time.Millisecond
			events = append(events, event{at: at, source: random.IntN(len(sources)), n: 1 + random.IntN(100)})
		}
		const rate, width = 5000, 10 * time.Millisecond
		worst, most, sum := 0, 0.0, 0
		for i, first := range events {
			n := 0
			for _, last := range events[i:] {
				n += last.n
				if last.at-first.at < width {
					worst = max(worst, n)
				}
				most = max(most, float64(n)-rate*(last.at-first.at).Seconds())
			}
			sum += first.n
		}
		if got := worstWindow(events, width); got != worst {
			t.Fatalf("the worst window has %d units, want %d: %v", got, worst, events)
		}
		if got := sigma(events, rate); math.Abs(got-most) > 1e-6 {
			t.Fatalf("sigma is %v, want %v: %v", got, most, events)
		}
		for _, bin := range bins(events, width, at+1) {
			for _, n := range bin {
				sum -= n
			}
		}
		if sum != 0 {
			t.Fatalf("%d units are in no bin: %v", sum, events)
		}
	}
}

func TestBins(t *testing.T) {
	ms := time.Millisecond
	got := bins([]event{{0, 0, 1}, {9 * ms, 2, 5}, {10 * ms, 1, 7}, {24 * ms, 0, 3}, {25 * ms, 0, 9}}, 10*ms, 25*ms)
	// The last bin is whole.
	want := [][len(sources)]int{{1, 0, 5}, {0, 7, 0}, {12, 0, 0}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	levels := []event{{at: 1 * ms, n: 1}, {at: 2 * ms, n: 3}, {at: 3 * ms, n: 2}, {at: 25 * ms, n: 0}}
	if diff := cmp.Diff([]int{3, 2, 2, 0}, levelBins(levels, 10*ms, 40*ms)); diff != "" {
		t.Error(diff)
	}
}

func TestPercentile(t *testing.T) {
	list := []time.Duration{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for p, want := range map[float64]time.Duration{0: 1, 50: 5, 99: 10, 100: 10} {
		if got := percentile(list, p); got != want {
			t.Errorf("p%v is %v, want %v", p, got, want)
		}
	}
	if got := percentile(nil, 50); got != 0 {
		t.Errorf("p50 of nothing is %v", got)
	}
}

// TestConnections has three connections: one that both sides end, one that is
// refused, one that is reset.
func TestConnections(t *testing.T) {
	peer := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(innerAddr, port) }
	in := func(at time.Duration, port uint16, flags uint8) arrival {
		return arrival{at: at, peer: peer(port), tcp: true, flags: flags}
	}
	out := func(at time.Duration, port uint16, flags uint8) arrival {
		a := in(at, port, flags)
		a.outgoing = true
		return a
	}
	list := []arrival{
		in(1, 1, flagSYN), out(2, 1, flagSYN|flagACK),
		in(3, 2, flagSYN), // no answer
		in(4, 3, flagSYN), out(5, 3, flagSYN|flagACK), out(6, 3, flagSYN|flagACK),
		out(7, 1, flagFIN|flagACK), in(8, 1, flagACK), in(9, 1, flagFIN|flagACK), out(10, 1, flagACK),
		in(11, 3, flagRST), in(12, 3, flagRST),
	}
	got := inFlight(list)
	want := []event{{at: 2, n: 1}, {at: 5, n: 2}, {at: 9, n: 1}, {at: 11, n: 0}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(event{})); diff != "" {
		t.Error(diff)
	}
	if got := most(got); got != 2 {
		t.Errorf("at most %d connections, want 2", got)
	}
}

// TestAttribute has a port that a second source uses again, and datagrams of two
// sources behind one port.
func TestAttribute(t *testing.T) {
	peer := netip.AddrPortFrom(innerAddr, 4000)
	bytes, datagrams := attribute([]arrival{
		{at: 1, peer: peer, tcp: true, flags: flagSYN},
		{at: 2, peer: peer, tcp: true, flags: flagACK, payload: 10, first: 'B'},
		{at: 3, peer: peer, tcp: true, flags: flagACK, payload: 20, first: 'A'}, // in the middle
		{at: 4, peer: peer, tcp: true, flags: flagACK, payload: 1, first: 'B', outgoing: true},
		{at: 5, peer: peer, tcp: true, flags: flagSYN},
		{at: 6, peer: peer, tcp: true, flags: flagACK, payload: 30, first: 'G'},
		{at: 7, peer: peer, payload: 160, first: 'A'},
		{at: 8, peer: peer, payload: 160, first: 'G'},
		{at: 9, peer: peer, payload: 160, first: '?'},
	})
	if diff := cmp.Diff([]event{{2, 1, 10}, {3, 1, 20}, {6, 2, 30}}, bytes, cmp.AllowUnexported(event{})); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]event{{7, 0, 1}, {8, 2, 1}}, datagrams, cmp.AllowUnexported(event{})); diff != "" {
		t.Error(diff)
	}
	if got := only(bytes, 1); len(got) != 2 || len(bytes) != 3 {
		t.Errorf("B sent %v of %v", got, bytes)
	}
}
