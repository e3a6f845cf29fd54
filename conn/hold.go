// Owner: the loop's thread.

package conn

import (
	"slices"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// hold keeps the new connections of a listener in the lines of its pools, where sources take turns: as long as an
// operator wants, and with on_down = "hold" as long as no downstream can be reached. Then a ramp lets them in.
type hold struct {
	until leaky.Time // for which an operator holds the listener; 0 is not
	down  bool       // no downstream could be reached
	since leaky.Time // of the first of both

	trial     *session   // that tries to reach a downstream while down is set
	tryAt     leaky.Time // when the next one may
	reachedAt leaky.Time // when a downstream was last reached
	endedAt   leaky.Time // since when those that wait have no more time than others

	ramp  ramp
	timer pacer.Event // serves those who wait when that may have become possible
}

// tryInterval is the interval between attempts to reach a downstream.
const tryInterval = leaky.Second

// holds reports whether connections of ln wait as long as during a hold.
func (ln *listener) holds() bool {
	return ln.hold.active() || ln.hold.ramp.interval > 0 || ln.config.Load().OnDown == shaper.DownHold && ln.allShutOff()
}

func (h *hold) active() bool { return h.until > 0 || h.down }

// mayHold reports whether connections of ln pass a pool even if that has all the room they need.
func (ln *listener) mayHold() bool {
	return ln.holds() || ln.config.Load().OnDown == shaper.DownHold
}

// held reports whether a connection of ln must wait although a downstream has room.
func (ln *listener) held(now leaky.Time) bool {
	h := &ln.hold
	switch {
	case h.until > 0, h.down && (h.trial != nil || now < h.tryAt || ln.config.Load().Check.Interval > 0):
		return true
	case h.down:
		return false
	}
	return !h.ramp.open(now)
}

// letIn records that a connection passes on to a downstream. s is its session, or nil if it is no TCP connection.
func (ln *listener) letIn(s *session, now leaky.Time) {
	h := &ln.hold
	switch {
	case h.down && s != nil:
		h.trial, s.trialAt, h.tryAt = s, ln, now+tryInterval
	case h.ramp.interval > 0:
		h.ramp.pass(now)
		ln.scheduleHold(now)
	}
}

// endTrial is called when s ends, or reaches a downstream, or reaches none.
func (s *session) endTrial(now leaky.Time) {
	if ln := s.trialAt; ln != nil {
		s.trialAt, ln.hold.trial = nil, nil
		ln.scheduleHold(now)
	}
}

// unreachable is called when s has reached no downstream. It reports whether s shall wait until one can be reached.
func (ln *listener) unreachable(s *session, now leaky.Time) bool {
	h, config := &ln.hold, ln.config.Load()
	dialed := len(s.failedDownstreams) > 0
	if h.down { // whatever the reason, the next one does not follow at once
		h.tryAt = now + tryInterval
	}
	switch {
	case ln.removed || s.failedHere || ln.anyFull(s.target(), s.failedDownstreams) || now >= s.since+leaky.FromDuration(config.HoldTimeout):
		return false
	case h.until > 0 && dialed:
		return true
	case config.OnDown != shaper.DownHold || !dialed && ln.resolved(): // only this client has no downstream
		return false
	case h.down:
	case dialed && s.dialedAt < h.reachedAt: // another one has reached one since
	default:
		ln.goDown(now)
	}
	ln.scheduleHold(now)
	return true
}

// anyFull reports whether a downstream that a session could try has no room.
func (ln *listener) anyFull(to target, failed []*downstream) bool {
	return slices.ContainsFunc(ln.downstreams, func(d *downstream) bool {
		return !d.drained && !d.shutOff(ln.proxy.loop.now) && !d.hasCapacity(ln.proxy.loop.now) && d.suits(to, failed)
	})
}

// resolved reports whether a downstream has an address.
func (ln *listener) resolved() bool {
	return slices.ContainsFunc(ln.downstreams, func(d *downstream) bool { return d.host.addr().IsValid() })
}

// followChecks begins to wait if checks say that all downstreams are down.
func (ln *listener) followChecks(now leaky.Time) {
	if ln.config.Load().OnDown == shaper.DownHold && !ln.hold.down && slices.ContainsFunc(ln.downstreams, func(d *downstream) bool { return d.down && !d.drained }) && !slices.ContainsFunc(ln.downstreams, func(d *downstream) bool { return !d.down && !d.drained }) {
		ln.goDown(now)
		ln.scheduleHold(now)
	}
}

// goDown begins to wait until a downstream can be reached.
func (ln *listener) goDown(now leaky.Time) {
	h := &ln.hold
	if !h.active() {
		h.since = now
	}
	h.down, h.tryAt, h.ramp = true, now+tryInterval, ramp{}
	ln.recallLater(func(s *session) bool { return h.down && h.trial != s })
	ln.proxy.log.Warn("no downstream can be reached: new connections wait", "listener", ln.name, "timeout", ln.config.Load().HoldTimeout.String())
}

// recallLater makes the sessions that are being connected, and for which wanted holds in the next round, wait again: the
// kernel repeats their SYNs, and all would come at once when the server is back.
func (ln *listener) recallLater(wanted func(*session) bool) {
	ln.proxy.loop.runLater(func(now leaky.Time) {
		l := ln.proxy.loop
		ln.proxy.sessions.each(func(s *session) {
			if s.listener != ln || s.stage != stageDialing || s.server.fd < 0 || !wanted(s) {
				return
			}
			l.pacer.Cancel(&s.timer)
			l.close(s.server.fd)
			s.server.fd = -1
			s.releaseDownstream(now)
			s.failedDownstreams = nil
			s.waitAgain(now)
		})
	})
}

// reached is called when a downstream was reached, by a check or by a session that was to try.
func (ln *listener) reached(check bool, now leaky.Time) {
	h := &ln.hold
	h.reachedAt = now
	if !h.down || !check && ln.config.Load().Check.Interval > 0 {
		return
	}
	h.down = false
	ln.proxy.log.Info("a downstream was reached", "listener", ln.name, "held", now.Sub(h.since).Duration().Round(time.Millisecond).String(), "waiting", ln.waiting())
	ln.goOn(now)
}

// goOn begins the ramp if nothing holds ln any more.
func (ln *listener) goOn(now leaky.Time) {
	if ln.hold.active() {
		return
	}
	if ln.allShutOff() { // a ramp begins when a breaker closes
		ln.wakeLater()
		return
	}
	config := ln.config.Load()
	ln.hold.endedAt = now
	ln.hold.ramp.begin(config.Ramp, leaky.FromDuration(config.SlowStart), now)
	for _, d := range ln.downstreams {
		d.recoveredAt = now
	}
	ln.scheduleHold(now)
	ln.wakeLater()
}

// recover is called when d could not be reached for a while, and now can. If no other one could, new connections are
// let in at a ramp.
func (d *downstream) recover(now leaky.Time) {
	ln := d.listener
	if h := &ln.hold; ln.config.Load().SlowStart > 0 && !h.active() && (h.ramp.interval > 0 || !ln.holds()) && !d.othersUsable() {
		ln.gateWaiters()
		ln.goOn(now)
	}
}

// gateWaiters makes connections that wait for a limit pass a pool as well, in which ln is held.
func (ln *listener) gateWaiters() {
	if !ln.mayHold() && len(ln.proxy.admission.queues) > 0 {
		ln.proxy.loop.runLater(func(now leaky.Time) { ln.proxy.admission.requeue(now) })
	}
}

// scheduleHold schedules the next event of the hold.
func (ln *listener) scheduleHold(now leaky.Time) {
	h := &ln.hold
	next := leaky.Never
	switch {
	case h.until > 0:
		next = h.until
	case h.down:
		next = max(h.tryAt, now)
	case h.ramp.interval > 0 && h.ramp.next > now:
		next = min(h.ramp.stepAt, h.ramp.next)
	case h.ramp.interval > 0:
		next = h.ramp.stepAt
	}
	if !h.active() {
		for _, d := range ln.downstreams {
			next = min(next, d.nextCapacity(now))
		}
	}
	if next == leaky.Never {
		ln.proxy.loop.pacer.Cancel(&h.timer)
		return
	}
	h.timer.Fire = ln.holdDue
	ln.proxy.loop.pacer.Schedule(&h.timer, next)
}

// holdDue is the timer of the hold.
func (ln *listener) holdDue(now leaky.Time) {
	h := &ln.hold
	if h.until > 0 && now >= h.until {
		ln.resume(now)
		return
	}
	if h.ramp.interval > 0 {
		if h.ramp.advance(ln.hasWaiters(), now); h.ramp.interval == 0 {
			h.endedAt = now
		}
	}
	ln.wakeWaiters(now)
	if !h.down && h.until == 0 {
		ln.scheduleHold(now)
	}
}

// resume ends the hold of an operator.
func (ln *listener) resume(now leaky.Time) {
	h := &ln.hold
	if h.until == 0 {
		return
	}
	h.until = 0
	ln.proxy.log.Info("listener is not held any more", "listener", ln.name, "held", now.Sub(h.since).Duration().Round(time.Millisecond).String(), "waiting", ln.waiting())
	ln.goOn(now)
	ln.scheduleHold(now)
}

// holdFor holds ln for d, or for ever.
func (ln *listener) holdFor(d time.Duration, now leaky.Time) {
	h := &ln.hold
	ln.gateWaiters()
	if !h.active() {
		h.since = now
	}
	if h.until, h.ramp = leaky.Never, (ramp{}); d != shaper.Forever {
		h.until = now + leaky.FromDuration(d)
	}
	ln.recallLater(func(*session) bool { return h.until > 0 })
	ln.scheduleHold(now)
}

// waiting returns how many connections wait for a downstream of ln, or for a limit before that.
func (ln *listener) waiting() (n int) {
	for _, q := range ln.proxy.admission.queues {
		if last := q.gates[len(q.gates)-1]; last.pool != nil && last.pool.listener == ln {
			n += q.len
		}
	}
	return n
}

// Hold holds a listener for d, or until it is resumed if that is [shaper.Forever]: new connections wait, and
// existing ones go on. With endIdle, those in which neither side owes an answer and nothing has moved for a second are
// closed. With d = 0 it resumes the listener. It returns how many connections were closed, and false if there is
// no such listener.
func (p *Proxy) Hold(name string, d time.Duration, endIdle bool) (ended int, ok bool) {
	ok = p.atListener(name, func(ln *listener, now leaky.Time) {
		if d == 0 {
			ln.resume(now)
			return
		}
		ln.holdFor(d, now)
		if endIdle {
			ln.proxy.admission.requeue(now) // what this frees lets nobody in
			ended = ln.endIdle(now)
		}
	})
	return ended, ok
}

// idleFor is how long nothing must have moved in a connection that endIdle closes.
const idleFor = leaky.Second

// endIdle closes the connections that are between two turns.
func (ln *listener) endIdle(now leaky.Time) (ended int) {
	ln.proxy.sessions.each(func(s *session) {
		if s.listener == ln && s.betweenTurns() && now.Sub(s.activity.lastActive) >= idleFor {
			s.endGracefully(shaper.Killed, now)
			ended++
		}
	})
	return ended
}

// betweenTurns reports whether neither side owes the other an answer.
func (s *session) betweenTurns() bool {
	return s.stage == stageRelaying && !s.up.dstShut && !s.down.dstShut && !s.turns.question && !s.up.pending() && !s.down.pending()
}

// Listeners returns the status of all listeners.
func (p *Proxy) Listeners() (all []shaper.ListenerStatus) {
	p.eachWorker(func(w *worker, now leaky.Time) {
		for ln := range w.ownListeners() {
			all = append(all, ln.status(now))
		}
	})
	return all
}

func (ln *listener) status(now leaky.Time) shaper.ListenerStatus {
	h := &ln.hold
	st := shaper.ListenerStatus{Listen: ln.name, Loop: ln.proxy.number, Waiting: ln.waiting(), Down: h.down, Held: h.until > 0, LastServed: -1}
	begin := now
	switch {
	case h.active():
		st.HeldFor = now.Sub(h.since).Duration()
	case ln.config.Load().OnDown == shaper.DownHold && ln.allShutOff():
		st.Down, st.HeldFor = true, now.Sub(ln.shutOffAt()).Duration()
	}
	if h.until > 0 {
		if st.HeldUntil = shaper.Forever; h.until != leaky.Never {
			st.HeldUntil = h.until.Sub(now).Duration()
			begin = h.until
		}
	}
	ramp := h.ramp
	if h.active() {
		ramp.begin(ln.config.Load().Ramp, 0, begin)
	} else if ramp.interval > 0 {
		st.Rate = float64(leaky.Second) / float64(ramp.interval)
	}
	if ramp.interval > 0 && !h.down && h.until != leaky.Never && !ln.allShutOff() && slices.ContainsFunc(ln.downstreams, func(d *downstream) bool { return d.hasCapacity(now) }) {
		if last := (begin + ramp.takes(st.Waiting, begin)).Sub(now).Duration(); last <= ln.config.Load().HoldTimeout {
			st.LastServed = last
		}
	}
	return st
}
