package netns

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const scraped = `# HELP shaperd_packets_total What became of datagrams.
# TYPE shaperd_packets_total counter
shaperd_packets_total{limit="a",reason="none",verdict="pass"} 5
shaperd_packets_total{limit="a",reason="queue-full",verdict="refuse"} 1.5e+03
shaperd_packets_total{limit="b",reason="queue-full",verdict="refuse"} 7
shaperd_wait_seconds_bucket{limit="a",le="+Inf"} 9
shaperd_wait_seconds_sum{limit="a"} 2

go_goroutines 12
`

func TestMetrics(t *testing.T) {
	m, err := parseMetrics(scraped)
	if err != nil {
		t.Fatal(err)
	}
	want := samples{
		`shaperd_packets_total{limit="a",reason="none",verdict="pass"}`:         5,
		`shaperd_packets_total{limit="a",reason="queue-full",verdict="refuse"}`: 1500,
		`shaperd_packets_total{limit="b",reason="queue-full",verdict="refuse"}`: 7,
		`shaperd_wait_seconds_bucket{limit="a",le="+Inf"}`:                      9,
		`shaperd_wait_seconds_sum{limit="a"}`:                                   2,
		`go_goroutines`:                                                         12,
	}
	if diff := cmp.Diff(want, m); diff != "" {
		t.Error(diff)
	}
	for _, test := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"packets", []string{`limit="a"`}, 1505},
		{"packets", []string{`limit="a"`, `verdict="refuse"`}, 1500},
		{"packets", []string{`verdict="refuse"`}, 1507},
		{"", []string{`limit="a"`}, 1507},
		{"bytes", nil, 0},
	} {
		if got := m.sum(test.name, test.labels...); got != test.want {
			t.Errorf("sum of %q with %q is %v, want %v", test.name, test.labels, got, test.want)
		}
	}
	if _, err := parseMetrics("shaperd_up one\n"); err == nil {
		t.Error("a value that is no number is accepted")
	}
}

// TestInFlight counts connections by hand.
func TestInFlight(t *testing.T) {
	peer := func(port uint16) arrival { return arrival{from: ipv4At(port), to: ipv4At(tcpPort)} }
	in := func(port uint16, flags uint8) arrival {
		a := peer(port)
		a.flags = flags
		return a
	}
	out := func(port uint16, flags uint8) arrival {
		return arrival{from: ipv4At(tcpPort), to: ipv4At(port), flags: flags, outgoing: true}
	}
	const ack = 0x10
	list := []arrival{
		in(1, flagSYN), out(1, flagSYN|ack), in(1, ack), // 1
		in(2, flagSYN), in(2, flagSYN), // 2, with the SYN sent again
		out(1, flagFIN|ack), // still 2: one side may go on
		in(3, flagSYN),      // 3
		in(1, flagFIN|ack),  // 2
		in(1, ack),
		out(2, flagRST),                                         // 1
		in(4, flagSYN),                                          // 2
		in(3, flagFIN|ack), out(3, flagFIN|ack), in(4, flagRST), // 0
	}
	for i := range list {
		list[i].at = timeAt(i)
	}
	opened, levels := inFlight(list)
	if len(opened) != 4 {
		t.Errorf("%d connections were opened, want 4", len(opened))
	}
	var got []int
	for _, l := range levels {
		got = append(got, l.n)
	}
	if diff := cmp.Diff([]int{1, 2, 3, 2, 1, 2, 1, 0}, got); diff != "" {
		t.Error(diff)
	}
	if most := mostOpen(levels, 0, timeAt(100)); most != 3 {
		t.Errorf("at most %d were open, want 3", most)
	}
	if most := mostOpen(levels, timeAt(8), timeAt(10)); most != 2 {
		t.Errorf("in the middle at most %d were open, want 2", most)
	}
}

func ipv4At(port uint16) netip.AddrPort { return netip.AddrPortFrom(ipv4.downstream, port) }

func timeAt(i int) time.Duration { return time.Duration(i) * time.Second }
