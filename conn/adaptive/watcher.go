package adaptive

import (
	"math"

	"shaperd.dev/shaperd/leaky"
)

// Watcher changes nothing. It keeps what throughput went with how many in flight, and says at how many the server
// answers nearly as often as it can. It needs a load that varies, and reaches that number now and then.
type Watcher struct {
	Load
	began sums // of the second that runs
	next  leaky.Time
	bins  [80]bin
}

// bin is the time with about so many in flight: from binWidth^i on.
type bin struct{ seconds, inFlight, answers float64 }

const (
	binWidth    = 1.15
	binAnswers  = 1000        // after which a bin counts,
	binSeconds  = 60          // or after so many seconds
	binHalfLife = 6 * 60 * 60 // seconds of use
	nearlyAll   = 0.95        // of the most throughput
)

func (b *bin) counts() bool { return b.answers >= binAnswers || b.seconds >= binSeconds }

func (b *bin) throughput() float64 { return b.answers / b.seconds }

// Step takes note of the load. It is to be called some ten times a second while the gate is in use.
func (w *Watcher) Step(now leaky.Time) {
	w.advance(now)
	if now < w.next {
		return
	}
	d := w.since(w.began)
	t := seconds(now - w.began.at)
	w.began, w.next = w.sums, now+leaky.Second
	inFlight := d.allInFlight / t
	if t == 0 || t > 2 || inFlight < 0.5 { // the gate was not used
		return
	}
	for i := range w.bins {
		b, kept := &w.bins[i], math.Exp2(-t/binHalfLife)
		b.seconds, b.inFlight, b.answers = b.seconds*kept, b.inFlight*kept, b.answers*kept
	}
	b := &w.bins[min(max(int(math.Log(inFlight)/math.Log(binWidth)), 0), len(w.bins)-1)]
	b.seconds += t
	b.inFlight += inFlight * t
	b.answers += d.answers
}

// Knee returns the fewest in flight with which the server was seen to answer nearly as often as it ever did, and how
// often. It is not known as long as more in flight have always given more answers.
func (w *Watcher) Knee() (limit int, throughput float64, known bool) {
	most, highest := 0.0, 0.0
	for i := range w.bins {
		if b := &w.bins[i]; b.counts() {
			most, highest = max(most, b.throughput()), b.inFlight/b.seconds
		}
	}
	for i := range w.bins {
		if b := &w.bins[i]; b.counts() && b.throughput() >= nearlyAll*most {
			n := b.inFlight / b.seconds
			return int(math.Ceil(n)), b.throughput(), most > 0 && highest > 1.3*n
		}
	}
	return 0, 0, false
}
