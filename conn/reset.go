// Owner: the loop's thread.

package conn

import (
	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

const (
	// resetCheck is when a session that is to be reset first looks at what is left to send. It does so less and
	// less often, down to once in maxResetCheck.
	resetCheck    = 10 * leaky.Second / 1000
	maxResetCheck = 500 * leaky.Second / 1000

	// resetStall is for how long a client may acknowledge nothing before the rest is lost, and
	// resetTimeout for how long a reset waits altogether.
	resetStall   = 5 * leaky.Second
	resetTimeout = 60 * leaky.Second
)

// resetWhenSent resets s, of which the downstream has failed, once the client has received what the kernel was
// given for it: a reset discards the rest. No bytes move any more.
func (s *session) resetWhenSent(now leaky.Time) {
	s.stopRelaying(now)
	s.server.failed = true
	if s.turn != nil {
		s.turn.serverFailed(now)
	}
	s.resetWhenAcked(shaper.ResetByServer, now, &s.client)
}

// resetWhenAcked resets s, which relays no more, once those of to have received what the kernel was given for them.
func (s *session) resetWhenAcked(how shaper.Ending, now leaky.Time, to ...*endpoint) {
	s.dropUnsent()
	s.stage = stageResetting
	unacked := func() (sum int) {
		for _, e := range to {
			sum += sock.Unacked(e.fd)
		}
		return sum
	}
	wait := resetCheck
	left, progress, start := unacked(), now, now
	s.timer.Fire = func(now leaky.Time) {
		was := left
		if left = unacked(); left < was {
			progress = now
		}
		if left == 0 || now >= progress+resetStall || now >= start+resetTimeout {
			s.abort(how, now)
			return
		}
		s.proxy.loop.pacer.ScheduleCoarse(&s.timer, now+wait)
		wait = min(2*wait, maxResetCheck)
	}
	s.timer.Fire(now)
}
