package lab

import (
	"testing"

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
	m, err := ParseMetrics(scraped)
	if err != nil {
		t.Fatal(err)
	}
	want := Metrics{
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
		if got := m.Sum(test.name, test.labels...); got != test.want {
			t.Errorf("sum of %q with %q is %v, want %v", test.name, test.labels, got, test.want)
		}
	}
	if _, err := ParseMetrics("shaperd_up one\n"); err == nil {
		t.Error("a value that is not a number was accepted")
	}
}
