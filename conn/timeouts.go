// Owner: the loop's thread.

package conn

import (
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// activity is the recent activity of a session.
type activity struct {
	start       leaky.Time // when the downstream was connected
	lastActive  leaky.Time // when bytes last moved or were delayed
	moved       uint64     // bytes in the window
	windowStart leaky.Time // for MinThroughput
	throttled   bool       // bytes were delayed in the window
}

// armTimeouts ends s if a timeout has passed, and otherwise schedules itself for the next one.
func (s *session) armTimeouts(now leaky.Time) {
	t := &s.config.Load().Timeouts
	p := &s.activity
	if p.start == 0 {
		p.start, p.lastActive, p.windowStart = now, now, now
		s.timer.Fire = s.armTimeouts
	}
	if *t == (Timeouts{Connect: t.Connect}) {
		return
	}
	if s.up.unit.queued || s.down.unit.queued {
		p.lastActive, p.throttled = now, true
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
		s.endGracefully(how, now)
	}
	check(t.Lifetime, p.start, shaper.LifetimeOver)
	if first := p.start.Add(leaky.FromDuration(t.FirstByte)); s.up.silent() || !s.up.started && now < first {
		check(t.FirstByte, p.start, shaper.FirstByteTimeout)
	}
	check(t.Idle, p.lastActive, shaper.IdleTimeout)
	if s.up.dstShut != s.down.dstShut {
		check(t.HalfClose, p.lastActive, shaper.HalfCloseTimeout)
	}
	if t.MinThroughput > 0 {
		if now >= p.windowStart+leaky.FromDuration(SlowWindow) && (p.throttled || p.moved >= t.MinThroughput*uint64(SlowWindow/time.Second)) {
			p.windowStart, p.moved, p.throttled = now, 0, false
		}
		check(SlowWindow, p.windowStart, shaper.TooSlow)
	}
	if !over && next != leaky.Never {
		s.proxy.loop.pacer.ScheduleCoarse(&s.timer, next)
	}
}
