package shedding

import (
	"fmt"
	"testing"
)

// The lowest order sheds first, a tenth more each second, and gives back last, by halves.
func TestAdvance(t *testing.T) {
	a, b := &level{order: 1}, &level{order: 2}
	shares := func() string { return fmt.Sprintf("%.2f %.2f", a.share, b.share) }
	for _, tt := range []struct {
		a, b  float64 // loads
		times int
		want  string
	}{
		{1.2, 1.2, 1, "0.10 0.00"},
		{1.2, 1.2, 9, "1.00 0.00"},
		{1.2, 1.2, 3, "1.00 0.30"},
		{0.95, 0.95, 10, "1.00 0.30"},
		{0, 0, 2, "1.00 0.08"},
		{0, 0, 1, "1.00 0.00"},
		{0, 0, 1, "0.50 0.00"},
		{1.2, 0, 1, "0.60 0.00"},
		{0, 1.2, 1, "0.30 0.10"}, // what the other looks at is enough
		{0, 0, 1, "0.30 0.05"},
		{0, 0, 1, "0.30 0.00"},
		{0.45, 0, 1, "0.22 0.00"}, // less is given back closer to the threshold
		{0.89, 0, 1, "0.22 0.00"},
		{1, 0, 1, "0.24 0.00"},
		{1.05, 0, 1, "0.29 0.00"},
		{0, 0, 3, "0.00 0.00"},
	} {
		a.load, b.load = tt.a, tt.b
		for range tt.times {
			advance([]*level{a, b})
		}
		if got := shares(); got != tt.want {
			t.Fatalf("%+v: %s", tt, got)
		}
	}
}
