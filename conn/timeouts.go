// Owner: the loop's thread.

package conn

import (
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// SlowWindow is the period over which min_throughput is measured.
const SlowWindow = 10 * time.Second

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
	c := s.config.Load()
	p := &s.activity
	if p.start == 0 {
		p.start, p.lastActive, p.windowStart = now, now, now
		s.timer.Fire = s.armTimeouts
	}
	if c.FirstByteTimeout == 0 && c.TCPIdleTimeout == 0 && c.HalfCloseTimeout == 0 && c.MaxLifetime == 0 && c.MinThroughput == 0 {
		return
	}
	if s.up.unit.queued || s.down.unit.queued || s.turn != nil && s.turn.asking {
		p.lastActive, p.throttled = now, true
	}
	heard := min(now, s.proxy.loop.hearing.until)
	next := leaky.Never
	over := false
	check := func(after time.Duration, since leaky.Time, how shaper.Ending) {
		if after == 0 || over {
			return
		}
		if end := since.Add(leaky.FromDuration(after)); end > heard {
			next = min(next, end)
			return
		}
		over = true
		s.endGracefully(how, now)
	}
	check(c.MaxLifetime, p.start, shaper.LifetimeOver)
	if first := p.start.Add(leaky.FromDuration(c.FirstByteTimeout)); s.up.silent() || !s.up.started && now < first {
		check(c.FirstByteTimeout, p.start, shaper.FirstByteTimeout)
	}
	check(c.TCPIdleTimeout, p.lastActive, shaper.IdleTimeout)
	if s.up.dstShut != s.down.dstShut {
		check(c.HalfCloseTimeout, p.lastActive, shaper.HalfCloseTimeout)
	}
	if c.MinThroughput > 0 {
		if now >= p.windowStart+leaky.FromDuration(SlowWindow) && (p.throttled || p.moved >= c.MinThroughput/8*uint64(SlowWindow/time.Second)) {
			p.windowStart, p.moved, p.throttled = now, 0, false
		}
		check(SlowWindow, p.windowStart, shaper.TooSlow)
	}
	switch {
	case over || next == leaky.Never:
	case next <= now:
		s.proxy.loop.pacer.Defer(&s.timer)
	default:
		s.proxy.loop.pacer.ScheduleCoarse(&s.timer, next)
	}
}
