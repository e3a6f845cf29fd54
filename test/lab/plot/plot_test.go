package plot

import (
	"math"
	"strings"
	"testing"
)

func TestText_IsEscaped(t *testing.T) {
	d := &Drawing{Width: 10, Height: 10}
	d.Text(1, 2, "name", "start", `a < b & "c"`)
	got := d.SVG(`<"label">`)
	for _, want := range []string{"a &lt; b &amp; &#34;c&#34;", `aria-label="&lt;&#34;label&#34;&gt;"`} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is not in %s", want, got)
		}
	}
}

func TestLogScale(t *testing.T) {
	s := LogScale{0.1, 10, 100, 200}
	for v, want := range map[float64]float64{0.1: 100, 1: 200, 10: 300, 0: 100, math.Inf(1): 300} {
		if got := s.At(v); math.Abs(got-want) > 1e-9 {
			t.Errorf("%v is at %v, want %v", v, got, want)
		}
	}
	for _, s := range []LogScale{{0.5, 2, 0, 1}, {0.001, 1000, 0, 1}, {3, 14, 0, 1}, {1e-9, 1e9, 0, 1}} {
		if n := len(s.Ticks()); n < 2 || n > 8 {
			t.Errorf("%v to %v has %d ticks", s.Min, s.Max, n)
		}
	}
}

func TestNumbers(t *testing.T) {
	for v, want := range map[float64]float64{0.9: 1, 1: 1, 1.1: 2, 3: 5, 70: 100, 0.03: 0.05} {
		if got := NiceStep(v); math.Abs(got-want) > 1e-12 {
			t.Errorf("the step after %v is %v, want %v", v, got, want)
		}
	}
	for v, want := range map[float64]string{0.1234: "0.123", 12.34: "12.3", 123.4: "123", 1234.5: "1,235", 0: "0"} {
		if got := Number(v); got != want {
			t.Errorf("%v was formatted as %s", v, got)
		}
	}
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", -1000: "-1,000", -100: "-100", 12345678: "12,345,678"} {
		if got := Grouped(n); got != want {
			t.Errorf("%d was formatted as %s", n, got)
		}
	}
}
