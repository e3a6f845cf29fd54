package lab

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const ms = time.Millisecond

// every returns count events of n units, gap apart.
func every(gap time.Duration, count, n int) []Event {
	var events []Event
	for i := range count {
		events = append(events, Event{time.Duration(i) * gap, n})
	}
	return events
}

func TestSigma(t *testing.T) {
	const rate = 1000 // units a second: one a millisecond
	late := every(ms, 100, 1)
	for i := 50; i < 60; i++ {
		late[i].At = 60 * ms // ten delayed, then sent at once
	}
	idle := every(ms, 100, 1)
	for i := 50; i < 100; i++ {
		idle[i].At += time.Second // idle time earns no credit
	}
	credit := append(every(ms, 50, 1), Event{time.Second, 400}, Event{time.Second, 50})
	for _, test := range []struct {
		name   string
		events []Event
		want   float64
	}{
		{"none", nil, 0},
		{"one unit", []Event{{5, 1}}, 1},
		{"one large unit", []Event{{5, 1448}}, 1448},
		{"steady", every(ms, 100, 1), 1},
		{"idle", idle, 1},
		{"all at once", every(0, 100, 1), 100},
		{"twice the rate", every(ms/2, 101, 1), 51},
		{"delayed", late, 11}, // 50 to 60 at 60 ms
		{"credit for idle time", credit, 450},
		{"half the rate", every(2*ms, 100, 1), 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := Sigma(test.events, rate); math.Abs(got-test.want) > 1e-6 {
				t.Errorf("sigma is %v, want %v", got, test.want)
			}
		})
	}
}

// TestWorst_MatchesBruteForce compares with the definition: the worst of all intervals.
func TestWorst_MatchesBruteForce(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 300 {
		var events []Event
		var at time.Duration
		for range 1 + r.IntN(40) {
			at += time.Duration(r.IntN(4)) * ms / 2 // some at once
			events = append(events, Event{at, 1 + r.IntN(1500)})
		}
		rate := 1 + 2e6*r.Float64()
		width := time.Duration(1+r.IntN(10)) * ms
		sigma, window := 0.0, 0
		for i, first := range events {
			n := 0
			for _, last := range events[i:] {
				n += last.N
				sigma = max(sigma, float64(n)-rate*(last.At-first.At).Seconds())
				if last.At-first.At < width {
					window = max(window, n)
				}
			}
		}
		if got := Sigma(events, rate); math.Abs(got-sigma) > 1e-3 {
			t.Fatalf("sigma of %v at %v is %v, want %v", events, rate, got, sigma)
		}
		_, in := WorstInterval(events, rate)
		if got := float64(Total(in)) - rate*(in[len(in)-1].At-in[0].At).Seconds(); math.Abs(got-sigma) > 1e-3 {
			t.Fatalf("the worst interval of %v at %v has a sigma of %v, want %v", events, rate, got, sigma)
		}
		if got := WorstWindow(events, width); got != window {
			t.Fatalf("the worst window of %v in %v has %d units, want %d", width, events, got, window)
		}
	}
}

func TestMeanRateAndGaps(t *testing.T) {
	events := every(ms, 1001, 10)
	if got := MeanRate(events); math.Abs(got-10000) > 1e-6 {
		t.Errorf("the mean is %v a second, want 10000", got)
	}
	if got := MeanRate(events[:1]); got != 0 {
		t.Errorf("the mean of one event is %v a second", got)
	}
	events[500].At += 300 * time.Microsecond
	sorted := Gaps(events)
	if len(sorted) != 1000 {
		t.Errorf("%d gaps, want 1000", len(sorted))
	}
	for p, want := range map[float64]time.Duration{0: 700 * time.Microsecond, 50: ms, 99: ms, 100: 1300 * time.Microsecond} {
		if got := Percentile(sorted, p); got != want {
			t.Errorf("the gap at %v %% is %v, want %v", p, got, want)
		}
	}
}

func TestBetween(t *testing.T) {
	events := []Event{{1, 1}, {2, 2}, {2, 3}, {4, 4}}
	for _, test := range []struct {
		start, end time.Duration
		want       int
	}{{0, 9, 10}, {1, 4, 6}, {2, 3, 5}, {3, 4, 0}, {4, 5, 4}, {5, 9, 0}, {4, 1, 0}} {
		if got := Total(Between(events, test.start, test.end)); got != test.want {
			t.Errorf("%d up to %d: %d units, want %d", test.start, test.end, got, test.want)
		}
	}
}

func TestPercentile(t *testing.T) {
	for p, want := range map[float64]int{0: 1, 10: 1, 11: 2, 50: 5, 99: 10, 100: 10} {
		if got := Percentile([]int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, p); got != want {
			t.Errorf("p%v is %v, want %v", p, got, want)
		}
	}
	if got := Percentile([]int(nil), 50); got != 0 {
		t.Errorf("p50 of an empty list is %v", got)
	}
}

func TestJain(t *testing.T) {
	for _, test := range []struct {
		shares []float64
		want   float64
	}{
		{[]float64{7, 7, 7}, 1},
		{[]float64{0, 9, 0, 0}, 0.25},
		{[]float64{1, 3}, 0.8}, // 4*4 / (2*10)
		{[]float64{0, 0}, 0},
		{nil, 0},
	} {
		if got := Jain(test.shares); math.Abs(got-test.want) > 1e-9 {
			t.Errorf("the index of %v is %v, want %v", test.shares, got, test.want)
		}
	}
}

// TestBytes has TCP retransmissions, and datagrams that look like retransmissions.
func TestBytes(t *testing.T) {
	from, to := netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:2")
	segment := func(at time.Duration, seq uint32, n int) Arrival {
		return Arrival{At: at, From: from, To: to, Seq: seq, Flags: ACK, Payload: n}
	}
	otherSource, otherDest, reply := segment(5, 100, 10), segment(5, 100, 10), segment(6, 100, 10)
	otherSource.From = netip.MustParseAddrPort("10.0.0.1:9")
	otherDest.To = netip.MustParseAddrPort("10.0.0.2:9")
	reply.From, reply.To, reply.Outgoing = to, from, true
	datagram := Arrival{At: 9, From: from, To: to, Payload: 5}
	list := []Arrival{
		segment(1, 100, 10), segment(2, 110, 0), segment(3, 110, 20),
		segment(4, 100, 10), // retransmitted
		otherSource, otherDest, reply,
		segment(7, 110, 30), // retransmitted with new data
		segment(8, 110, 20), // retransmitted again
		datagram, datagram,
	}
	want := []Event{{1, 10}, {3, 20}, {5, 10}, {5, 10}, {6, 10}, {7, 10}, {9, 5}, {9, 5}}
	if diff := cmp.Diff(want, Bytes(list)); diff != "" {
		t.Error(diff)
	}
	if got := Packets(list); len(got) != len(list) || Total(got) != len(list) || got[2].At != 3 {
		t.Errorf("the packets are %v", got)
	}
}

func TestLevels(t *testing.T) {
	server := netip.MustParseAddrPort("10.2.0.5:5432")
	in := func(port uint16, flags uint8) Arrival {
		return Arrival{From: netip.AddrPortFrom(server.Addr().Next(), port), To: server, Flags: flags}
	}
	out := func(port uint16, flags uint8) Arrival {
		a := in(port, flags)
		a.From, a.To, a.Outgoing = a.To, a.From, true
		return a
	}
	list := []Arrival{
		in(1, SYN), out(1, SYN|ACK), in(1, ACK), // at 1: 1
		in(2, SYN), in(2, SYN), out(2, SYN|ACK), out(2, SYN|ACK), // at 5: 2, both retransmitted
		in(7, 0),               // a datagram
		in(3, SYN), in(3, RST), // no answer, no connection
		out(1, FIN|ACK),             // still 2: the other side is open
		in(4, SYN), out(4, SYN|ACK), // at 12: 3
		in(1, FIN|ACK), out(1, ACK), // at 13: 2
		in(2, RST), in(2, RST), // at 15: 1
		in(4, FIN|ACK), out(4, FIN|ACK), // at 18: 0
		out(5, SYN), in(5, SYN|ACK), // opened by the server: does not count
	}
	for i := range list {
		list[i].At = time.Duration(i)
	}
	levels := Levels(list)
	want := []Event{{1, 1}, {5, 2}, {12, 3}, {13, 2}, {15, 1}, {18, 0}}
	if diff := cmp.Diff(want, levels); diff != "" {
		t.Error(diff)
	}
	for _, test := range []struct {
		start, end time.Duration
		want       int
	}{{0, 99, 3}, {0, 1, 0}, {0, 2, 1}, {6, 9, 2}, {13, 14, 3}, {14, 15, 2}, {15, 19, 2}, {16, 18, 1}, {19, 99, 0}} {
		t.Run(fmt.Sprint(test.start.Nanoseconds(), " to ", test.end.Nanoseconds()), func(t *testing.T) {
			if got := MaxLevel(levels, test.start, test.end); got != test.want {
				t.Errorf("the maximum is %d, want %d", got, test.want)
			}
		})
	}
	if got := MaxLevel(nil, 0, 9); got != 0 {
		t.Errorf("the maximum of an empty list is %d", got)
	}
}
