package conn

import (
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// refused is called when a gate has no place for s.
func (s *session) refused(why refusal, now leaky.Time) {
	if why.full {
		s.stage = dialing
		if why.reason == shaper.ClientGone {
			s.abort(shaper.ResetByClient, now)
			return
		}
		s.proxy.refused.note("connection waited in vain for a downstream, "+why.reason.String(), "listener", s.name, "source", s.flow.Source)
		s.counts.DialErrors.Add(1)
		s.abort(shaper.NotConnected, now)
		return
	}
	s.proxy.refused.note("connection refused, "+why.reason.String(), "limit", why.limit.Name,
		"listener", s.name, "source", s.flow.Source)
	s.stage = leaving
	excess := why.limit.Excess
	if why.reason == shaper.ClientGone {
		excess = shaper.ExcessReset
	}
	switch excess {
	case shaper.ExcessReset, shaper.ExcessReject:
		s.abort(shaper.Refused, now)
	case shaper.ExcessReply:
		s.reply = reply(why)
		s.timer.Fire = s.dismiss
		s.proxy.loop.pacer.Schedule(&s.timer, now+farewellTime)
		if s.client.readable {
			s.dismiss(now)
		}
	default:
		s.dismiss(now)
	}
}

// reply is what a refused client is told.
func reply(why refusal) string {
	// Not all who were refused come back at once.
	after := why.retry + rand.N(why.retry+1)
	seconds := int64((after + time.Second - 1) / time.Second)
	return strings.ReplaceAll(why.limit.Reply, shaper.RetryAfter, strconv.FormatInt(max(seconds, 1), 10))
}

const (
	farewellBytes = 64 << 10
	farewellTime  = leaky.Second
)

// dismiss closes s to the client, and takes in what it has sent, up to a bound: the
// kernel resets a connection that is closed with data unread, and with it what the
// client has not read. A reply waits for the first byte: clients of some protocols do not
// look for an answer before they have asked.
func (s *session) dismiss(now leaky.Time) {
	if s.reply != "" {
		// What the buffer of a fresh connection does not take is lost.
		_, _ = send(s.client.fd, []byte(s.reply))
		s.reply = ""
	}
	_ = unix.Shutdown(s.client.fd, unix.SHUT_WR)
	s.timer.Fire = func(now leaky.Time) { s.close(shaper.Refused, now) }
	s.proxy.loop.pacer.Schedule(&s.timer, now+farewellTime)
	s.farewell = farewellBytes
	s.sayFarewell(now)
}

// sayFarewell takes in what a client sends that was refused.
func (s *session) sayFarewell(now leaky.Time) {
	if s.reply != "" {
		if s.client.readable {
			s.dismiss(now)
		}
		return
	}
	for s.farewell > 0 {
		n, errno := recv(s.client.fd, s.proxy.loop.scratch[:min(s.farewell, scratchSize)])
		if errno == unix.EAGAIN {
			return
		}
		if errno != 0 || n == 0 {
			break
		}
		s.farewell -= n
	}
	s.close(shaper.Refused, now)
}
