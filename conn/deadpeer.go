// Owner: the loop's thread.

package conn

import (
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
)

// ackTimeout is the time after which a peer is considered dead that has unacknowledged bytes
// in flight and acknowledges nothing: as long as keepalive takes on an idle connection. Linux
// itself takes a quarter of an hour (net.ipv4.tcp_retries2), during which a slot is held.
//
// TCP_USER_TIMEOUT would also end a live peer that does not read for so long: one whose window
// is closed.
const ackTimeout = 150 * leaky.Second

const (
	// ackChecks is the number of checks per ackTimeout.
	ackChecks = 10

	// walkBatch is the number of sessions that a walk looks at, between forwarding.
	walkBatch = 128
)

// ackMonitor finds peers that have vanished.
type ackMonitor struct {
	timeout leaky.Time // ackTimeout, except in tests
	timer   pacer.Event
	pos     int // of the walk over sessions
	info    unix.TCPInfo
}

// detectDeath makes the kernel detect that the peer of a downstream's socket has vanished. Few connections last so long
// that they need it.
func (e *endpoint) detectDeath() {
	if !e.keepAlive {
		e.keepAlive = true
		sock.SetKeepAlive(e.fd)
	}
}

// scheduleAckCheck schedules the next check, unless one is scheduled.
func (p *worker) scheduleAckCheck(now leaky.Time) {
	if v := &p.ackMonitor; !v.timer.Scheduled() {
		v.pos, v.timer.Fire = fromEnd, p.checkAcks
		p.loop.pacer.ScheduleCoarse(&v.timer, now+v.timeout/ackChecks)
	}
}

// checkAcks ends sessions with a dead peer.
func (p *worker) checkAcks(now leaky.Time) {
	v := &p.ackMonitor
	p.walkRelaying(&v.pos, &v.timer, p.scheduleAckCheck, now, func(s *session) {
		for _, d := range []*direction{&s.up, &s.down} {
			if d.ackTimedOut(v, now) {
				s.abort(d.dst.resetEnding(), now)
				break
			}
		}
	})
}

// walkRelaying calls f for some of the sessions that relay, and schedules timer for the next ones, or the next walk.
func (p *worker) walkRelaying(pos *int, timer *pacer.Event, again func(leaky.Time), now leaky.Time, f func(*session)) {
	for range walkBatch {
		s, ok := p.sessions.prev(pos)
		if !ok {
			*pos = fromEnd
			if len(p.sessions.all) > 0 {
				again(now)
			}
			return
		}
		if s.stage == stageRelaying {
			f(s)
		}
	}
	p.loop.pacer.Schedule(timer, now)
}

// ackTimedOut reports whether bytes that d has sent were unacknowledged for too long. A
// direction with all bytes acknowledged is not checked again until it has sent more.
func (d *direction) ackTimedOut(v *ackMonitor, now leaky.Time) bool {
	acks := &d.acks
	if acks.allAcked && acks.moved == d.moved && acks.shut == d.dstShut {
		return false
	}
	if sock.TCPInfo(d.dst.fd, &v.info) != 0 {
		return false
	}
	acks.moved, acks.shut = d.moved, d.dstShut
	acks.allAcked = v.info.Unacked == 0 && v.info.Notsent_bytes == 0
	lastAck := now.Sub(leaky.Time(v.info.Last_ack_recv) * (leaky.Second / 1000))
	if acks.allAcked || acks.unackedSince == 0 || lastAck > acks.unackedSince {
		acks.unackedSince = now
		return false
	}
	timeout := v.timeout
	if v.info.Unacked == 0 {
		timeout *= 2 // a closed window is probed at least every 120 s, and one probe may be lost
	}
	return now.Sub(acks.unackedSince) >= timeout
}

// ackProgress is the state of the bytes that a direction has sent, at the last check.
type ackProgress struct {
	unackedSince leaky.Time // the last acknowledgement, or the first check with unacknowledged bytes
	allAcked     bool
	moved        uint64 // direction.moved
	shut         bool   // direction.dstShut
}
