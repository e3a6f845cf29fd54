// Owner: the loop's thread.

package conn

import (
	"slices"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

const (
	// spliceMin is how many bytes must be available at once for a pipe to be worth its two additional
	// system calls.
	spliceMin = 32 << 10

	// maxPipes is how many directions may hold a pipe with bytes that their downstream does not accept
	// yet; others copy. A pipe takes two descriptors.
	maxPipes = 64
)

// send moves one grant.
func (d *direction) send(now leaky.Time) (bytes, packets uint64, requeue bool) {
	if d.shares != versionOf(d.unit.path) {
		d.setGrant()
	}
	d.sizeGrant()
	grant := d.unit.bytes
	if grant > d.unit.grain {
		// If src's buffer holds slightly more, it is included: a grant of its own would be done before
		// the source can send more, and the bucket would idle.
		grant += grant / 16
	}
	if d.unit.most > 0 {
		grant = min(grant, d.unit.most)
	}
	n := d.move(int(grant))
	if n > 0 && d.observed != 0 {
		d.observe(uint64(n), now)
	}
	if d.dstShut {
		d.deferMove() // the caller has yet to charge the queues
	}
	return uint64(n), 0, d.canMove()
}

// move moves up to limit bytes and returns how many dst accepted.
func (d *direction) move(limit int) int {
	n := 0
	switch {
	case d.pipe != nil:
		n = d.drainPipe(limit)
	case d.bulk && !d.keeps() && !d.looks() && limit >= spliceMin && d.pieceSize == 0 && !d.src.mustPoll && len(d.unwritten) == 0 && !d.srcEOF && d.fillPipe(limit):
		if d.pipe != nil {
			n = d.drainPipe(limit)
		}
	default:
		n = d.copy(min(limit, scratchSize))
	}
	if n > 0 {
		d.moved += uint64(n)
		d.started = d.moved > d.headerLen
		d.bytes.Add(uint64(n))
		s, now := d.session, d.session.proxy.loop.now
		if state := s.downstream.state; d == &s.down {
			state.FromDownstream.Add(uint64(n))
			s.server.acknowledge()
			s.resend.stop()
			if asked := s.turns.question; s.turns.answered(state) {
				s.countAnswer(s.turns.took, now)
				if asked {
					s.attemptSucceeded(now)
				}
			}
			if s.turn != nil {
				s.turn.received(now)
			}
		} else {
			state.ToDownstream.Add(uint64(n))
			if d.started && !s.server.readable && !s.down.holds() {
				s.turns.asked(now)
			}
			if s.turn != nil {
				s.turn.sent(now)
			}
		}
		s.activity.moved += uint64(n)
		s.activity.lastActive = now
		if now.Sub(s.reportedAt) > reportInterval {
			s.reportUsage(now)
		}
		if d.onlyEOFLeft() {
			d.shutdown()
		}
	}
	return n
}

// keeps reports whether what d sends may have to be sent again.
func (d *direction) keeps() bool { return d == &d.session.up && d.session.resend.keeps() }

// looks reports whether what d sends is looked at.
func (d *direction) looks() bool {
	t := d.session.turn
	return t != nil && t.looks && !t.pg.lost
}

// holds reports whether d has read what it has not sent.
func (d *direction) holds() bool { return len(d.unwritten) > 0 || d.pipe != nil }

// onlyEOFLeft reports whether nothing is left to read from src but its FIN.
func (d *direction) onlyEOFLeft() bool {
	if !d.src.mustPoll || !d.src.readable || d.srcEOF || d.holds() || d.session.stage != stageRelaying {
		return false
	}
	if d.src.onlyEOF {
		return true
	}
	n, errno := sock.Peek(d.src.fd, d.session.proxy.loop.scratch[:1])
	return errno == 0 && n == 0 || d.src.failed && errno != 0 && errno != unix.EAGAIN
}

// copy moves bytes through the loop's memory.
func (d *direction) copy(limit int) int {
	b := d.unwritten
	if len(b) > limit {
		b = b[:limit]
	}
	if len(b) == 0 && !d.srcEOF {
		n, errno := sock.Recv(d.src.fd, d.session.proxy.loop.scratch[:limit])
		switch {
		case errno == unix.EAGAIN:
			d.src.markDrained()
			return 0
		case errno != 0:
			d.session.readFailed(d.src, d.session.proxy.loop.clock.Now())
			return 0
		case n == 0:
			d.srcEOF = true
		}
		b = d.session.proxy.loop.scratch[:n]
		d.bulk = n == limit
		switch {
		case n == 0 || n == limit:
		case !d.src.mustPoll:
			d.src.markDrained()
		case d.src.ended:
			d.src.onlyEOF = true
		}
	}
	if len(b) == 0 {
		if d.srcEOF {
			d.shutdown()
		}
		return 0
	}
	n, errno := d.write(b)
	switch {
	case errno == unix.EAGAIN:
		d.dst.writable = false
	case errno != 0:
		if d.keeps() && len(d.unwritten) == 0 {
			d.unwritten = slices.Clone(b)
		}
		d.session.peerFailed(d.dst, d.session.proxy.loop.clock.Now())
		return 0
	case n < len(b):
		d.dst.writable = false
	}
	if d.keeps() {
		d.session.resend.keep(b[:n])
	}
	if d.looks() {
		header := min(uint64(n), d.headerLen-min(d.moved, d.headerLen))
		if payload := b[header:n]; d == &d.session.up {
			d.session.turn.pg.sent(payload)
		} else {
			d.session.turn.pg.received(payload)
		}
	}
	if len(d.unwritten) > 0 {
		d.unwritten = d.unwritten[n:]
	} else if n < len(b) {
		d.unwritten = append([]byte(nil), b[n:]...)
	}
	if len(d.unwritten) == 0 {
		d.unwritten = nil
	}
	return n
}

// write sends bytes to dst, in pieces where the kernel paces them.
func (d *direction) write(b []byte) (int, unix.Errno) {
	if d.moved > 0 || d.pieceSize > 0 {
		d.dst.sendAtOnce()
	}
	if d.pieceSize == 0 || len(b) <= d.pieceSize {
		return sock.Send(d.dst.fd, b)
	}
	return d.session.proxy.loop.pieces.Send(d.dst.fd, b, d.pieceSize)
}

// fillPipe splices up to limit bytes of src into a pipe. It returns false, with no effect, if splicing
// is not possible.
func (d *direction) fillPipe(limit int) bool {
	l := d.session.proxy.loop
	p := l.pipes.Take()
	if p == nil {
		return false
	}
	errno := p.Fill(d.src.fd, limit)
	switch n := p.Len(); {
	case n > 0:
		d.pipe = p
		d.bulk = n >= spliceMin/2
		return true
	case errno == unix.EAGAIN:
		d.src.markDrained()
	case errno == unix.EINVAL || errno == unix.ENOMEM:
		l.pipes.Put(p)
		d.bulk = false
		return false
	case errno != 0:
		d.session.readFailed(d.src, l.clock.Now())
	default:
		d.shutdown()
	}
	l.pipes.Put(p)
	return true
}

// drainPipe splices up to limit bytes from the pipe to dst, and returns how many dst accepted.
func (d *direction) drainPipe(limit int) int {
	l, p := d.session.proxy.loop, d.pipe
	limit = min(limit, p.Len())
	d.dst.sendAtOnce()
	moved := 0
	for moved < limit {
		n, errno := p.Drain(d.dst.fd, limit-moved)
		if errno == unix.EAGAIN {
			d.dst.writable = false
			break
		}
		if errno != 0 || n == 0 {
			d.session.peerFailed(d.dst, l.clock.Now())
			return 0
		}
		moved += n
	}
	if p.Len() == 0 {
		d.pipe = nil
		l.pipes.Put(p)
	}
	return moved
}

// shutdown shuts down dst after the last byte of src. If src has failed, the session is reset instead.
func (d *direction) shutdown() {
	if s := d.session; d == &s.down {
		if s.tryAgain(shaper.FailedFirstByte, s.proxy.loop.now) {
			return
		}
		s.downstreamClosed(s.proxy.loop.now)
	}
	if d.src.failed {
		d.session.resetWhenSent(d.session.proxy.loop.now)
		return
	}
	d.srcEOF, d.dstShut = true, true
	if !d.session.up.dstShut || !d.session.down.dstShut { // else both sockets are closed right away
		sock.Shutdown(d.dst.fd)
	}
	l := d.session.proxy.loop
	d.session.activity.lastActive = l.now
	if d.session.config.Load().HalfCloseTimeout > 0 {
		l.pacer.Schedule(&d.session.timer, l.now)
	}
}
