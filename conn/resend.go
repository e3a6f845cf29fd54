// Owner: the loop's thread.

package conn

import (
	"slices"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// resend is what a client has sent to a downstream that has not said anything yet. If that fails then, another
// connection is made, and gets it too: with retry_unanswered. Without it is nil.
type resend struct {
	kept  bool // all that was sent, with the header, is in sent
	sent  []byte
	next  []byte // for the next downstream, without a header
	tries int
}

const (
	// maxResend is the most that is kept: the greetings of databases are much smaller.
	maxResend = 16 << 10

	// maxResends is how often a connection is made again.
	maxResends = 3
)

// begin begins to keep what is sent, and returns what was sent to the downstream before.
func (r *resend) begin(wanted bool) (again []byte) {
	if r == nil {
		return nil
	}
	again = r.next
	*r = resend{kept: wanted && r.tries < maxResends, tries: r.tries}
	return again
}

// keep notes that b was sent.
func (r *resend) keep(b []byte) {
	switch {
	case !r.kept:
	case len(r.sent)+len(b) > maxResend:
		r.stop()
	default:
		r.sent = append(r.sent, b...)
	}
}

// stop keeps nothing any more: the downstream has answered.
func (r *resend) stop() {
	if r != nil {
		*r = resend{tries: r.tries}
	}
}

// keeps reports whether what is sent is kept.
func (r *resend) keeps() bool { return r != nil && r.kept }

// pends reports whether something is to be sent again.
func (r *resend) pends() bool { return r != nil && len(r.next) > 0 }

// repeats reports whether a connection was made again.
func (r *resend) repeats() bool { return r != nil && r.tries > 0 }

// tryAgain connects s again if its downstream, which has failed or closed in this way, has not said anything. It
// reports whether it does.
func (s *session) tryAgain(how shaper.Failure, now leaky.Time) bool {
	r := s.resend
	if !r.keeps() || s.removed || s.stage != stageRelaying || s.up.srcEOF || s.up.dstShut || s.client.failed {
		return false
	}
	l := s.proxy.loop
	if n, _ := sock.Peek(s.server.fd, l.scratch[:1]); n > 0 || s.down.holds() {
		return false // it has said something, which is yet to be delivered
	}
	all := slices.Concat(r.sent, s.up.unwritten)
	header := min(s.up.headerLen, uint64(len(all)))
	r.kept, r.sent, r.next = false, nil, all[header:]
	r.tries++
	s.sampleStatsAtEnd(now)
	s.stopRelaying(now)
	if s.turn != nil {
		s.turn.leave(now)
	}
	s.dropUnsent()
	s.stage, s.activity, s.tcpStats = stageDialing, activity{}, tcpStats{}
	l.pacer.Cancel(&s.timer)
	l.close(s.server.fd)
	s.server.fd = -1
	s.proxy.trafficLog.warn("downstream has closed a connection without an answer", "listener", s.name, "downstream", s.downstream.address(s.flow.Port, s.samePort))
	if s.turns.question || s.resend.pends() {
		s.attemptFailed(how, errNoAnswer, now)
	}
	s.releaseDownstream(now)
	l.runLater(func(now leaky.Time) { // once what has called this is done with the session
		if s.stage == stageDialing && s.server.fd < 0 {
			s.failedDownstreams = nil
			s.waitAgain(now)
		}
	})
	return true
}
