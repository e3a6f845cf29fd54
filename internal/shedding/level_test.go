package shedding

import (
	"fmt"
	"testing"
)

// The lowest order sheds first, a tenth more each second, and gives back last, by halves.
func TestAdvance(t *testing.T) {
	a, b := &level{order: 1, excess: 1, looksAt: []string{"cpu"}}, &level{order: 2, excess: 1, looksAt: []string{"late", "cpu"}}
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
		{0, 1.2, 1, "0.30 0.10"}, // only the other is short
		{0, 0, 1, "0.30 0.05"},   // it gives back after the other, which looks at the same
		{0, 0, 1, "0.30 0.00"},
		{0.45, 0, 1, "0.22 0.00"}, // less is given back closer to the threshold
		{0.89, 0, 1, "0.21 0.00"},
		{0, 0, 4, "0.00 0.00"},
	} {
		a.load, b.load = tt.a, tt.b
		for range tt.times {
			advance([]*level{a, b}, 1)
		}
		if got := fmt.Sprintf("%.2f %.2f", a.share, b.share); got != tt.want {
			t.Fatalf("%+v: %s", tt, got)
		}
	}
}

// Limits that look at different things, or of which one only observes, do not wait for each other.
func TestAdvance_Apart(t *testing.T) {
	for _, other := range []level{{order: 2, share: 0.8, load: 0.95, looksAt: []string{"late"}}, {order: 2, share: 0.8, load: 0.95, looksAt: []string{"cpu"}, observes: true}} {
		l := &level{order: 1, share: 1, looksAt: []string{"cpu"}}
		for range 5 {
			advance([]*level{l, &other}, 1)
		}
		if l.share > 0 {
			t.Errorf("it sheds %v beside %+v", l.share, other)
		}
	}
	l, observes := &level{order: 2, load: 1.1, excess: 1, looksAt: []string{"cpu"}}, &level{order: 1, load: 1.1, excess: 1, looksAt: []string{"cpu"}, observes: true}
	if advance([]*level{l, observes}, 1); l.share == 0 {
		t.Error("it waits for one that only observes")
	}
}

// What is given back, and taken, takes its time, and no longer, whatever the load and however often one looks.
func TestAdvance_Time(t *testing.T) {
	for _, tt := range []struct {
		load, excess, seconds float64
		from, to              float64
		want                  float64 // seconds
	}{
		{0, 0, 1, 1, 0, 5},
		{0.5, 0, 1, 1, 0, 12},
		{0.899, 0, 1, 1, 0, 59},
		{1.2, 1, 1, 0, 1, 10},
		{1.2, 1, 2, 0, 1, 10},
		{1, 0, 1, 0, 1, 50},
	} {
		l := &level{load: tt.load, excess: tt.excess, share: tt.from}
		took := 0.0
		for l.share != tt.to && took < 100 {
			advance([]*level{l}, tt.seconds)
			took += tt.seconds
		}
		if took != tt.want {
			t.Errorf("%+v: took %v s", tt, took)
		}
	}
}
