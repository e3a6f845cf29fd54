// Owner: the loop's thread.

package conn

import (
	"math/bits"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// direction moves bytes from src to dst. Nothing is read before it can be written. So data waits in
// the kernel's socket buffer, and TCP flow control slows down the source.
type direction struct {
	session   *session
	src, dst  *endpoint
	unit      unit
	observed  shaper.Set
	unwritten []byte     // read, but not accepted by dst's buffer; or the header for dst
	headerLen uint64     // bytes of the header for dst
	pipe      *sock.Pipe // bytes spliced but not accepted by dst; nil when empty
	bulk      bool       // src had more than the last read took
	deferred  bool       // resume will be called
	blocked   bool       // what src has sent waits for the slots of a turn
	started   bool       // payload of src has moved
	srcEOF    bool       // src has sent its FIN
	dstShut   bool       // dst was shut down
	bytes     *atomic.Uint64

	moved      uint64 // bytes so far
	pacedGrant uint64 // grant with kernel pacing; 0 without
	pieceSize  int    // bytes per write with kernel pacing
	pacingRate uint64 // of dst's socket, bytes/s
	lowat      int    // TCP_NOTSENT_LOWAT of dst's socket; 0 is the system's default
	shares     uint64 // version of the shares in path for which all this was set

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

// unpaced is the pacing rate of a socket without pacing.
const unpaced = ^uint64(0)

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

func (d *direction) canMove() bool {
	return !d.dstShut && !d.blocked && d.session.stage == stageRelaying && d.dst.writable && (d.src.readable || d.holds() || d.srcEOF)
}

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

func (d *direction) resubmit(now leaky.Time) { d.resume(now) }

// refused is called when a quota that d needs is used up. If there is something to move, that ends the connection.
func (d *direction) refused(q *queue, why shaper.Reason) {
	d.deferred = true
	d.session.proxy.loop.runLater(func(now leaky.Time) {
		s := d.session
		if d.deferred = false; s.stage != stageRelaying {
			return
		}
		if !d.holds() {
			switch n, errno := sock.Peek(d.src.fd, s.proxy.loop.scratch[:1]); {
			case errno == unix.EAGAIN:
				d.src.markDrained()
				return
			case errno != 0:
				s.readFailed(d.src, now)
				return
			case n == 0: // the end takes nothing of the quota
				d.shutdown()
				s.finish(now)
				return
			}
		}
		q.state.Connections.Add(shaper.Refuse, why, 1)
		recordRefusal(s.proxy.shaper, q.state, q.key, s.flow.Source, now)
		s.proxy.trafficLog.warn("connection ended: "+why.String(), "limit", q.state.Name, "listener", s.name, "source", s.flow.Source)
		s.stopRelaying(now)
		s.resetWhenAcked(shaper.QuotaOver, now, &s.client, &s.server)
	})
}

func (d *direction) observe(n uint64, now leaky.Time) {
	s := d.session
	if s.pathPolicy != s.proxy.shaper.Policy() {
		return // a reload is in progress and has not updated s
	}
	s.proxy.observe(&s.flow, s.route, d.observed, n, 0, now)
}

// silent reports whether src has sent nothing yet.
func (d *direction) silent() bool { return !d.started && !d.src.readable && !d.srcEOF }

// pending reports whether dst has yet to receive something of src.
func (d *direction) pending() bool {
	return !d.dstShut && (d.src.readable || d.holds())
}

func (d *direction) reroute(oldPolicy, policy *shaper.Policy, set shaper.Set, now leaky.Time) {
	s, sched := d.session, d.session.proxy.loop.scheduler
	spec := pathSpec{policy: policy, flow: &s.flow, route: s.route, set: set}
	if !s.removed && sched.keepsPath(d.unit.path, spec, now) {
		d.setGrant()
		return
	}
	waits := d.unit.queued
	sched.withdraw(now, &d.unit)
	if s.stage != stageRelaying {
		return
	}
	d.unit.path = sched.replacePath(&s.account, d.unit.path, sched.newPath(spec), s.removed, oldPolicy, now)
	d.setGrant()
	if waits {
		d.resume(now)
	}
}

// setGrant sets the grant of d from its current queues.
func (d *direction) setGrant() {
	d.shares = versionOf(d.unit.path)
	grant := uint64(maxGrant)
	for i := range d.unit.path {
		grant = min(grant, d.unit.path[i].grantShape().Bytes.Units(leaky.FromDuration(grantTime)))
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
	for i := range d.unit.path {
		shape := d.unit.path[i].grantShape()
		if r := shape.Bytes.Units(leaky.Second); r < rate {
			rate, smooth = r, shape.BytesBurst == 0
		}
		// Less where max_delay is short: datagrams of the same bucket wait for a grant.
		time := min(leaky.FromDuration(pacedTime), max(leaky.FromDuration(grantTime), shape.MaxDelay/4))
		grant = min(grant, shape.Bytes.Units(time))
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
		limit = min(rate+rate/32, uint64(^uintptr(0))) // an unsigned long of the kernel
	}
	if limit != d.pacingRate {
		if unix.SetsockoptUint64(d.dst.fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, limit) != nil {
			d.pacedGrant, d.pieceSize = 0, 0
		}
		d.pacingRate = limit
	}
}

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
		_ = sock.SetOption(d.dst.fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, lowat)
		d.lowat = lowat
	}
}
