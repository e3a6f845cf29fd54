// Owner: the loop's thread.

package conn

import (
	"errors"
	"log/slog"
	"slices"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// breaker keeps connections away from a downstream that has failed too often in a row. It opens for some time; then a
// few connections try the downstream, until one succeeds. This is the circuit breaker of Nygard (Release It!, 2007),
// but that it does not let all in when it closes: a ramp does, unless there are other downstreams.
type breaker struct {
	failures  int        // in a row
	openUntil leaky.Time // no connection passes before, and only trials after it; 0 while the breaker is closed
	trials    int        // sessions that try the downstream
	lastError error      // of the last failure
	openedAt  leaky.Time
	period    uint16     // number of the time that it is open, or was
	failedAt  leaky.Time // when one last failed
	worked    leaky.Time // when one last succeeded, or got an answer
}

// attempt is what is known of a session's connection to its downstream.
type attempt struct {
	trialOf uint16 // period of the breaker, if it was open when this began; 0 otherwise
	trying  bool   // is one of the trials of the breaker
	failed  bool
	worked  bool
}

var (
	errNoAnswer   = errors.New("closed without an answer")
	errAnswerLate = errors.New("no answer in time")
)

// shutOff reports whether the breaker of d lets no connection pass at now.
func (d *downstream) shutOff(now leaky.Time) bool {
	b := &d.breaker
	return b.openUntil > 0 && (now < b.openUntil || b.trials >= d.listener.config.Load().Breaker.Probe)
}

// anyBreakerOpen reports whether the breaker of a downstream of ln is open.
func (ln *listener) anyBreakerOpen() bool {
	return slices.ContainsFunc(ln.downstreams, func(d *downstream) bool { return d.breaker.openUntil > 0 })
}

// allShutOff reports whether the breakers of all downstreams that are not drained are open.
func (ln *listener) allShutOff() bool {
	return ln.anyBreakerOpen() && !slices.ContainsFunc(ln.downstreams, func(d *downstream) bool { return !d.drained && d.breaker.openUntil == 0 })
}

// shutOffAt returns when the last breaker has opened.
func (ln *listener) shutOffAt() (at leaky.Time) {
	for _, d := range ln.downstreams {
		if d.breaker.openUntil > 0 {
			at = max(at, d.breaker.openedAt)
		}
	}
	return at
}

// configure applies a new configuration.
func (b *breaker) configure(c *shaper.Breaker) {
	if c.After == 0 {
		*b = breaker{trials: b.trials, period: b.period}
	}
}

// enter gives s, which has none, a connection of d.
func (s *session) enter(d *downstream) {
	s.downstream, s.flow.Downstream, s.attempt = d, d.id, attempt{}
	d.inFlight++
	if d.breaker.openUntil > 0 {
		d.breaker.trials++
		s.attempt.trialOf, s.attempt.trying = d.breaker.period, true
	}
}

// endTrying is called when s leaves its downstream, or another session may try it.
func (s *session) endTrying() {
	if s.attempt.trying {
		s.attempt.trying = false
		s.downstream.breaker.trials--
		s.downstream.listener.wakeLater()
	}
}

// attemptFailed records that the downstream of s has failed in some way.
func (s *session) attemptFailed(how shaper.Failure, err error, now leaky.Time) {
	if s.downstream == nil {
		return
	}
	d := s.downstream
	b, c := &d.breaker, &d.listener.config.Load().Breaker
	if s.attempt.failed || c.After == 0 || !slices.Contains(c.Of, how) {
		return
	}
	if how != shaper.FailedDial && b.worked > b.failedAt { // others can be connected, and get answers
		b.failures = 0
	}
	s.attempt.failed, b.lastError, b.failedAt = true, err, now
	// One that is late may have been asked before others, which were answered.
	inRow := !errors.Is(err, errAnswerLate) || b.worked <= s.turns.askedAt
	if b.openUntil == 0 && inRow {
		b.failures++
	}
	// While the breaker is open, connections that were made before do not count.
	if b.openUntil == 0 && b.failures >= c.After || b.openUntil > 0 && s.attempt.trialOf == b.period {
		d.open(now)
	}
	s.endTrying()
}

// attemptSucceeded records that the downstream of s works. What makes a failed dial one in a row are connections: each
// counts once.
func (s *session) attemptSucceeded(now leaky.Time) {
	d := s.downstream
	b := &d.breaker
	if s.attempt.failed {
		return
	}
	if b.worked = now; s.attempt.worked {
		return
	}
	s.attempt.worked = true
	if b.openUntil == 0 {
		b.failures = 0
		return
	}
	if s.attempt.trialOf != b.period {
		return
	}
	s.endTrying()
	b.failures, b.openUntil, d.recoveredAt = 0, 0, now
	d.logState(slog.LevelInfo, "breaker closed", s.target().portOn(d))
	d.listener.wakeLater()
	if d.othersUsable() {
		d.listener.scheduleHold(now)
		return
	}
	d.listener.gateWaiters()
	d.listener.goOn(now)
}

// open opens the breaker of d, again if it is open.
func (d *downstream) open(now leaky.Time) {
	b, ln := &d.breaker, d.listener
	c := &ln.config.Load().Breaker
	if b.openUntil == 0 {
		b.period = max(1, b.period+1)
		b.openedAt = now
		ln.recallLater(func(s *session) bool { return s.downstream == d && b.openUntil > 0 && !s.attempt.trying })
		d.state.BreakerOpened.Add(1)
		d.logState(slog.LevelWarn, "breaker opened", d.checkPort(), "failures", b.failures, "for", c.For.String(), "err", b.lastError)
	}
	b.openUntil = now + leaky.FromDuration(c.For)
	if !d.othersUsable() {
		ln.hold.ramp, ln.hold.endedAt = ramp{}, now
		ln.scheduleHold(now)
	}
	ln.readmit(now)
}

// othersUsable reports whether the listener of d has another downstream that can be reached, as far as is known.
func (d *downstream) othersUsable() bool {
	return slices.ContainsFunc(d.listener.downstreams, func(o *downstream) bool { return o != d && !o.drained && o.statusError() == nil })
}

// dialSucceeded is called when s is connected to its downstream.
func (s *session) dialSucceeded(now leaky.Time) {
	if c := &s.downstream.listener.config.Load().Breaker; len(c.Of) == 1 && c.Of[0] == shaper.FailedDial {
		s.attemptSucceeded(now)
	}
}

// downstreamClosed is called when the downstream of s has closed the connection in its direction.
func (s *session) downstreamClosed(now leaky.Time) {
	if s.turns.firstByte == 0 && (s.turns.question || s.up.started) && !s.up.dstShut {
		s.attemptFailed(shaper.FailedFirstByte, errNoAnswer, now)
	}
}

// downstreamReset is called when the downstream of s has reset the connection. It may owe an answer.
func (s *session) downstreamReset(now leaky.Time) {
	if s.turns.question {
		s.attemptFailed(shaper.FailedReset, unix.ECONNRESET, now)
		if s.turns.firstByte == 0 {
			s.attemptFailed(shaper.FailedFirstByte, unix.ECONNRESET, now)
		}
	}
}

// postponeTrial is called when s could not try its downstream because of this host. The next one does not follow at
// once.
func (s *session) postponeTrial(now leaky.Time) {
	if b := &s.downstream.breaker; s.attempt.trying {
		b.openUntil = max(b.openUntil, now+tryInterval)
		s.readmit(now)
	}
}

// judge looks at how s has gone so far. It is relayed, or ends: closed says that both sides have closed it.
func (s *session) judge(closed bool, now leaky.Time) {
	c := &s.downstream.listener.config.Load().Breaker
	if c.After == 0 || s.attempt.failed || s.attempt.worked {
		return
	}
	timeout := leaky.FromDuration(c.Timeout)
	long, unanswered := now >= s.activity.start+timeout, s.turns.question && s.turns.firstByte == 0 && s.turns.arrivedAt == 0
	switch {
	case s.turns.firstByte > 0 && !s.turns.question: // it has said something, and owes nothing
		if long || closed {
			s.attemptSucceeded(now)
		}
	case !slices.Contains(c.Of, shaper.FailedFirstByte):
		if long || closed && s.up.started {
			s.attemptSucceeded(now)
		}
	case unanswered && now >= s.turns.askedAt+timeout && !closed:
		if n, _ := sock.Peek(s.server.fd, s.proxy.loop.scratch[:1]); n > 0 { // the answer is yet to be read
			return
		}
		s.attemptFailed(shaper.FailedFirstByte, errAnswerLate, now)
	case long: // it says nothing of the downstream: another one may try
		s.endTrying()
	}
}

// retryIn is for how long the breakers that keep s out will be open.
func (s *session) retryIn(now leaky.Time) (left leaky.Time, shut bool) {
	left = leaky.Never
	for _, d := range s.downstreams {
		switch {
		case d.drained || !d.suits(s.target(), nil):
		case !d.shutOff(now):
			left = 0
		default:
			left, shut = min(left, max(0, d.breaker.openUntil.Sub(now))), true
		}
	}
	return left, shut
}

// breakerError is the error of a downstream of which the breaker is open.
type breakerError struct{ cause error }

func (e breakerError) Error() string { return "breaker is open: " + e.cause.Error() }
