package conn

import (
	"math/bits"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// session is a client's TCP connection with its connection to a downstream. It belongs to the loop's
// thread.
type session struct {
	registryEntry
	waiter      // with the slots, held until the session ends
	*binding    // listener of the port
	proxy       *Proxy
	port        *tcpPort
	pathPolicy  *shaper.Policy // of the paths
	clientAddr  netip.AddrPort // of the client
	originalDst netip.AddrPort // destination in the PROXY header, or the zero value
	stage       stage
	timer       pacer.Event // of the stage
	reply       string      // for a refused client
	lingerLeft  int         // bytes that a refused client may still send

	downstream        *downstream   // where it holds a slot, or nil
	failedDownstreams []*downstream // could not be reached

	client, server endpoint
	up, down       direction // to the downstream, and from it
	activity       activity
}

// stage is the progress of a session.
type stage uint8

const (
	stageWaiting stage = iota // in admission
	stageHeader               // before admission, until the PROXY header was read
	stageDialing
	stageRelaying
	stageRefusing // refused, lingering close
	stageEnded
)

// endpoint is one of the two sockets of a session.
type endpoint struct {
	session      *session
	fd           int // -1 when there is none
	readable     bool
	writable     bool
	mustPoll     bool // a short read does not mean that no data is left
	readDisarmed bool // EPOLLIN is off
	failed       bool // cannot be written to; received data may still be read
}

// endpointEvents are the events of a session's sockets, edge-triggered.
const endpointEvents uint32 = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLPRI | unix.EPOLLRDHUP | 1<<31 // EPOLLET

// direction moves bytes from src to dst. Nothing is read before it can be written. So data waits in
// the kernel's socket buffer, and TCP flow control slows down the source.
type direction struct {
	session   *session
	src, dst  *endpoint
	unit      unit
	observed  shaper.Set
	unwritten []byte // read, but not accepted by dst's buffer; or the header for dst
	headerLen uint64 // bytes of the header for dst
	pipe      *pipe  // bytes spliced but not accepted by dst; nil when empty
	bulk      bool   // src had more than the last read took
	deferred  bool   // resume will be called
	started   bool   // payload of src has moved
	srcEOF    bool   // src has sent its FIN
	dstShut   bool   // dst was shut down
	bytes     *atomic.Uint64

	moved      uint64 // bytes so far
	pacedGrant uint64 // grant with kernel pacing; 0 without
	pieceSize  int    // bytes per write with kernel pacing
	pacingRate uint64 // of dst's socket, bytes/s
	lowat      int    // TCP_NOTSENT_LOWAT of dst's socket; 0 is the system's default

	acks ackProgress
}

const (
	// grantTime is the size of a TCP grant without kernel pacing, as time at the rate. With grantCredit
	// it makes sigma about 2.1 ms of the rate.
	grantTime = 700 * time.Microsecond

	// grantCredit is how many grants of lateness are compensated after a late wake-up. Stalls of this
	// kind of thread last up to 1.5 ms now and then; shorter ones cost nothing.
	grantCredit = 2

	// pacedTime is the size of a grant with kernel pacing, in pieces of half of grantTime: TCP's own
	// pacing needs no thread to wake for each piece. At such rates a wake-up costs more than
	// everything else.
	pacedTime = 4 * time.Millisecond

	// pacedStreams is how many streams of a queue have paced grants at once.
	pacedStreams = 4

	// pacedFrom is the number of bytes before the first paced grant: the kernel sends the first ten
	// segments of a connection at once.
	pacedFrom = 16 << 10

	// minGrant is one Ethernet segment.
	minGrant = 1448

	// maxGrant is the maximum that moves at once, and the grant of an unlimited direction.
	maxGrant = 256 << 10

	// movesPerTurn is how many times an unlimited direction moves bytes before other sockets, and
	// departures, have their turn. Each takes about 20 us.
	movesPerTurn = 2
)

// relay starts to move bytes between the two connected sockets. A header for the downstream goes
// first, under the same limits.
func (s *session) relay(header []byte, now leaky.Time) {
	s.stage = stageRelaying
	s.counts.Open.Add(1)
	s.up = direction{session: s, src: &s.client, dst: &s.server, bytes: &s.counts.ToDownstream}
	s.down = direction{session: s, src: &s.server, dst: &s.client, bytes: &s.counts.FromDownstream}
	s.up.unwritten, s.up.headerLen = header, uint64(len(header))
	for _, d := range []*direction{&s.up, &s.down} {
		d.unit, d.pacingRate = unit{owner: d, credit: grantCredit}, unpaced
	}
	s.updateSlots(now)
	s.reroute(s.proxy.shaper.Policy(), now)
	s.armTimeouts(now)
	s.advance(now)
}

// advance moves what can be moved in both directions.
func (s *session) advance(now leaky.Time) {
	s.up.advance(now)
	s.down.advance(now)
	s.finish(now)
}

// setGrant sets the grant of d from its current queues.
func (d *direction) setGrant() {
	grant := uint64(maxGrant)
	for _, l := range d.unit.path {
		grant = min(grant, l.shape.Bytes.Units(leaky.FromDuration(grantTime)))
	}
	d.unit.grain = max(grant, minGrant)
	d.unit.bytes = d.unit.grain
	d.setPacing()
	d.setUnsentLimit()
}

// setPacing lets the kernel spread larger grants if the narrowest limit allows no burst: dst's socket
// gets its rate, and slightly more to make up for delays.
func (d *direction) setPacing() {
	d.pacedGrant, d.pieceSize = 0, 0
	rate, grant, smooth := unpaced, uint64(scratchSize), false
	for _, l := range d.unit.path {
		if r := l.shape.Bytes.Units(leaky.Second); r < rate {
			rate, smooth = r, l.shape.BytesBurst == 0
		}
		// Less where max_delay is short: datagrams of the same bucket wait for a grant.
		time := min(leaky.FromDuration(pacedTime), max(leaky.FromDuration(grantTime), l.shape.MaxDelay/4))
		grant = min(grant, l.shape.Bytes.Units(time))
	}
	if smooth && d.unit.grain < spliceMin {
		piece := max(int(d.unit.grain)/2, minGrant)
		segment, err := unix.GetsockoptInt(d.dst.fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG)
		if err == nil && segment > 0 && segment < piece {
			piece -= piece % segment
		}
		if grant -= grant % uint64(piece); grant > d.unit.grain {
			d.pacedGrant, d.pieceSize = grant, piece
		}
	}
	limit := unpaced
	if d.pacedGrant > 0 {
		limit = rate + rate/32
	}
	if limit != d.pacingRate {
		if unix.SetsockoptUint64(d.dst.fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, limit) != nil {
			d.pacedGrant, d.pieceSize = 0, 0
		}
		d.pacingRate = limit
	}
}

// unpaced is the pacing rate of a socket without pacing.
const unpaced = ^uint64(0)

// sizeGrant sets the next grant. It is smaller if many streams share a queue: their unsent data leaves
// at once when a paused downstream resumes. The kernel does not pace the first ten segments.
func (d *direction) sizeGrant() {
	if d.pacedGrant == 0 || d.moved < max(pacedFrom, 10*uint64(d.pieceSize)) {
		return
	}
	streams := 0
	for _, l := range d.unit.path {
		streams = max(streams, l.grants)
	}
	grant := d.pacedGrant >> bits.Len(uint(streams)/(pacedStreams+1))
	d.unit.bytes = max(d.unit.grain, grant-grant%uint64(d.pieceSize))
	d.setUnsentLimit()
}

// setUnsentLimit limits the unsent data of dst's socket to about one grant. Otherwise a downstream
// that pauses would receive all that was written meanwhile at once when it resumes. Errors are
// ignored.
func (d *direction) setUnsentLimit() {
	lowat := 0 // the system's default
	if len(d.unit.path) > 0 {
		lowat = int(d.unit.bytes)
	}
	if lowat != d.lowat {
		_ = unix.SetsockoptInt(d.dst.fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, lowat)
		d.lowat = lowat
	}
}

func (e *endpoint) ready(events uint32, now leaky.Time) {
	s := e.session
	if events&(unix.EPOLLIN|unix.EPOLLPRI|unix.EPOLLRDHUP|unix.EPOLLHUP) != 0 {
		e.readable = true
		// A read stops at urgent data. That, or a FIN, may be all that is left, and no edge would
		// report it. The urgent byte itself is not forwarded.
		e.mustPoll = e.mustPoll || events&(unix.EPOLLPRI|unix.EPOLLRDHUP) != 0
	}
	if events&(unix.EPOLLOUT|unix.EPOLLHUP) != 0 {
		e.writable = true
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
		s.discardInput(now)
	}
}

// disarmRead disables read events of an endpoint whose bytes are queued: each segment would wake the
// loop in vain.
func (e *endpoint) disarmRead() {
	d := &e.session.up
	if e == d.dst {
		d = &e.session.down
	}
	if e.readable && d.unit.queued && !e.readDisarmed {
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

// peerFailed ends s after an endpoint failed. Data that a downstream sent before the failure goes to
// the client first: many servers reply before they have read the whole request, and the reset that
// follows is for the rest of it. When the client has failed, the data has no receiver.
func (s *session) peerFailed(e *endpoint, now leaky.Time) {
	if s.up.dstShut && s.down.dstShut { // all has been delivered
		s.finish(now)
		return
	}
	if e != &s.server || s.stage != stageRelaying || e.failed || s.down.dstShut {
		s.abort(e.resetEnding(), now)
		return
	}
	e.failed = true
	s.up.dstShut = true
	s.proxy.loop.scheduler.withdraw(now, &s.up.unit)
	e.readable, e.mustPoll = true, true
	s.down.advance(now)
}

// resetEnding is how the session ends when e fails.
func (e *endpoint) resetEnding() shaper.Ending {
	if e == &e.session.client {
		return shaper.ResetByClient
	}
	return shaper.ResetByServer
}

// hasLeft reports whether a waiting client has closed its connection without sending anything, or
// entirely. A client that has sent something and a FIN may wait for a reply.
func (e *endpoint) hasLeft(events uint32) bool {
	if events&unix.EPOLLHUP != 0 {
		return true
	}
	if events&unix.EPOLLRDHUP == 0 {
		return false
	}
	var b [1]byte
	n, _, err := unix.Recvfrom(e.fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return err == nil && n == 0
}

// advance moves what can be moved, or submits it. A FIN alone does not wait for a turn: it costs
// nothing, and would hold a slot while it waits.
func (d *direction) advance(now leaky.Time) {
	if d.deferred || !d.canMove() {
		return
	}
	if len(d.unit.path) > 0 && d.onlyEOFLeft() {
		if d.session.proxy.loop.scheduler.withdraw(now, &d.unit); d.canMove() { // a unit served in its place may have ended s
			d.shutdown()
		}
		return
	}
	if d.unit.queued {
		return
	}
	if len(d.unit.path) > 0 {
		d.session.proxy.loop.scheduler.submit(&d.unit, now)
		d.session.activity.throttled = d.session.activity.throttled || d.unit.queued
		return
	}
	for range movesPerTurn {
		n := d.move(maxGrant)
		if n > 0 && d.observed != 0 {
			d.observe(uint64(n), now)
		}
		if !d.canMove() {
			return
		}
	}
	d.deferMove()
}

func (d *direction) resubmit(now leaky.Time) { d.resume(now) }

func (d *direction) refused(*queue, shaper.Reason) {} // a grant is not droppable

func (d *direction) deferMove() {
	d.deferred = true
	d.session.proxy.loop.runLater(d.resume)
}

// resume is advance for a deferred move.
func (d *direction) resume(now leaky.Time) {
	d.deferred = false
	if d.session.stage != stageRelaying {
		return
	}
	d.advance(now)
	d.session.finish(now)
}

func (d *direction) canMove() bool {
	return !d.dstShut && d.session.stage == stageRelaying && d.dst.writable && (d.src.readable || len(d.unwritten) > 0 || d.pipe != nil || d.srcEOF)
}

// send moves one grant.
func (d *direction) send(now leaky.Time) (bytes, packets uint64, requeue bool) {
	d.sizeGrant()
	grant := d.unit.bytes
	if grant > d.unit.grain {
		// If src's buffer holds slightly more, it is included: a grant of its own would be done before
		// the source can send more, and the bucket would idle.
		grant += grant / 16
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

func (d *direction) observe(n uint64, now leaky.Time) {
	s := d.session
	if s.pathPolicy != s.proxy.shaper.Policy() {
		return // a reload is in progress and has not updated s
	}
	s.proxy.observe(&s.flow, s.route, d.observed, n, 0, now)
}

// finish ends s if both directions have ended.
func (s *session) finish(now leaky.Time) {
	if s.stage == stageRelaying && s.up.dstShut && s.down.dstShut {
		s.close(shaper.Closed, now)
	}
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
	linger := unix.Linger{Onoff: 1}
	for _, e := range []*endpoint{&s.client, &s.server} {
		if e.fd >= 0 {
			_ = unix.SetsockoptLinger(e.fd, unix.SOL_SOCKET, unix.SO_LINGER, &linger)
		}
	}
	s.close(how, now)
}

// close frees everything. The paths are released slightly later: the caller may be one of their
// queues, about to be charged for what was just sent.
func (s *session) close(how shaper.Ending, now leaky.Time) {
	l := s.proxy.loop
	s.counts.Ended[how].Add(1)
	s.logAccess(how, now)
	l.pacer.Cancel(&s.timer)
	if s.stage == stageRelaying {
		s.counts.Open.Add(-1)
		l.scheduler.withdraw(now, &s.up.unit, &s.down.unit)
		l.runLater(func(now leaky.Time) {
			s.reportUsage(now)
			l.scheduler.releasePath(s.up.unit.path, now)
			l.scheduler.releasePath(s.down.unit.path, now)
			s.up.unit.path, s.down.unit.path = nil, nil
		})
	}
	s.stage = stageEnded
	s.releaseDownstream(now)
	for _, e := range []*endpoint{&s.client, &s.server} {
		if e.fd >= 0 {
			l.close(e.fd)
		}
	}
	s.proxy.sessions.remove(s)
	for _, d := range []*direction{&s.up, &s.down} {
		d.unwritten = nil
		if d.pipe != nil {
			l.dropPipe(d.pipe)
			d.pipe = nil
		}
	}
	s.release(now)
	s.proxy.openConns.Add(-1)
}
