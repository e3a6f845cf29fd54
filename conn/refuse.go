// Owner: the loop's thread.

package conn

import (
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// refused is called when admission refuses s.
func (s *session) refused(why refusal, now leaky.Time) {
	if why.poolFull {
		s.stage = stageDialing
		if why.reason == shaper.ClientGone {
			s.abort(shaper.ResetByClient, now)
			return
		}
		s.proxy.trafficLog.warn("no downstream for connection: "+why.reason.String(), "listener", s.name, "source", s.flow.Source)
		s.counts.DialErrors.Add(1)
		s.abort(shaper.NotConnected, now)
		return
	}
	s.proxy.trafficLog.warn("connection refused: "+why.reason.String(), "limit", why.limit.Name,
		"listener", s.name, "source", s.flow.Source)
	with := why.limit.RefuseWith
	if why.reason == shaper.ClientGone {
		with = shaper.RefuseReset
	}
	s.turnAway(shaper.Refused, with, replyText(why.limit.Reply, why.retryAfter), now)
}

// refusedByBreaker refuses s if the breaker of a downstream that it could go to is open. It reports whether it does.
func (s *session) refusedByBreaker(now leaky.Time) bool {
	left, shut := s.retryIn(now)
	if !shut {
		return false
	}
	s.proxy.trafficLog.warn("connection refused: breaker is open", "listener", s.name, "source", s.flow.Source)
	s.counts.DialErrors.Add(1)
	s.endTrial(now)
	s.release(now) // it may still be here for a second
	with, reply := shaper.RefuseReset, s.config.Load().Breaker.Reply
	if reply != "" {
		with = shaper.RefuseReply
	}
	s.turnAway(shaper.BreakerOpen, with, replyText(reply, left.Duration()), now)
	return true
}

// turnAway ends s, which is refused.
func (s *session) turnAway(as shaper.Ending, with shaper.RefuseWith, reply string, now leaky.Time) {
	s.stage, s.refusedAs = stageRefusing, as
	switch with {
	case shaper.RefuseReset, shaper.RefuseReject:
		s.abort(as, now)
	case shaper.RefuseReply:
		s.reply = reply
		s.timer.Fire = s.lingeringClose
		s.proxy.loop.pacer.Schedule(&s.timer, now+lingerTimeout)
		if s.client.readable || s.resend.repeats() {
			s.lingeringClose(now)
		}
	default:
		s.lingeringClose(now)
	}
}

// replyText returns the reply to a refused client, which may try again after some time.
func replyText(reply string, after time.Duration) string {
	after += rand.N(after + 1) // spreads the retries of clients that were refused at the same time
	seconds := int64((after + time.Second - 1) / time.Second)
	return strings.ReplaceAll(reply, shaper.RetryAfter, strconv.FormatInt(max(seconds, 1), 10))
}

const (
	lingerBytes   = 64 << 10
	lingerTimeout = leaky.Second
)

// lingeringClose sends the reply, if there is one, half-closes s, and discards a bounded amount
// of input: the kernel resets a connection that is closed with unread data, and the client
// would lose what it has not read. A reply waits for the client's first byte: in some protocols
// clients do not read before they have sent a request.
func (s *session) lingeringClose(now leaky.Time) {
	if s.reply != "" {
		// Anything beyond the send buffer of a new connection is lost.
		_, _ = sock.Send(s.client.fd, []byte(s.reply))
		s.reply = ""
	}
	_ = unix.Shutdown(s.client.fd, unix.SHUT_WR)
	s.timer.Fire = func(now leaky.Time) { s.close(s.refusedAs, now) }
	s.proxy.loop.pacer.Schedule(&s.timer, now+lingerTimeout)
	s.lingerLeft = lingerBytes
	s.discardInput(now)
}

// discardInput reads and discards what a refused client sends.
func (s *session) discardInput(now leaky.Time) {
	if s.reply != "" {
		if s.client.readable {
			s.lingeringClose(now)
		}
		return
	}
	for s.lingerLeft > 0 {
		n, errno := sock.Recv(s.client.fd, s.proxy.loop.scratch[:min(s.lingerLeft, scratchSize)])
		if errno == unix.EAGAIN {
			return
		}
		if errno != 0 || n == 0 {
			break
		}
		s.lingerLeft -= n
	}
	s.close(s.refusedAs, now)
}
