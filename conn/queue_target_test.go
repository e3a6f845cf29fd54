package conn

import (
	"cmp"
	"math/rand/v2"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// While more connections of a source come than are served, queue_target bounds what those wait that are served, and as many
// are. Another source, whose queue does not stand, may wait longer.
func TestAdmission_QueueTarget(t *testing.T) {
	for _, target := range []time.Duration{0, 200 * time.Millisecond} {
		r := newAdmissionRig(t, shaper.Limit{Name: "all", MaxConnections: 4, QueueTimeout: 2 * time.Second, QueueTarget: target, MaxQueue: 1000})
		rnd := rand.New(rand.NewPCG(1, 2))
		served, refused, longest := 0, 0, time.Duration(0)
		var come func()
		come = func() {
			begun := r.now
			r.visit("10.0.0.1", func(v *visitor) {
				if v.granted {
					r.after(100*time.Millisecond, v.finish)
				}
				switch {
				case begun < 10*leaky.Second:
				case v.granted:
					served++
					longest = max(longest, (v.at - begun).Duration())
				default:
					refused++
				}
			})
			r.after(time.Duration(rnd.ExpFloat64()*float64(time.Second)/80), come)
		}
		come()
		r.sleep(30 * time.Second)
		others, n := r.calls("10.0.0.2", 20)
		t.Logf("target %v: within 21 s %d were served, after %v at most, and %d refused; another source waits for %v", target, served, longest, refused, others)
		if served < 800 || longest > cmp.Or(target, 2*time.Second) || target == 0 && longest < time.Second {
			t.Errorf("target %v: within 21 s %d were served, after %v at most", target, served, longest)
		}
		if n > 0 || others > 300*time.Millisecond {
			t.Errorf("target %v: another source waits for %v, and %d were refused", target, others, n)
		}
	}
}
