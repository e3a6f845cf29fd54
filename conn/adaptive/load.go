package adaptive

import "shaperd.dev/shaperd/leaky"

// Load measures what passes a gate in front of a server. The zero value is an idle gate.
type Load struct {
	sums
	inFlight, waiting int
	fullSince         leaky.Time // when the gate became full; of use while waiting > 0
	answeredAt        leaky.Time
	gap               float64 // mean seconds between answers while the gate is full
	gaps              int     // that are in the mean, up to recent
	took              float64 // mean seconds of the recent answers
}

// sums are totals since the gate was made. Times are in seconds.
type sums struct {
	at                leaky.Time // up to when they count
	allInFlight       float64    // integral of what was in flight
	waited            float64    // time in which somebody waited
	full              float64    // that without the time in which the server stood still
	fullInFlight      float64    // integral of what was in flight over that time
	fullAnswers       float64    // answers in that time
	fullLatency       float64    // sum over these
	fullLatency2      float64    // sum of the squares
	answers, failures float64
	left              float64 // clients that went before their answer came
	latency           float64 // sum over answers
	latency2          float64 // sum of the squares
}

func (a sums) since(b sums) sums {
	return sums{
		at: a.at, allInFlight: a.allInFlight - b.allInFlight, full: a.full - b.full, fullInFlight: a.fullInFlight - b.fullInFlight, fullAnswers: a.fullAnswers - b.fullAnswers,
		answers: a.answers - b.answers, failures: a.failures - b.failures, left: a.left - b.left, latency: a.latency - b.latency, latency2: a.latency2 - b.latency2,
		fullLatency: a.fullLatency - b.fullLatency, fullLatency2: a.fullLatency2 - b.fullLatency2,
	}
}

// A gap between answers is a stall from so many mean gaps on, and so many times what an answer takes: many servers answer
// in bursts.
const (
	recent     = 64 // answers over which gaps and times are averaged
	stallGaps  = 20
	stallTimes = 4
	stallMin   = 5e-3 // seconds
)

// Set records how many are in flight and how many wait from now on.
func (l *Load) Set(inFlight, waiting int, now leaky.Time) {
	l.advance(now)
	if l.waiting == 0 && waiting > 0 {
		l.fullSince = now
	}
	l.inFlight, l.waiting = inFlight, waiting
}

// advance brings the sums up to now.
func (l *Load) advance(now leaky.Time) {
	if now <= l.at {
		return
	}
	t := seconds(now - l.at)
	l.allInFlight += t * float64(l.inFlight)
	if l.waiting > 0 {
		l.waited += t
		l.full += t
		l.fullInFlight += t * float64(l.inFlight)
	}
	l.at = now
}

// Answer records an answer of the server, which took so long.
func (l *Load) Answer(took, now leaky.Time) {
	l.advance(now)
	l.answers++
	l.latency += seconds(took)
	l.latency2 += seconds(took) * seconds(took)
	if l.waiting > 0 {
		l.fullAnswers++
		l.fullLatency += seconds(took)
		l.fullLatency2 += seconds(took) * seconds(took)
		l.cutStall(seconds(now - min(now, max(l.answeredAt, l.fullSince))))
	}
	l.took += (seconds(took) - l.took) / min(l.answers, recent)
	l.answeredAt = now
}

// add adds answers, failures and clients that have left up to the present.
func (l *Load) add(d sums) {
	l.answers += d.answers
	l.latency += d.latency
	l.latency2 += d.latency2
	l.failures += d.failures
	l.left += d.left
	if l.waiting > 0 && d.answers > 0 {
		l.fullAnswers += d.answers
		l.fullLatency += d.latency
		l.fullLatency2 += d.latency2
	}
}

// cutStall takes a gap between answers out of the time in which the gate was full, when the server has stood still: a
// pause for garbage collection says nothing of how many it bears.
func (l *Load) cutStall(gap float64) {
	if most := max(stallGaps*l.gap, stallTimes*l.took, stallMin); l.gaps == recent && gap > most {
		l.fullInFlight -= gap * float64(l.inFlight)
		l.full -= gap
		gap = most
	}
	l.gaps = min(l.gaps+1, recent)
	l.gap += (gap - l.gap) / float64(l.gaps)
}

// Fail records that the server has refused or failed a connection.
func (l *Load) Fail(now leaky.Time) {
	l.advance(now)
	l.failures++
}

// Leave records that a client has gone before its answer came.
func (l *Load) Leave(now leaky.Time) {
	l.advance(now)
	l.left++
}

func seconds(t leaky.Time) float64 { return float64(t) / float64(leaky.Second) }

func ticks(s float64) leaky.Time { return leaky.Time(s * float64(leaky.Second)) }
