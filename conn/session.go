// Owner: the loop's thread.

package conn

import (
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// session is a client's TCP connection with its connection to a downstream.
type session struct {
	registryEntry
	waiter      // with the slots, held until the session ends
	*binding    // listener of the port
	proxy       *worker
	port        *tcpPort
	pathPolicy  *shaper.Policy // of the paths
	clientAddr  netip.AddrPort // of the client
	originalDst netip.AddrPort // destination in the PROXY header, or the zero value
	stage       stage
	refusedAs   shaper.Ending // in stageRefusing
	failedHere  bool          // a dial failed because of this host
	attempt     attempt       // at downstream
	timer       pacer.Event   // of the stage
	lingerLeft  int           // bytes that a refused client may still send

	conversation *conversation // with a refused client that is yet to be told, or nil

	downstream        *downstream   // where it holds a slot, or nil
	dialedAt          leaky.Time    // when the last dial began
	failedDownstreams []*downstream // could not be reached
	trialAt           *listener     // of whose hold s is the trial, or nil

	client, server endpoint
	up, down       direction // to the downstream, and from it
	activity       activity
	resend         *resend
	turns          turns
	turn           *turnSlot // nil unless a limit that counts turns applies
	tcpStats       tcpStats
}

// stage is the progress of a session.
type stage uint8

const (
	stageWaiting stage = iota // in admission
	stageArrived              // until the first event of the client
	stageHeader               // before admission, until the PROXY header was read
	stageDialing
	stageRelaying
	stageRefusing  // refused, lingering close
	stageResetting // to be reset when what was sent has arrived: the downstream has failed, or a quota is used up
	stageEnded
)

// relay starts to move bytes between the two connected sockets. A header for the downstream goes
// first, under the same limits.
func (s *session) relay(header []byte, now leaky.Time) {
	s.stage = stageRelaying
	s.counts.Open.Add(1)
	pacing, lowat := s.down.pacingRate, s.down.lowat // of the client's socket, if there was another downstream
	s.up = direction{session: s, src: &s.client, dst: &s.server, bytes: &s.counts.ToDownstream}
	s.down = direction{session: s, src: &s.server, dst: &s.client, bytes: &s.counts.FromDownstream}
	retry := s.config.Load().RetryUnanswered
	if retry && s.resend == nil {
		s.resend = &resend{}
	}
	s.up.unwritten, s.up.headerLen = slices.Concat(header, s.resend.begin(retry)), uint64(len(header))
	for _, d := range []*direction{&s.up, &s.down} {
		d.unit, d.pacingRate = unit{owner: d, credit: grantCredit}, unpaced
	}
	if s.resend.repeats() {
		s.down.pacingRate, s.down.lowat = pacing, lowat
	}
	if s.turn != nil {
		s.turn.pg.begin(true)
	}
	s.updateSlots(now)
	s.up.blocked = s.turn != nil && (s.up.headerLen == 0 || uint64(len(s.up.unwritten)) > s.up.headerLen)
	s.reroute(s.proxy.shaper.Policy(), now)
	s.armTimeouts(now)
	s.advance(now)
	if s.server.delaysAck && s.up.moved == 0 && s.stage == stageRelaying {
		sock.SendAck(s.server.fd)
	}
}

// advance moves what can be moved in both directions.
func (s *session) advance(now leaky.Time) {
	if s.turn != nil {
		s.turn.ask(now)
	}
	s.up.advance(now)
	s.down.advance(now)
	s.finish(now)
}

// reroute moves the units of s to the queues of policy. A direction whose queues stay the same
// keeps its position in them.
func (s *session) reroute(policy *shaper.Policy, now leaky.Time) {
	oldPolicy := s.pathPolicy
	s.pathPolicy = policy
	s.reportUsage(now)
	// Both at once: when one leaves a queue, the other may send.
	s.up.observed, s.down.observed = policy.Observed(s.route.ToDownstream), policy.Observed(s.route.FromDownstream)
	for _, d := range []*direction{&s.up, &s.down} {
		set := s.route.ToDownstream
		if d == &s.down {
			set = s.route.FromDownstream
		}
		if d.reroute(oldPolicy, policy, set, now); s.stage != stageRelaying {
			return // s has ended: leaving a queue let another unit go
		}
	}
	s.finish(now)
}

// peerFailed ends s after an endpoint failed. Data that a downstream sent before the failure goes to
// the client first: many servers reply before they have read the whole request, and the reset that
// follows is for the rest of it. When the client has failed, the data has no receiver.
func (s *session) peerFailed(e *endpoint, now leaky.Time) {
	switch {
	case e.failed:
	case e == &s.server && s.tryAgain(shaper.FailedReset, now):
	case s.up.dstShut && s.down.dstShut: // all has been delivered
		s.finish(now)
	case e != &s.server || s.stage != stageRelaying:
		s.abort(e.resetEnding(), now)
	case s.down.dstShut:
		s.resetWhenSent(now)
	default:
		e.failed = true
		s.up.dstShut = true
		s.proxy.loop.scheduler.withdraw(now, &s.up.unit)
		if s.turn != nil {
			s.turn.serverFailed(now)
		}
		e.readable, e.mustPoll = true, true
		s.down.advance(now)
	}
}

// readFailed ends s after an endpoint failed, of which all was read.
func (s *session) readFailed(e *endpoint, now leaky.Time) {
	if e == &s.server {
		if !s.tryAgain(shaper.FailedReset, now) {
			s.resetWhenSent(now)
		}
		return
	}
	s.abort(e.resetEnding(), now)
}

// finish ends s if both directions have ended.
func (s *session) finish(now leaky.Time) {
	if s.stage == stageRelaying && s.up.dstShut && s.down.dstShut {
		s.close(shaper.Closed, now)
	}
}

// endGracefully ends s early. The sides see a FIN if no data is lost, and a reset otherwise.
func (s *session) endGracefully(how shaper.Ending, now leaky.Time) {
	if s.up.pending() || s.down.pending() {
		s.abort(how, now)
		return
	}
	s.close(how, now)
}

// kill is abort for sessions that may wait.
func (s *session) kill(how shaper.Ending, now leaky.Time) {
	if s.stage == stageWaiting {
		s.admission.withdraw(&s.waiter, now)
		s.stage = stageRefusing
	}
	s.abort(how, now)
}

// abort ends s with a reset on both sides.
func (s *session) abort(how shaper.Ending, now leaky.Time) {
	switch s.stage {
	case stageEnded:
		return
	case stageWaiting:
		s.admission.cancel(&s.waiter, shaper.ClientGone, now)
		return
	}
	for _, e := range []*endpoint{&s.client, &s.server} {
		if e.fd >= 0 {
			sock.ResetOnClose(e.fd)
		}
	}
	s.close(how, now)
}

// close frees everything.
func (s *session) close(how shaper.Ending, now leaky.Time) {
	l := s.proxy.loop
	s.counts.Ended[how].Add(1)
	s.logAccess(how, now)
	l.pacer.Cancel(&s.timer)
	s.endRelaying(how, now)
	s.stage = stageEnded
	s.endTrial(now)
	s.releaseDownstream(now)
	for _, e := range []*endpoint{&s.client, &s.server} {
		if e.fd >= 0 {
			l.close(e.fd)
		}
	}
	s.proxy.sessions.remove(s)
	s.dropUnsent()
	s.release(now)
	s.proxy.openConns.Add(-1)
}

// endRelaying ends the part of s that has reached a downstream.
func (s *session) endRelaying(how shaper.Ending, now leaky.Time) {
	if s.stage == stageRelaying || s.stage == stageResetting {
		s.sampleStatsAtEnd(now)
		if how == shaper.ResetByServer {
			s.downstream.state.Resets.Add(1)
			s.downstreamReset(now)
		}
		s.judge(how == shaper.Closed, now)
		s.countEnd(how, now)
	}
	if s.stage == stageRelaying {
		s.stopRelaying(now)
	}
	if s.turn != nil {
		s.turn.leave(now)
	}
}

// countEnd tells adaptive limits how s, which has reached a downstream, has ended.
func (s *session) countEnd(how shaper.Ending, now leaky.Time) {
	switch unanswered := s.turns.askedAt != 0; {
	case how == shaper.ResetByServer && unanswered: // some servers reset after each answer
		s.failed(now)
		if s.turn != nil {
			s.turn.failed(now)
		}
	case how == shaper.ResetByClient && unanswered:
		s.left(now)
		if s.turn != nil {
			s.turn.left(now)
		}
	case how == shaper.Closed && s.turns.firstByte == 0 && s.up.started: // what was asked has no answer
		s.countAnswer(now.Sub(s.dialedAt), now)
	}
}

// countAnswer tells adaptive limits that the downstream has answered after so long.
func (s *session) countAnswer(took, now leaky.Time) {
	s.answered(took, now)
	if s.turn != nil {
		s.turn.answered(took, now)
	}
}

// dropUnsent drops what was read, and not sent.
func (s *session) dropUnsent() {
	for _, d := range []*direction{&s.up, &s.down} {
		d.unwritten = nil
		if d.pipe != nil {
			s.proxy.loop.pipes.Drop(d.pipe)
			d.pipe = nil
		}
	}
}

// stopRelaying takes both directions from their queues. The paths, if any, are released slightly later: the caller may
// be one of their queues, about to be charged for what was just sent.
func (s *session) stopRelaying(now leaky.Time) {
	l := s.proxy.loop
	s.counts.Open.Add(-1)
	if len(s.up.unit.path)+len(s.down.unit.path) == 0 {
		s.reportUsage(now)
		return
	}
	l.scheduler.withdraw(now, &s.up.unit, &s.down.unit)
	l.runLater(func(now leaky.Time) {
		l := s.proxy.loop // perhaps another one by now
		s.reportUsage(now)
		for _, d := range []*direction{&s.up, &s.down} {
			s.account.merge(d.unit.path)
			l.scheduler.releasePath(d.unit.path, now)
			d.unit.path = nil
		}
	})
}

// rebind moves s to the listener that its port belongs to now. If its listener and port have
// both been removed, s is refused unless it has reached a downstream.
func (s *session) rebind(now leaky.Time) {
	from, to := s.listener, s.port.binding
	if to.removed && s.stage < stageRelaying {
		s.kill(shaper.Refused, now)
	}
	if s.stage == stageEnded || from == to.listener {
		return
	}
	s.binding, s.listen, s.failedDownstreams = to, to.name, nil
	if s.turn != nil {
		s.turn.listen = to.name
	}
	if s.stage == stageRelaying {
		from.counts.Open.Add(-1)
		to.counts.Open.Add(1)
		s.up.bytes, s.down.bytes = &to.counts.ToDownstream, &to.counts.FromDownstream
	}
	if s.downstream != nil {
		s.endTrying()
		s.downstream = to.adoptDownstream(s.downstream)
	}
}

// updateSlots makes s hold the slots that the current policy requires.
func (s *session) updateSlots(now leaky.Time) {
	switch s.stage {
	case stageDialing, stageRelaying, stageResetting:
		s.waiter.flow.Origin = s.admission.policy.ListenerIndex(s.name)
		s.route = s.admission.policy.Route(&s.flow)
		s.slots.update(&s.flow, s.route, s.removed, now)
		s.updateTurn(now)
	}
}

// applyPolicy brings s to policy, which is the current one.
func (s *session) applyPolicy(policy *shaper.Policy, now leaky.Time) {
	if s.stage != stageDialing && s.stage != stageRelaying && s.stage != stageResetting {
		return
	}
	s.updateSlots(now)
	if policy.EnforcedBlock(s.route.Limits()) >= 0 {
		s.abort(shaper.Refused, now)
		return
	}
	if s.downstream != nil && s.downstream.removed {
		s.endTrying()
		s.downstream = s.adoptDownstream(s.downstream)
	}
	if s.stage == stageRelaying {
		s.reroute(policy, now)
	}
	if s.stage == stageRelaying { // reroute may have ended it
		s.armTimeouts(now) // the timeouts may have changed
	}
}
