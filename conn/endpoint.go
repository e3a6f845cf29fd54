// Owner: the loop's thread.

package conn

import (
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// endpoint is one of the two sockets of a session.
type endpoint struct {
	session      *session
	fd           int // -1 without a socket
	readable     bool
	writable     bool
	mustPoll     bool // a short read does not mean that no data is left
	ended        bool // a FIN has arrived, and no urgent data before it: after a short read only the FIN is left
	onlyEOF      bool // so it is
	readDisarmed bool // EPOLLIN is off
	failed       bool // cannot be written to; received data may still be read
	noDelay      bool // of a downstream: sends small segments at once
	keepAlive    bool // of a downstream: a dead peer is detected
	delaysAck    bool // of a downstream: the first bytes were to acknowledge its SYN
}

// sendAtOnce makes an endpoint send small segments at once. The first write of a connection does not need that.
func (e *endpoint) sendAtOnce() {
	if !e.noDelay && e == &e.session.server { // a client's socket has inherited it
		e.noDelay = true
		sock.SetNoDelay(e.fd)
	}
}

// acknowledge acknowledges the first bytes of a downstream at once, if it was not to be told at once that its SYN has arrived. The kernel
// takes the connection for one in which answers follow, and would delay that by 40 ms. A server that writes its answer in two pieces, and has not
// set TCP_NODELAY, waits for it. Without delaysAck the kernel acknowledges the first segments at once.
func (e *endpoint) acknowledge() {
	if e.delaysAck {
		e.delaysAck = false
		if !e.ended { // nothing waits for it
			sock.SendAck(e.fd)
		}
	}
}

// endpointEvents are the events of a session's sockets, edge-triggered.
const endpointEvents uint32 = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLPRI | unix.EPOLLRDHUP | 1<<31 // EPOLLET

func (e *endpoint) ready(events uint32, now leaky.Time) {
	s := e.session
	if events&(unix.EPOLLIN|unix.EPOLLPRI|unix.EPOLLRDHUP|unix.EPOLLHUP) != 0 {
		e.readable = true
		if e == &s.server {
			s.turns.arrives(now)
		}
		const unclear = unix.EPOLLPRI | unix.EPOLLERR
		e.ended = e.ended || events&(unix.EPOLLRDHUP|unclear) == unix.EPOLLRDHUP && !e.mustPoll && !e.readDisarmed
		// A read stops at urgent data. That, or a FIN, may be all that is left, and no edge would
		// report it. The urgent byte itself is not forwarded.
		e.mustPoll = e.mustPoll || events&(unix.EPOLLPRI|unix.EPOLLRDHUP) != 0
	}
	if events&(unix.EPOLLOUT|unix.EPOLLHUP) != 0 {
		e.writable = true
	}
	if s.stage == stageArrived && events&unix.EPOLLERR == 0 {
		s.begin(now)
	}
	switch {
	case s.stage == stageDialing && e == &s.server:
		s.dialReady(events, now)
	case events&unix.EPOLLERR != 0, s.stage == stageWaiting && e.hasLeft(events):
		s.peerFailed(e, now)
	case s.stage == stageHeader:
		s.readHeader(now)
	case s.stage == stageRelaying:
		e.disarmRead()
		s.advance(now)
	case s.stage == stageRefusing:
		s.refusedReady(now)
	}
}

// hasLeft reports whether a waiting client has closed its connection without sending anything, or
// entirely. A client that has sent something and a FIN may wait for a reply, but not during a hold: those that gave up
// would fill the line.
func (e *endpoint) hasLeft(events uint32) bool {
	if events&unix.EPOLLHUP != 0 {
		return true
	}
	if events&unix.EPOLLRDHUP == 0 {
		return false
	}
	var b [1]byte
	n, errno := sock.Peek(e.fd, b[:])
	return errno == 0 && n == 0 && !e.session.resend.pends() || e.session.holds()
}

// disarmRead disables read events of an endpoint whose bytes are queued: each segment would wake the
// loop in vain.
func (e *endpoint) disarmRead() {
	d := &e.session.up
	if e == d.dst {
		d = &e.session.down
	}
	if e.readable && (d.unit.queued || d.blocked) && !e.readDisarmed {
		e.readDisarmed = true
		e.session.proxy.loop.setEvents(e.fd, endpointEvents&^(unix.EPOLLIN|unix.EPOLLPRI))
	}
}

// markDrained records that an endpoint has no data to read, and enables its read events.
func (e *endpoint) markDrained() {
	e.readable = false
	if e.readDisarmed {
		e.readDisarmed = false
		e.session.proxy.loop.setEvents(e.fd, endpointEvents)
	}
}

// resetEnding is how the session ends when e fails.
func (e *endpoint) resetEnding() shaper.Ending {
	if e == &e.session.client {
		return shaper.ResetByClient
	}
	return shaper.ResetByServer
}
