package conn

import (
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// session is a TCP connection of a client and the one to a downstream that
// belongs to it. It belongs to the loop's thread.
type session struct {
	loop  *loop
	proxy *Proxy
	site  *site
	flow  shaper.Flow
	route shaper.Route
	slots *slots // that end with the session

	client, server side
	up, down       direction // to the downstream and from it
	closed         bool
}

// side is one of the two sockets.
type side struct {
	session  *session
	fd       int
	readable bool
	writable bool
	unsure   bool // a short read does not mean that nothing is left
}

// direction moves bytes from src to dst. Nothing is read before it may be
// written: what waits, waits in the kernel's socket buffer, where TCP holds the
// source back.
type direction struct {
	session  *session
	src, dst *side
	unit     unit
	observed shaper.Set
	left     []byte // read, but refused by dst's buffer
	putOff   bool   // resume will be called
	ended    bool   // src has sent its last byte
	shut     bool   // and dst was told
	bytes    *atomic.Uint64
}

const (
	// grantTime is how much of its rate a TCP direction moves at once. With
	// grantCredit it makes sigma about 2.1 ms of the rate.
	grantTime = 700 * time.Microsecond

	// grantCredit is how many grants a late wake-up gives back. Stalls of this
	// kind of thread last up to 1.5 ms now and then; shorter ones cost nothing.
	grantCredit = 2

	// minGrant is one segment of Ethernet's size.
	minGrant = 1448

	// turn is how many times an unlimited direction moves bytes before other
	// sockets, and departures, have their turn. Each takes about 20 us.
	turn = 2
)

// adopt takes over the two connected sockets of s. It owns them from then on.
func (l *loop) adopt(s *session, now leaky.Time) {
	s.loop = l
	s.client.session, s.server.session = s, s
	s.up = direction{session: s, src: &s.client, dst: &s.server, bytes: &s.site.counts.ToDownstream}
	s.down = direction{session: s, src: &s.server, dst: &s.client, bytes: &s.site.counts.FromDownstream}
	for _, d := range []*direction{&s.up, &s.down} {
		d.unit = unit{owner: d, credit: grantCredit}
	}
	s.proxy.sessions[s] = struct{}{}
	policy := s.proxy.shaper.Policy()
	s.reroute(policy)
	if s.slots.policy != policy { // a reload came during the dial
		s.slots.move(policy, &s.flow, s.route)
	}
	const events uint32 = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLPRI | unix.EPOLLRDHUP | 1<<31 // EPOLLET
	for _, side := range []*side{&s.client, &s.server} {
		if err := l.watch(side.fd, events, side); err != nil {
			s.proxy.log.Error("watch connection", "listener", s.site.name, "err", err)
			s.abort(now)
			return
		}
	}
}

// reroute puts s under policy. Its units must not be queued.
func (s *session) reroute(policy *shaper.Policy) {
	s.flow.Listen = policy.ListenIndex(s.site.name)
	s.route = policy.Route(&s.flow)
	s.up.reroute(policy, s.route.ToDownstream)
	s.down.reroute(policy, s.route.FromDownstream)
}

func (d *direction) reroute(policy *shaper.Policy, set shaper.Set) {
	s := d.session
	old := d.unit.path
	d.unit.path = s.loop.lines.path(policy, &s.flow, s.route, set)
	s.loop.lines.release(old, s.loop.clock.Now())
	d.observed = policy.Observed(set)
	grant := uint64(scratchSize)
	for _, l := range d.unit.path {
		grant = min(grant, l.shape.Bytes.Units(leaky.FromDuration(grantTime)))
	}
	d.unit.bytes = max(grant, minGrant)
	d.boundUnsent()
}

// boundUnsent keeps what dst's socket holds unsent to about one grant. A
// downstream that pauses would otherwise be hit by all that was written
// meanwhile, at once, when it goes on. An error leaves it so.
func (d *direction) boundUnsent() {
	lowat := 0 // the system's default
	if len(d.unit.path) > 0 {
		lowat = int(d.unit.bytes)
	}
	_ = unix.SetsockoptInt(d.dst.fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, lowat)
}

func (side *side) ready(events uint32, now leaky.Time) {
	s := side.session
	if s.closed {
		return
	}
	if events&unix.EPOLLERR != 0 {
		s.abort(now)
		return
	}
	if events&(unix.EPOLLIN|unix.EPOLLPRI|unix.EPOLLRDHUP|unix.EPOLLHUP) != 0 {
		side.readable = true
		// The end, or urgent data, at which a read stops, may be all that is left:
		// no edge would tell. The urgent byte itself is not passed on.
		side.unsure = side.unsure || events&(unix.EPOLLPRI|unix.EPOLLRDHUP) != 0
	}
	if events&(unix.EPOLLOUT|unix.EPOLLHUP) != 0 {
		side.writable = true
	}
	s.up.advance(now)
	s.down.advance(now)
	s.finish(now)
}

// advance moves what can be moved, or queues for it.
func (d *direction) advance(now leaky.Time) {
	if d.unit.queued || d.putOff || !d.movable() {
		return
	}
	if len(d.unit.path) > 0 {
		d.session.loop.lines.submit(&d.unit, now)
		return
	}
	for range turn {
		n := d.move(scratchSize)
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

func (d *direction) refused(*line) {} // a grant is not droppable

func (d *direction) putItOff() {
	d.putOff = true
	d.session.loop.later(d.resume)
}

// resume is advance, for work that was put off.
func (d *direction) resume(now leaky.Time) {
	d.putOff = false
	if d.session.closed {
		return
	}
	d.advance(now)
	d.session.finish(now)
}

func (d *direction) movable() bool {
	return !d.shut && !d.session.closed && d.dst.writable && (d.src.readable || len(d.left) > 0 || d.ended)
}

// send is one grant.
func (d *direction) send(now leaky.Time) (bytes, packets uint64, again bool) {
	n := d.move(int(d.unit.bytes))
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
	s.proxy.shaper.Decide(s.proxy.shaper.Policy(), &s.flow, s.route, d.observed, n, 0, now)
}

// move moves at most limit bytes and returns how many dst took.
func (d *direction) move(limit int) int {
	b := d.left
	if len(b) > limit {
		b = b[:limit]
	}
	if len(b) == 0 && !d.ended {
		n, errno := recv(d.src.fd, d.session.loop.scratch[:limit])
		switch {
		case errno == unix.EAGAIN:
			d.src.readable = false
			return 0
		case errno != 0:
			d.session.abort(d.session.loop.clock.Now())
			return 0
		case n == 0:
			d.ended = true
		}
		b = d.session.loop.scratch[:n]
		if n > 0 && n < limit && !d.src.unsure {
			d.src.readable = false // emptied: an edge tells when there is more
		}
	}
	if len(b) == 0 {
		if d.ended {
			d.shut = true
			_ = unix.Shutdown(d.dst.fd, unix.SHUT_WR)
		}
		return 0
	}
	n, errno := send(d.dst.fd, b)
	switch {
	case errno == unix.EAGAIN:
		d.dst.writable = false
	case errno != 0:
		d.session.abort(d.session.loop.clock.Now())
		return 0
	case n < len(b):
		d.dst.writable = false
	}
	if len(d.left) > 0 {
		d.left = d.left[n:]
	} else if n < len(b) {
		d.left = append([]byte(nil), b[n:]...)
	}
	if len(d.left) == 0 {
		d.left = nil
	}
	d.bytes.Add(uint64(n))
	return n
}

// finish ends s when both directions have.
func (s *session) finish(now leaky.Time) {
	if !s.closed && s.up.shut && s.down.shut {
		s.close(now)
	}
}

// abort ends s with a reset on both sides.
func (s *session) abort(now leaky.Time) {
	if s.closed {
		return
	}
	linger := unix.Linger{Onoff: 1}
	_ = unix.SetsockoptLinger(s.client.fd, unix.SOL_SOCKET, unix.SO_LINGER, &linger)
	_ = unix.SetsockoptLinger(s.server.fd, unix.SOL_SOCKET, unix.SO_LINGER, &linger)
	s.close(now)
}

// close frees everything. The lines are given back a little later: the caller may
// be one of them, about to be charged for what was just sent.
func (s *session) close(now leaky.Time) {
	s.closed = true
	s.loop.lines.withdraw(now, &s.up.unit, &s.down.unit)
	for _, side := range []*side{&s.client, &s.server} {
		s.loop.forget(side.fd)
		unix.Close(side.fd)
	}
	delete(s.proxy.sessions, s)
	s.up.left, s.down.left = nil, nil
	s.loop.later(func(now leaky.Time) {
		s.loop.lines.release(s.up.unit.path, now)
		s.loop.lines.release(s.down.unit.path, now)
		s.up.unit.path, s.down.unit.path = nil, nil
	})
	s.slots.release()
	s.site.counts.Open.Add(-1)
	s.proxy.open.Add(-1)
}

func recv(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

func send(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}
