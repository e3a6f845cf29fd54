// Owner: the loop's thread.

package conn

import (
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// turnSlot holds the slots that a session has at limits that count turns: from a question on, until nothing has moved for
// turn_gap after the answer. Questions that belong together keep them like that: what they have locked would otherwise wait
// for the slots of those that wait for the lock. Where PostgreSQL tells when a transaction is over, that decides. What is
// asked without slots stays in the client's socket.
type turnSlot struct {
	waiter  // queued while the client waits to ask
	session *session
	asking  bool       // acquire was called, and has no outcome yet
	dropped bool       // the outcome has no use
	active  bool       // has the slots
	since   leaky.Time // when it got them
	replied bool       // the downstream has begun to answer the last question
	moved   leaky.Time // when bytes last moved
	gap     leaky.Time // the longest turn_gap of the limits
	turnGap leaky.Time // the longest of those that count turns, not transactions
	looks   bool       // a limit counts transactions
	pg      pgConversation
	end     pacer.Event
}

// turnsKept is after how many times turn_gap a session that others wait for asks no more until it gets slots again.
const turnsKept = 10

// updateTurn makes s hold the slots that the current policy requires of a turn.
func (s *session) updateTurn(now leaky.Time) {
	t := s.turn
	switch {
	case t != nil:
		looked := t.looks
		if t.setGap(); t.looks && !looked {
			t.pg.begin(false)
			t.pg.lost = t.active // it begins in the midst of an answer
		}
		if !t.active {
			return
		}
		t.update(&s.flow, s.route, s.removed, now)
		if t.replied {
			s.proxy.loop.pacer.Schedule(&t.end, now)
		}
	case s.admission.policy.PerTurn()&s.route.Limits() != 0:
		t = &turnSlot{session: s}
		t.admission, t.inTurns, t.owner = s.admission, true, t
		t.end.Fire = t.mayEnd
		s.turn = t
		t.setGap()
		asked := s.turns.question && s.turns.askedAt != 0 || s.up.unit.queued
		t.pg.begin(s.stage != stageRelaying || s.up.moved <= s.up.headerLen)
		t.pg.lost = asked // it begins in the midst of an answer
		switch {
		case s.stage != stageRelaying:
		case asked:
			t.begin(now)
		default:
			s.up.blocked = true
			s.proxy.loop.runLater(t.ask)
		}
	}
}

// begin begins a turn, with slots beyond the maximum where limits have come meanwhile.
func (t *turnSlot) begin(now leaky.Time) {
	s := t.session
	t.active, t.replied, t.since, t.moved = true, false, now, now
	t.update(&s.flow, s.route, s.removed, now)
	t.setGap()
}

// setGap sets what follows from the limits of the current policy.
func (t *turnSlot) setGap() {
	policy := t.session.admission.policy
	t.gap, t.turnGap, t.looks = 0, 0, false
	for i := range (policy.PerTurn() & t.session.route.Limits()).All {
		l := policy.Limit(i)
		t.gap = max(t.gap, leaky.FromDuration(l.TurnGap))
		if l.SlotFor == shaper.PerTransaction {
			t.looks = true
		} else {
			t.turnGap = max(t.turnGap, leaky.FromDuration(l.TurnGap))
		}
	}
}

// ask waits for slots if the client has a question. Its FIN needs none.
func (t *turnSlot) ask(now leaky.Time) {
	s := t.session
	if !s.up.blocked || t.active || t.asking || s.up.dstShut || s.stage != stageRelaying || !s.up.holds() && !s.client.readable {
		return
	}
	if !s.up.holds() {
		b := s.proxy.loop.scratch[:16]
		switch n, errno := sock.Peek(s.client.fd, b); {
		case errno == unix.EAGAIN:
			s.client.markDrained()
			return
		case errno != 0 || n == 0 || t.looks && t.pg.needsNoSlot(b[:n]):
			s.up.blocked = false
			s.up.deferMove()
			return
		}
	}
	t.flow, t.listen, t.waiter.since, t.asking = s.flow, s.listen, 0, true
	t.admission.acquire(&t.waiter, now)
}

// sent records that bytes went to the downstream.
func (t *turnSlot) sent(now leaky.Time) {
	if !t.active {
		if t.session.up.blocked = !t.session.up.holds(); t.session.up.blocked { // after the header
			t.session.proxy.loop.runLater(t.ask)
		}
		return
	}
	t.replied, t.moved = false, now
}

// received records that bytes came from the downstream.
func (t *turnSlot) received(now leaky.Time) {
	if !t.active {
		return
	}
	t.replied, t.moved = true, now
	t.closeTap(now)
	wheel := t.session.proxy.loop.pacer
	if due := t.due(now); due <= now {
		wheel.Schedule(&t.end, now)
	} else if due != leaky.Never {
		wheel.Schedule(&t.end, due)
	}
}

// due is when the turn is over if nothing moves.
func (t *turnSlot) due(now leaky.Time) leaky.Time {
	if t.looks {
		switch idle, known := t.pg.idle(); {
		case idle:
			return t.moved + t.turnGap
		case known:
			return leaky.Never
		}
	}
	return t.moved + t.gap
}

// mustYield reports whether t loses its slots with the answer, as others wait for them.
func (t *turnSlot) mustYield(now leaky.Time) bool {
	if now < t.since+turnsKept*t.gap {
		return false
	}
	for _, gt := range t.held {
		if gt.first() != nil || gt.inFlight > gt.slots { // they may wait at another host
			return true
		}
	}
	return false
}

// closeTap lets the client ask no more until it has slots again.
func (t *turnSlot) closeTap(now leaky.Time) {
	s := t.session
	if _, known := t.pg.idle(); t.looks && known || !t.mustYield(now) || s.up.blocked {
		return
	}
	s.up.blocked = true
	s.proxy.loop.scheduler.withdraw(now, &s.up.unit)
}

// mayEnd ends the turn if it is over.
func (t *turnSlot) mayEnd(now leaky.Time) {
	s := t.session
	if !t.active || !t.replied {
		return
	}
	due := t.due(now)
	if s.up.pending() && !s.up.blocked || s.down.pending() || s.up.unit.queued || s.down.unit.queued {
		due = max(due, now+max(t.gap, leaky.Second/20))
	}
	switch {
	case due == leaky.Never:
	case due > now:
		s.proxy.loop.pacer.Schedule(&t.end, due)
	case due > t.moved && s.proxy.loop.unheard(&t.end, due): // or the protocol has told, and nothing need be heard
	default:
		t.leave(now)
		t.ask(now)
	}
}

// leave gives up the slots, or the wait for them.
func (t *turnSlot) leave(now leaky.Time) {
	t.session.proxy.loop.pacer.Cancel(&t.end)
	t.active, t.session.up.blocked = false, true
	switch {
	case t.queue != nil:
		t.asking = false
		t.admission.withdraw(&t.waiter, now)
		t.addWait()
	case t.asking:
		t.dropped = true
	default:
		t.release(now)
	}
}

// serverFailed gives up the slots when the downstream has ended the connection.
func (t *turnSlot) serverFailed(now leaky.Time) {
	if t.session.turns.askedAt != 0 {
		t.failed(now)
	}
	t.leave(now)
}

// addWait adds what t has waited to the account of its session.
func (t *turnSlot) addWait() {
	if at := t.longestAt; at != nil {
		t.session.account.addWait(at, t.waited)
		t.waited, t.longestAt, t.longestWait = 0, nil, 0
	}
}

func (t *turnSlot) pool() *gate { return nil }

func (t *turnSlot) assignDownstream(leaky.Time) {}

// admitted is called when t has got its slots.
func (t *turnSlot) admitted(now leaky.Time) {
	s := t.session
	t.addWait()
	t.asking = false
	if t.dropped || s.up.dstShut {
		t.dropped = false
		t.release(now)
		t.ask(now)
		return
	}
	s.activity.throttled = true
	t.begin(now)
	s.up.blocked = false
	s.up.deferMove()
}

// refused is called when t has waited for too long. The client is told as when its connection is refused.
func (t *turnSlot) refused(why refusal, now leaky.Time) {
	s := t.session
	t.addWait()
	t.asking = false
	if t.dropped {
		t.dropped = false
		t.ask(now)
		return
	}
	s.proxy.trafficLog.warn("turn refused: "+why.reason.String(), "limit", why.limit.Name, "listener", s.name, "source", s.flow.Source)
	if s.down.pending() || s.down.dstShut || s.up.holds() {
		s.abort(shaper.Refused, now)
		return
	}
	s.endRelaying(shaper.Refused, now)
	s.proxy.loop.close(s.server.fd)
	s.server.fd = -1
	s.releaseDownstream(now)
	s.release(now)
	n := why.notice()
	n.midway = s.up.moved > s.up.headerLen || s.down.moved > 0
	s.turnAway(shaper.Refused, why.limit.RefuseWith, n, now)
}
