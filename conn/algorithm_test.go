package conn

import (
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

var algorithms = []shaper.Algorithm{shaper.LeakyBucket, shaper.FixedWindow, shaper.SlidingWindow, shaper.SlidingLog}

func counted(a shaper.Algorithm, n uint64, per time.Duration) shaper.Limit {
	l := shaper.Limit{
		Name: "l", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Algorithm: a,
		NewConnections: shaper.Frequency{N: n, Per: per},
	}
	if a == shaper.LeakyBucket {
		l.BurstConnections = n
	}
	return l
}

// As many connections as the limit, in the last 2 ms of a window and the first 2 ms of the next. Each ends at once, so that
// nothing but what shaperd keeps of its source is left.
func TestAlgorithm_EdgeAttack(t *testing.T) {
	const n = 10
	for _, tt := range []struct {
		algorithm   shaper.Algorithm
		least, most int
	}{
		{shaper.LeakyBucket, n, n},
		{shaper.FixedWindow, 2 * n, 2 * n},
		{shaper.SlidingWindow, n, n},
		{shaper.SlidingLog, n, n},
	} {
		t.Run(tt.algorithm.String(), func(t *testing.T) {
			r := newAdmissionRig(t, counted(tt.algorithm, n, 15*time.Minute))
			r.until(2*900*leaky.Second - leaky.Second/500)
			passed := 0
			for range 40 {
				r.sleep(100 * time.Microsecond)
				v := r.visit("10.0.0.1", nil)
				if v.granted {
					passed++
					v.finish()
				}
				if len(r.admission.byKey) > 0 {
					t.Fatal("the gate has stayed")
				}
			}
			if passed < tt.least || passed > tt.most {
				t.Errorf("%d of 40 have passed in 4 ms, want %d to %d", passed, tt.least, tt.most)
			}
			if v := r.visit("10.0.0.2", nil); !v.granted {
				t.Error("another source is refused")
			}
		})
	}
}

// Reloads change the algorithm, the number and the period at random. What has passed counts against the new limit, so far as the
// old one has known it: nothing more passes in an instant than the new limit allows, and what is left never grows at a reload.
func TestAlgorithm_NoFreshBurst(t *testing.T) {
	rnd := testutil.Rand(t)
	burst := func(r *admissionRig, n int) (passed int) {
		for range n {
			if v := r.visit("10.0.0.1", nil); v.granted {
				passed++
				v.finish()
			}
		}
		return passed
	}
	for range 300 {
		from, to := algorithms[rnd.IntN(4)], algorithms[rnd.IntN(4)]
		n := 1 + rnd.Uint64N(20)
		r := newAdmissionRig(t, counted(from, n, time.Minute))
		r.sleep(time.Duration(rnd.IntN(120)) * time.Second)
		var open *visitor
		if rnd.IntN(2) == 0 { // the gate stays
			r.swap(counted(from, 1000, time.Minute))
			r.swap(counted(from, n, time.Minute))
			if open = r.visit("10.0.0.1", nil); !open.granted {
				t.Fatal("refused at first")
			}
		}
		used := burst(r, rnd.IntN(30))
		if open != nil {
			used++
		}
		next := n
		if rnd.IntN(2) == 0 {
			next = 1 + rnd.Uint64N(20)
		}
		r.swap(counted(to, next, time.Minute))
		if rnd.IntN(4) == 0 {
			r.swap(counted(algorithms[rnd.IntN(4)], next, time.Minute))
			r.swap(counted(to, next, time.Minute))
		}
		left := burst(r, 40)
		if most := max(int(next)-used, 0); left > most || left < most-3 {
			t.Fatalf("%v with %d, then %v with %d: %d have passed before, and %d at once after", from, n, to, next, used, left)
		}
	}
}

// Connections that may wait pass at the first instant at which the limit allows it, and in the end all do.
func TestAlgorithm_Waits(t *testing.T) {
	for _, tt := range []struct {
		algorithm shaper.Algorithm
		want      string // how many have passed by each second
	}{
		{shaper.FixedWindow, "[3 3 3 3 3 3 3 3 3 6 6 6 6 6 6]"},
		{shaper.SlidingWindow, "[3 3 3 3 3 3 3 3 3 3 3 3 3 4 4]"},
		{shaper.SlidingLog, "[3 3 3 3 3 3 3 3 3 3 6 6 6 6 6]"},
	} {
		t.Run(tt.algorithm.String(), func(t *testing.T) {
			l := counted(tt.algorithm, 3, 10*time.Second)
			l.QueueTimeout, l.MaxQueue = time.Hour, 10
			r := newAdmissionRig(t, l)
			r.until(10*leaky.Second + leaky.Second/2)
			passed := 0
			for range 6 {
				r.visit("10.0.0.1", func(v *visitor) {
					if v.granted {
						passed++
					}
				})
			}
			var by []int
			for i := range leaky.Time(15) {
				r.until((11 + i) * leaky.Second)
				by = append(by, passed)
			}
			if got := fmt.Sprint(by); got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
			r.sleep(time.Minute)
			if passed != 6 {
				t.Errorf("only %d have passed in the end", passed)
			}
		})
	}
}

// A reload lowers the number for a moment: what has passed counts when it is raised again.
func TestAlgorithm_DownAndUp(t *testing.T) {
	for _, a := range algorithms {
		for _, stays := range []bool{false, true} {
			r := newAdmissionRig(t, counted(a, 50, time.Minute))
			r.until(600*leaky.Second + leaky.Second)
			var open *visitor
			if stays {
				open = r.must("10.0.0.1")
			}
			pass := func() (n int) {
				for range 60 {
					if v := r.visit("10.0.0.1", nil); v.granted {
						n++
						v.finish()
					}
				}
				return n
			}
			n := pass()
			r.swap(counted(a, 5, time.Minute))
			r.sleep(time.Millisecond)
			n += pass()
			r.swap(counted(a, 50, time.Minute))
			n += pass()
			if open != nil {
				n++
			}
			if n != 50 {
				t.Errorf("%v: %d have passed, want 50", a, n)
			}
		}
	}
}
