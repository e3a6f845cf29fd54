package conn

import (
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// pace is what a session has done lately.
type pace struct {
	begun  leaky.Time // when there was a downstream
	active leaky.Time // when bytes last moved, or were held back
	moved  uint64     // bytes since the window began
	window leaky.Time // when it did
	held   bool       // something was held back in the window
}

// watchOver ends s when it has got nowhere for too long, and comes back when that may
// be so.
func (s *session) watchOver(now leaky.Time) {
	t := &s.config.Load().Timeouts
	p := &s.pace
	if p.begun == 0 {
		p.begun, p.active, p.window = now, now, now
		s.timer.Fire = s.watchOver
	}
	if *t == (Timeouts{Connect: t.Connect}) {
		return
	}
	if s.up.unit.queued || s.down.unit.queued {
		p.active, p.held = now, true
	}
	next := leaky.Never
	over := false
	check := func(after time.Duration, since leaky.Time, how shaper.Ending) {
		if after == 0 || over {
			return
		}
		if end := since.Add(leaky.FromDuration(after)); end > now {
			next = min(next, end)
			return
		}
		over = true
		s.end(how, now)
	}
	check(t.Lifetime, p.begun, shaper.LifetimeOver)
	if first := p.begun.Add(leaky.FromDuration(t.FirstByte)); s.up.silent() || !s.up.begun && now < first {
		check(t.FirstByte, p.begun, shaper.FirstByteTimeout)
	}
	check(t.Idle, p.active, shaper.IdleTimeout)
	if s.up.shut != s.down.shut {
		check(t.HalfClose, p.active, shaper.HalfCloseTimeout)
	}
	if t.MinThroughput > 0 {
		if now >= p.window+leaky.FromDuration(SlowWindow) && (p.held || p.moved >= t.MinThroughput*uint64(SlowWindow/time.Second)) {
			p.window, p.moved, p.held = now, 0, false
		}
		check(SlowWindow, p.window, shaper.TooSlow)
	}
	if !over && next != leaky.Never {
		s.proxy.loop.pacer.ScheduleCoarse(&s.timer, next)
	}
}

// silent reports whether src has sent nothing yet.
func (d *direction) silent() bool { return !d.begun && !d.src.readable && !d.ended }

// pending reports whether there is something of src that dst has not got.
func (d *direction) pending() bool {
	return !d.shut && (d.src.readable || len(d.left) > 0 || d.pipe != nil)
}

// end ends s in the middle. Who has lost nothing sees an end, and not a reset.
func (s *session) end(how shaper.Ending, now leaky.Time) {
	if s.up.pending() || s.down.pending() {
		s.abort(how, now)
		return
	}
	s.close(how, now)
}
