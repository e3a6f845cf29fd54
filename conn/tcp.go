package conn

import (
	"math/bits"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// session is a TCP connection of a client and the one to a downstream that
// belongs to it. It belongs to the loop's thread.
type session struct {
	enrolled
	entrant  // with the slots that end with the session
	*service // it came to
	proxy    *Proxy
	port     *tcpPort
	routed   *shaper.Policy // that its lines are of
	from     netip.AddrPort // whose it is, and
	asked    netip.AddrPort // what it asked for, where that was announced
	stage    stage
	timer    leaky.Event // of the stage
	reply    string      // that a refused client is to get
	farewell int         // bytes that it may still send

	to     *downstream   // where it has a place
	failed []*downstream // that could not be reached

	client, server side
	up, down       direction // to the downstream and from it
	pace           pace
}

// stage is how far a session has come.
type stage uint8

const (
	entering   stage = iota // at the gates
	announcing              // before them, until the PROXY header is there
	dialing
	flowing
	leaving // refused
	ended
)

// side is one of the two sockets.
type side struct {
	session  *session
	fd       int // -1 when there is none
	readable bool
	writable bool
	unsure   bool // a short read does not mean that nothing is left
	deaf     bool // not told that there is something to read
	failed   bool // nothing goes there any more; what it has sent may be read
}

// edges are the events of a session's sockets, each told once.
const edges uint32 = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLPRI | unix.EPOLLRDHUP | 1<<31 // EPOLLET

// direction moves bytes from src to dst. Nothing is read before it may be
// written: what waits, waits in the kernel's socket buffer, where TCP holds the
// source back.
type direction struct {
	session  *session
	src, dst *side
	unit     unit
	observed shaper.Set
	left     []byte // read, but refused by dst's buffer; or a header for dst
	header   uint64 // how long that is
	pipe     *pipe  // likewise, when it was not copied; nil when it is empty
	bulk     bool   // src has had more than the last read took
	putOff   bool   // resume will be called
	begun    bool   // bytes of src have moved
	ended    bool   // src has sent its last byte
	shut     bool   // and dst was told
	bytes    *atomic.Uint64

	moved uint64 // bytes so far
	paced uint64 // the grant, once the kernel paces it; 0 where it does not
	piece int    // what leaves dst's socket at once then
	limit uint64 // dst's pacing rate, bytes/s
	lowat int    // how much dst's socket may hold unsent; 0 is the system's default

	underWay underWay
}

const (
	// grantTime is how much of its rate a TCP direction moves at once where the kernel
	// does not pace it. With grantCredit it makes sigma about 2.1 ms of the rate.
	grantTime = 700 * time.Microsecond

	// grantCredit is how many grants a late wake-up gives back. Stalls of this
	// kind of thread last up to 1.5 ms now and then; shorter ones cost nothing.
	grantCredit = 2

	// pacedTime is how much it moves where the kernel spreads that over the time, in
	// pieces of half of grantTime: TCP's own pacing, which has no thread to wake for
	// each. A wake-up costs more than all else at such rates.
	pacedTime = 4 * time.Millisecond

	// pacedStreams is how many streams of a line have such grants at once.
	pacedStreams = 4

	// pacedFrom is after how many bytes it does: the first ten segments of a connection
	// leave at once.
	pacedFrom = 16 << 10

	// minGrant is one segment of Ethernet's size.
	minGrant = 1448

	// maxGrant is the most that moves at once, and what an unlimited direction moves.
	maxGrant = 256 << 10

	// turn is how many times an unlimited direction moves bytes before other
	// sockets, and departures, have their turn. Each takes about 20 us.
	turn = 2
)

// begin lets bytes flow between the two connected sockets. A header for the downstream goes
// first, under the limits of what follows it.
func (s *session) begin(header []byte, now leaky.Time) {
	s.stage = flowing
	s.counts.Open.Add(1)
	s.up = direction{session: s, src: &s.client, dst: &s.server, bytes: &s.counts.ToDownstream}
	s.down = direction{session: s, src: &s.server, dst: &s.client, bytes: &s.counts.FromDownstream}
	s.up.left, s.up.header = header, uint64(len(header))
	for _, d := range []*direction{&s.up, &s.down} {
		d.unit, d.limit = unit{owner: d, credit: grantCredit}, unpaced
	}
	s.recount(now)
	s.reroute(s.proxy.shaper.Policy(), now)
	s.watchOver(now)
	s.advance(now)
}

// advance moves what can be moved in both directions.
func (s *session) advance(now leaky.Time) {
	s.up.advance(now)
	s.down.advance(now)
	s.finish(now)
}

// bound sets what d moves at once, by the lines that it has now.
func (d *direction) bound() {
	grant := uint64(maxGrant)
	for _, l := range d.unit.path {
		grant = min(grant, l.shape.Bytes.Units(leaky.FromDuration(grantTime)))
	}
	d.unit.grain = max(grant, minGrant)
	d.unit.bytes = d.unit.grain
	d.pace()
	d.boundUnsent()
}

// pace has the kernel spread larger grants where the narrowest limit lets no burst pass:
// dst's socket gets its rate, and a little more to make up for delays.
func (d *direction) pace() {
	d.paced, d.piece = 0, 0
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
			d.paced, d.piece = grant, piece
		}
	}
	limit := unpaced
	if d.paced > 0 {
		limit = rate + rate/32
	}
	if limit != d.limit {
		if unix.SetsockoptUint64(d.dst.fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, limit) != nil {
			d.paced, d.piece = 0, 0
		}
		d.limit = limit
	}
}

// unpaced is the pacing rate of a socket that has none.
const unpaced = ^uint64(0)

// size sets the next grant. When many share a line each gets less: what they hold unsent
// comes at once when a downstream goes on that has paused. The kernel does not pace the
// first ten segments.
func (d *direction) size() {
	if d.paced == 0 || d.moved < max(pacedFrom, 10*uint64(d.piece)) {
		return
	}
	streams := 0
	for _, l := range d.unit.path {
		streams = max(streams, l.streams)
	}
	grant := d.paced >> bits.Len(uint(streams)/(pacedStreams+1))
	d.unit.bytes = max(d.unit.grain, grant-grant%uint64(d.piece))
	d.boundUnsent()
}

// boundUnsent keeps what dst's socket holds unsent to about one grant. A downstream that
// pauses would otherwise be hit by all that was written meanwhile, at once, when it goes
// on. An error leaves it so.
func (d *direction) boundUnsent() {
	lowat := 0 // the system's default
	if len(d.unit.path) > 0 {
		lowat = int(d.unit.bytes)
	}
	if lowat != d.lowat {
		_ = unix.SetsockoptInt(d.dst.fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, lowat)
		d.lowat = lowat
	}
}

func (side *side) ready(events uint32, now leaky.Time) {
	s := side.session
	if events&(unix.EPOLLIN|unix.EPOLLPRI|unix.EPOLLRDHUP|unix.EPOLLHUP) != 0 {
		side.readable = true
		// The end, or urgent data, at which a read stops, may be all that is left:
		// no edge would tell. The urgent byte itself is not passed on.
		side.unsure = side.unsure || events&(unix.EPOLLPRI|unix.EPOLLRDHUP) != 0
	}
	if events&(unix.EPOLLOUT|unix.EPOLLHUP) != 0 {
		side.writable = true
	}
	switch {
	case s.stage == dialing && side == &s.server:
		s.dialed(events, now)
	case events&unix.EPOLLERR != 0, s.stage == entering && side.gone(events):
		s.lose(side, now)
	case s.stage == announcing:
		s.hear(now)
	case s.stage == flowing:
		side.hush()
		s.advance(now)
	case s.stage == leaving:
		s.sayFarewell(now)
	}
}

// hush ends events of data from a side whose bytes wait in a line: each segment would
// wake the loop for nothing.
func (side *side) hush() {
	d := &side.session.up
	if side == d.dst {
		d = &side.session.down
	}
	if side.readable && d.unit.queued && !side.deaf {
		side.deaf = true
		side.session.proxy.loop.rewatch(side.fd, edges&^(unix.EPOLLIN|unix.EPOLLPRI))
	}
}

// drained notes that a side has nothing to read. The loop tells when there is more.
func (side *side) drained() {
	side.readable = false
	if side.deaf {
		side.deaf = false
		side.session.proxy.loop.rewatch(side.fd, edges)
	}
}

// lose ends s for the failure of a side. What a downstream has sent before it failed goes
// to the client first: many answer what they do not want to read to the end, and the
// reset that follows is for the rest of it. When the client has left, nobody wants more.
func (s *session) lose(side *side, now leaky.Time) {
	if s.up.shut && s.down.shut { // all has been handed over
		s.finish(now)
		return
	}
	if side != &s.server || s.stage != flowing || side.failed || s.down.shut {
		s.abort(side.reset(), now)
		return
	}
	side.failed = true
	s.up.shut = true
	s.proxy.loop.lines.withdraw(now, &s.up.unit)
	side.readable, side.unsure = true, true
	s.down.advance(now)
}

// reset is how the session ends when side fails.
func (side *side) reset() shaper.Ending {
	if side == &side.session.client {
		return shaper.ResetByClient
	}
	return shaper.ResetByServer
}

// gone reports whether a client that waits has left: without a word, or altogether.
// One that has sent something and no more may wait for an answer.
func (side *side) gone(events uint32) bool {
	if events&unix.EPOLLHUP != 0 {
		return true
	}
	if events&unix.EPOLLRDHUP == 0 {
		return false
	}
	var b [1]byte
	n, _, err := unix.Recvfrom(side.fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return err == nil && n == 0
}

// advance moves what can be moved, or queues for it. An end that is all there is does not
// wait for a turn: it takes nothing, and holds a slot as long as it waits.
func (d *direction) advance(now leaky.Time) {
	if d.putOff || !d.movable() {
		return
	}
	if len(d.unit.path) > 0 && d.spent() {
		if d.session.proxy.loop.lines.withdraw(now, &d.unit); d.movable() { // who went on in its place may have ended s
			d.end()
		}
		return
	}
	if d.unit.queued {
		return
	}
	if len(d.unit.path) > 0 {
		d.session.proxy.loop.lines.submit(&d.unit, now)
		d.session.pace.held = d.session.pace.held || d.unit.queued
		return
	}
	for range turn {
		n := d.move(maxGrant)
		if n > 0 && d.observed != 0 {
			d.observe(uint64(n), now)
		}
		if !d.movable() {
			return
		}
	}
	d.putItOff()
}

func (d *direction) resubmit(now leaky.Time) { d.resume(now) }

func (d *direction) refused(*line, shaper.Reason) {} // a grant is not droppable

func (d *direction) putItOff() {
	d.putOff = true
	d.session.proxy.loop.later(d.resume)
}

// resume is advance, for work that was put off.
func (d *direction) resume(now leaky.Time) {
	d.putOff = false
	if d.session.stage != flowing {
		return
	}
	d.advance(now)
	d.session.finish(now)
}

func (d *direction) movable() bool {
	return !d.shut && d.session.stage == flowing && d.dst.writable && (d.src.readable || len(d.left) > 0 || d.pipe != nil || d.ended)
}

// send is one grant.
func (d *direction) send(now leaky.Time) (bytes, packets uint64, again bool) {
	d.size()
	grant := d.unit.bytes
	if grant > d.unit.grain {
		// What is left in src's buffer when it is less comes along: by itself it would be
		// over before the source can send more, and the bucket would stand idle.
		grant += grant / 16
	}
	n := d.move(int(grant))
	if n > 0 && d.observed != 0 {
		d.observe(uint64(n), now)
	}
	if d.shut {
		d.putItOff() // the caller has yet to charge the lines
	}
	return uint64(n), 0, d.movable()
}

func (d *direction) observe(n uint64, now leaky.Time) {
	s := d.session
	if s.routed != s.proxy.shaper.Policy() {
		return // a reload is under way, and has not come to s
	}
	s.proxy.observe(&s.flow, s.route, d.observed, n, 0, now)
}

// finish ends s when both directions have.
func (s *session) finish(now leaky.Time) {
	if s.stage == flowing && s.up.shut && s.down.shut {
		s.close(shaper.Closed, now)
	}
}

// abort ends s with a reset on both sides.
func (s *session) abort(how shaper.Ending, now leaky.Time) {
	switch {
	case s.stage == ended:
		return
	case s.stage == entering:
		s.gates.leave(&s.entrant, shaper.ClientGone, now)
		return
	}
	linger := unix.Linger{Onoff: 1}
	for _, side := range []*side{&s.client, &s.server} {
		if side.fd >= 0 {
			_ = unix.SetsockoptLinger(side.fd, unix.SOL_SOCKET, unix.SO_LINGER, &linger)
		}
	}
	s.close(how, now)
}

// close frees everything. The lines are given back a little later: the caller may
// be one of them, about to be charged for what was just sent.
func (s *session) close(how shaper.Ending, now leaky.Time) {
	l := s.proxy.loop
	s.counts.Ended[how].Add(1)
	s.logAccess(how, now)
	l.pacer.Cancel(&s.timer)
	if s.stage == flowing {
		s.counts.Open.Add(-1)
		l.lines.withdraw(now, &s.up.unit, &s.down.unit)
		l.later(func(now leaky.Time) {
			s.settle(now)
			l.lines.release(s.up.unit.path, now)
			l.lines.release(s.down.unit.path, now)
			s.up.unit.path, s.down.unit.path = nil, nil
		})
	}
	s.stage = ended
	s.leaveDownstream(now)
	for _, side := range []*side{&s.client, &s.server} {
		if side.fd >= 0 {
			l.close(side.fd)
		}
	}
	s.proxy.sessions.remove(s)
	for _, d := range []*direction{&s.up, &s.down} {
		d.left = nil
		if d.pipe != nil {
			l.dropPipe(d.pipe)
			d.pipe = nil
		}
	}
	s.release(now)
	s.proxy.open.Add(-1)
}
