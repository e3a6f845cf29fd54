// Owner: the loop's thread.

package conn

import (
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
	s.turnAway(shaper.Refused, with, why.notice(), now)
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
	with, n := shaper.RefuseReset, notice{reply: s.config.Load().Breaker.Reply, reason: shaper.BreakerOpen.String()}
	if n.reply != "" {
		with, n.after = shaper.RefuseReply, spread(left.Duration())
	}
	s.turnAway(shaper.BreakerOpen, with, n, now)
	return true
}

// notice is what the client is told.
func (why *refusal) notice() notice {
	n := notice{reply: why.limit.Reply, limit: why.limit.Name, reason: why.reason.String(), after: why.retryAfter}
	if why.rateUsedUp {
		n.rate = why.limit.NewConnections
	}
	return n
}

// turnAway ends s, which is refused. n is what its client is told, where it gets a reply.
func (s *session) turnAway(as shaper.Ending, with shaper.RefuseWith, n notice, now leaky.Time) {
	s.stage, s.refusedAs = stageRefusing, as
	switch with {
	case shaper.RefuseReset, shaper.RefuseReject:
		s.abort(as, now)
	case shaper.RefuseReply:
		s.beginConversation(n, now)
	default:
		s.lingeringClose(now)
	}
}

const (
	lingerBytes   = 64 << 10
	lingerTimeout = leaky.Second
)

// beginConversation tells the client of s why it is refused, if it speaks second. Otherwise it is told when it has sent
// something: in some protocols clients do not read before they have sent a request.
func (s *session) beginConversation(n notice, now leaky.Time) {
	c := &conversation{replyProtocol: protocolOf(n.reply), notice: n}
	s.conversation = c
	if s.resend.pends() { // it was read for a downstream that has failed
		c.received = copy(c.input[:], s.resend.next)
	}
	s.limitSilence(now)
	if c.serverFirst || s.client.readable || s.resend.repeats() {
		s.converse(now)
	}
}

// limitSilence gives the client of s some time for what it says next. Then it gets what can be said without that.
func (s *session) limitSilence(now leaky.Time) {
	s.timer.Fire = func(now leaky.Time) {
		if s.converse(now); s.conversation != nil {
			s.lingeringClose(now)
		}
	}
	s.proxy.loop.pacer.Schedule(&s.timer, now+lingerTimeout)
}

// converse answers what the client of s has sent so far, and reads more. Input is bounded, and each answer but the last
// takes up some of it: the conversation is over after a few times lingerTimeout.
func (s *session) converse(now leaky.Time) {
	c := s.conversation
	for {
		send, goesOn, over := c.next()
		if len(send) > 0 {
			// Anything beyond the send buffer of a new connection is lost.
			_, _ = sock.Send(s.client.fd, send)
		}
		if over {
			break
		}
		if goesOn {
			s.limitSilence(now)
			continue
		}
		n, errno := sock.Recv(s.client.fd, c.input[c.received:])
		if errno == unix.EAGAIN {
			s.client.markDrained()
			return
		}
		if errno != 0 || n == 0 {
			break
		}
		c.received += n
	}
	s.lingeringClose(now)
}

// lingeringClose half-closes s, and discards a bounded amount of input: the kernel resets a connection that is closed with
// unread data, and the client would lose what it has not read.
func (s *session) lingeringClose(now leaky.Time) {
	s.conversation = nil
	sock.Shutdown(s.client.fd)
	s.timer.Fire = func(now leaky.Time) { s.close(s.refusedAs, now) }
	s.proxy.loop.pacer.Schedule(&s.timer, now+lingerTimeout)
	s.lingerLeft = lingerBytes
	s.discardInput(now)
}

// refusedReady is called when a refused client has sent something, or left.
func (s *session) refusedReady(now leaky.Time) {
	if s.conversation == nil {
		s.discardInput(now)
		return
	}
	if s.client.readable {
		s.converse(now)
	}
}

// discardInput reads and discards what a refused client sends.
func (s *session) discardInput(now leaky.Time) {
	for s.lingerLeft > 0 {
		n, errno := sock.Recv(s.client.fd, s.proxy.loop.scratch[:min(s.lingerLeft, scratchSize)])
		if errno == unix.EAGAIN {
			s.client.markDrained()
			return
		}
		if errno != 0 || n == 0 {
			break
		}
		s.lingerLeft -= n
	}
	s.close(s.refusedAs, now)
}
