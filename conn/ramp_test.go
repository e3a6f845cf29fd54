package conn

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// rampBound returns how many connections may pass in the first seconds of a ramp, and the one that is free.
func rampBound(rate float64, seconds float64) (n float64) {
	n = 1
	for ; seconds > 0; seconds -= rampStep.Duration().Seconds() {
		n += rate * min(seconds, rampStep.Duration().Seconds())
		rate *= 1.5
	}
	return n
}

// Connections that wait pass as fast as the ramp lets them, and at no time more of them; then it ends. What it foretold
// came true.
func TestRamp(t *testing.T) {
	for _, tt := range []struct {
		rate    shaper.Frequency
		waiting int
	}{{shaper.Frequency{N: 10, Per: time.Second}, 1000}, {shaper.Frequency{N: 1, Per: time.Minute}, 5}, {shaper.Frequency{N: 100, Per: time.Second}, 1}} {
		start := 100 * leaky.Second
		var r ramp
		r.begin(tt.rate, 0, start)
		left, foretold, at := tt.waiting, start+r.takes(tt.waiting, start), start
		for left > 0 {
			for !r.open(at) {
				next := min(r.next, r.stepAt)
				if next <= at {
					t.Fatalf("waits until %v at %v", next, at)
				}
				at = next
				r.advance(true, at)
			}
			r.pass(at)
			left--
			if n, most := float64(tt.waiting-left), rampBound(tt.rate.PerSecond(), (at-start).Duration().Seconds()); n > most*1.0001 {
				t.Fatalf("%v: %.0f have passed in %v, more than %.2f", tt.rate, n, (at - start).Duration(), most)
			}
		}
		if n, least := float64(tt.waiting), rampBound(tt.rate.PerSecond(), (at-start).Duration().Seconds())-2; n < least {
			t.Errorf("%v: %.0f have passed in %v, less than %.2f", tt.rate, n, (at - start).Duration(), least)
		}
		if at.Sub(foretold) > leaky.Second/1000 || foretold.Sub(at) > leaky.Second/1000 {
			t.Errorf("%v: the last one passed after %v, foretold were %v", tt.rate, (at - start).Duration(), (foretold - start).Duration())
		}
		r.advance(false, at+2*rampStep)
		if r.interval != 0 || !r.open(at+2*rampStep) {
			t.Errorf("%v: the ramp has not ended though no one waits", tt.rate)
		}
	}
}

// A ramp lasts at least as long as it was told to.
func TestRamp_Least(t *testing.T) {
	var r ramp
	r.begin(shaper.Frequency{N: 1, Per: time.Second}, 10*leaky.Second, leaky.Second)
	if r.advance(false, 9*leaky.Second); r.interval == 0 {
		t.Error("ended early")
	}
	if r.advance(false, 13*leaky.Second); r.interval != 0 {
		t.Error("has not ended")
	}
}
