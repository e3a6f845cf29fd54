package conn

import (
	"net/netip"

	"shaperd/leaky"
	"shaperd/shaper"
)

// unit is something that leaves in one piece: a datagram, or the next grant of a
// TCP direction.
//
// It passes the lines of its path in order, the most specific first. In each it waits for
// its turn, and for the bucket; then it goes on to the next one. From the last it leaves, and
// all buckets are charged with what really left, at that instant. So every bucket's output
// keeps to its own envelope whatever the others do. Where it waits in a later line it holds
// back those of its lane alone; see booking.
type unit struct {
	owner   sender
	path    []stop
	pos     int
	waited  shaper.Set // positions in path at which it had to wait
	arrived leaky.Time
	ready   leaky.Time // since when lateness counts; before arrived for one that comes again
	bytes   uint64     // expected; a TCP grant may move less
	packets uint64
	weight  uint64 // bytes, as lanes count them
	credit  uint64 // times grain, or what left if that is less, of lateness that are given back
	grain   uint64 // bytes

	droppable  bool // refused by a line whose queue is full,
	admitted   bool // but not again
	queued     bool
	joined     leaky.Time // the line at pos, or when it was booked
	cost       leaky.Time // there
	booked     bool       // it had its turn in the last line, but not all were ready
	due        leaky.Time // when it leaves then
	turn       uint64     // of those that are booked, to tell who was first
	paid       leaky.Time // in the last line
	short      int        // the position of the line that was ready last
	firm       shaper.Set // positions of lines in which it was put off
	next, prev *unit      // there, of the same flow
}

// stop is where the units of one flow wait in one line.
type stop struct {
	*line
	share  *share
	lane   *lane
	leaf   *node
	fifo   bool       // all wait in one queue
	did    tally      // here, since it was last told
	waited leaky.Time // here, ever
}

// sender puts a unit on the wire. It returns what really left, and whether it
// wants to be submitted again.
type sender interface {
	send(now leaky.Time) (bytes, packets uint64, again bool)

	// resubmit is called for a unit that was taken out of its lines, when its
	// path has changed.
	resubmit(now leaky.Time)

	// refused is called for a droppable unit that has no place in a line, or that has to
	// give it up.
	refused(by *line, why shaper.Reason)
}

// line is the queue in front of one bucket, for as long as a flow needs it. Sources
// take turns in it, and the flows of a source.
type line struct {
	key    shaper.Key
	policy *shaper.Policy // that it was brought to last, see refresh
	shape  *leaky.Shape
	state  *shaper.State
	reject bool // tell sources of what is refused
	bucket leaky.Bucket
	meter  leaky.Meter // of what left
	refs   int

	root          node
	shares        map[netip.Addr]*share
	parted        []*share  // without flows, but virtual time has not come to their tags
	passing       *unit     // the last one that has gone on, until it waits
	bookings      []booking // by their time
	held          *unit     // the one of them, at most, that had to book as others have booked l
	late          []*unit   // that are booked and whose last line it is, by when they are due
	queuedBytes   uint64    // of datagrams, those of units that wait in a later line too
	queuedPackets uint64
	streams       int // grants in it, and those that wait in a later line
	event         leaky.Event
	pending       bool // in lines.work
}

// fullDatagram is what lateness is given back for at least: a datagram that fills an
// Ethernet frame. Of small ones by themselves each costs less time than a wake-up takes,
// and the mean would fall short.
const fullDatagram = 1472

const (
	// packetStall is how much lateness a limit in packets gives back to datagrams at
	// least. On a busy host threads stand still for up to a tick of the scheduler, 4 ms at
	// 250 Hz; at 10,000 packets/s it would lose what is due in 40 times the slack of a unit.
	packetStall = leaky.Second / 200

	// byteStall is the same for a limit in bytes, where it makes larger bursts: as much as
	// that of TCP.
	byteStall = leaky.Second / 500
)

// stall is how much lateness s gives back to datagrams at least.
func stall(s *leaky.Shape) leaky.Time {
	if s.Bytes.Unlimited() {
		return packetStall
	}
	return byteStall
}

// shed reports whether u has waited for too long: a datagram whose turn others have
// put off far beyond max_delay. How far leaves room for a thread that is late, which
// would else lose what it only delays.
func (u *unit) shed(shape *leaky.Shape, now leaky.Time) bool {
	return u.droppable && now.Sub(u.joined) > u.cost+shape.MaxDelay+shape.MaxDelay/2+leaky.Second/50
}

// lines are the queues in use. They belong to the loop's thread.
type lines struct {
	shaper *shaper.Shaper
	wheel  *leaky.Wheel
	clock  func() leaky.Time
	byKey  map[shaper.Key]*line
	work   []*line // whose heads may be able to move
	busy   bool    // run is at work
	turn   uint64  // the last one that was booked
}

func newLines(s *shaper.Shaper, w *leaky.Wheel, clock func() leaky.Time) *lines {
	return &lines{shaper: s, wheel: w, clock: clock, byKey: map[shaper.Key]*line{}}
}

// path returns the stops of a flow's units under set, in order. Limits without a
// rate, and those that only observe, have none. A flow is a stranger as long as nobody
// has answered it.
func (ls *lines) path(p *shaper.Policy, f *shaper.Flow, r shaper.Route, set shaper.Set, stranger bool) []stop {
	var list []*line
	var fifo shaper.Set // positions in list
	for i := range set.All {
		if !paces(p, i) {
			continue
		}
		key := p.Key(i, f, r)
		l := ls.byKey[key]
		if l == nil {
			l = &line{key: key, bucket: ls.shaper.CheckOut(key, ls.clock()), state: p.State(i), shape: p.Shape(i)}
			l.event.Fire = func(now leaky.Time) { ls.consider(l); ls.run(now) }
			ls.byKey[key] = l
		}
		ls.refresh(l, ls.clock())
		if p.Limit(i).Share == shaper.ShareFIFO {
			fifo |= 1 << len(list)
		}
		list = append(list, l)
	}
	path := make([]stop, len(list))
	for i, l := range list {
		path[i] = l.stop(f, fifo&(1<<i) != 0, stranger, list[i+1:])
	}
	return path
}

// paces reports whether limit i of p has lines.
func paces(p *shaper.Policy, i int) bool {
	shape := p.Shape(i)
	return !p.Limit(i).Observe && !(shape.Bytes.Unlimited() && shape.Packets.Unlimited())
}

// release gives back a path.
func (ls *lines) release(path []stop, now leaky.Time) {
	for i := range path {
		l := path[i].line
		path[i].quit()
		if l.refs--; l.refs == 0 {
			ls.wheel.Cancel(&l.event)
			delete(ls.byKey, l.key)
			ls.refresh(l, now)
			ls.shaper.CheckIn(l.key, l.bucket, now)
		}
	}
}

// full reports whether the queue of l has no room for another unit at now.
func (l *line) full(now leaky.Time) bool {
	b := l.bucket
	b.Charge(l.shape, l.queuedBytes, l.queuedPackets, now)
	return b.Depart(l.shape, now)-now > l.shape.MaxDelay
}

// submit queues u, which must have a path. It may leave, or be refused, before
// submit returns.
func (ls *lines) submit(u *unit, now leaky.Time) {
	u.arrived, u.ready = now, now
	ls.enqueue(u, now)
	ls.run(now)
}

func (ls *lines) enqueue(u *unit, now leaky.Time) {
	u.pos, u.waited, u.queued, u.weight = 0, 0, true, u.bytes
	ls.join(u, now)
}

// join puts u in the line it has come to. It counts there, and not in the later ones:
// what is held up here takes no room from others there. Where there is no room the
// longest queue of datagrams loses its last one, or u, if that would be the longest.
func (ls *lines) join(u *unit, now leaky.Time) {
	at := &u.path[u.pos]
	l := at.line
	u.joined, u.cost = now, l.cost(u.bytes, u.packets)
	for u.droppable && !u.admitted && l.full(now) {
		longest := l.root.deepest(at.leaf, u.cost)
		if longest == nil {
			at.did.dropped++
			u.queued = false
			ls.leave(u, u.pos)
			u.owner.refused(l, shaper.QueueFull)
			return
		}
		last := longest.tail
		for !last.droppable {
			last = last.prev
		}
		ls.drop(last, shaper.QueueFull)
	}
	l.deepen(u)
	at.leaf.push(u)
	if l.root.first() != u {
		u.waited |= 1 << u.pos
	}
	ls.consider(l)
}

// drop refuses a datagram that is queued.
func (ls *lines) drop(u *unit, why shaper.Reason) {
	at := &u.path[u.pos]
	at.did.dropped++
	ls.remove(u)
	ls.leave(u, u.pos)
	u.owner.refused(at.line, why)
}

// forgo refuses a datagram that is queued, as there is no memory for all of them.
func (ls *lines) forgo(u *unit, now leaky.Time) {
	ls.consider(u.path[u.pos].line)
	ls.drop(u, shaper.MemoryFull)
	ls.run(now)
}

// remove takes u out of the line it waits in.
func (ls *lines) remove(u *unit) {
	at := &u.path[u.pos]
	u.queued = false
	if u.booked {
		at.leaf.adjust(-u.paid)
		u.unbook(ls.clock())
	} else {
		at.leaf.remove(u)
	}
	at.shallow(u)
}

// deepen and shallow count a unit in and out of l. The bytes of a grant are not counted:
// they wait at their source, and sources take turns.
func (l *line) deepen(u *unit) {
	if !u.droppable {
		l.streams++
		return
	}
	l.queuedBytes += u.bytes
	l.queuedPackets += u.packets
}

func (l *line) shallow(u *unit) {
	if !u.droppable {
		l.streams--
		return
	}
	l.queuedBytes -= u.bytes
	l.queuedPackets -= u.packets
}

// cost is for how long l lets nothing more leave after so much has left.
func (l *line) cost(bytes, packets uint64) leaky.Time {
	return max(l.shape.Cost(bytes, packets))
}

// leave takes u off the first n of its lines, from which it had gone on.
func (ls *lines) leave(u *unit, n int) {
	for i := range u.path[:n] {
		at := &u.path[i]
		at.pass(u)
		at.leaf.done()
		ls.consider(at.line)
	}
}

// pass has u be gone from where it had gone on, or leaves.
func (at *stop) pass(u *unit) {
	at.shallow(u)
	if at.passing == u {
		at.passing = nil
		return
	}
	if u.path[u.pos].line == at.line {
		return
	}
	ln := at.lane
	ln.beyond -= u.weight
	if ln.barred && ln.beyond+u.weight <= max(laneDepth, u.weight) {
		ln.admit()
	}
}

// stay notes that the last unit that has gone on from l waits.
func (l *line) stay() {
	u := l.passing
	l.passing = nil
	for i := range u.path {
		if at := &u.path[i]; at.line == l {
			at.leaf.done()
			if at.lane.beyond += u.weight; at.lane.beyond+u.weight > laneDepth && !at.lane.barred {
				at.lane.bar()
			}
		}
	}
}

func (ls *lines) consider(l *line) {
	if !l.pending {
		l.pending = true
		ls.work = append(ls.work, l)
	}
}

// run moves heads until none can.
func (ls *lines) run(now leaky.Time) {
	if ls.busy {
		return
	}
	ls.busy = true
	for len(ls.work) > 0 {
		l := ls.work[len(ls.work)-1]
		ls.work = ls.work[:len(ls.work)-1]
		l.pending = false
		ls.serve(l, now)
	}
	ls.busy = false
}

// serve moves the units whose turn it is in l as far as they may go at now.
func (ls *lines) serve(l *line, now leaky.Time) {
	if l.passing != nil {
		l.stay()
	}
	if u := l.punctual(now); u != nil {
		ls.depart(u, now)
		return
	}
	for u := l.root.first(); u != nil; u = l.root.first() {
		if u.shed(l.shape, now) {
			ls.drop(u, shaper.QueueFull)
			continue
		}
		at, last := &u.path[u.pos], u.pos+1 == len(u.path)
		ready := l.bucket.Depart(l.shape, now)
		if last && l.held != nil {
			ready = l.fit(u, now, now)
		}
		if ready > now {
			u.waited |= 1 << u.pos
			ls.wake(l, ready)
			return
		}
		at.leaf.serve(u)
		if u.waited&(1<<u.pos) != 0 {
			at.wait(now.Sub(u.joined))
		}
		if !last {
			l.passing = u
			ls.consider(l) // once u has left, or waits
			u.pos++
			ls.join(u, now)
			return
		}
		if due := u.earliest(now); due > now {
			ls.book(u, due, now)
			continue
		}
		ls.depart(u, now)
		return
	}
	ls.wake(l, leaky.Never)
}

func (ls *lines) depart(u *unit, now leaky.Time) {
	paid := u.paid
	if u.booked {
		u.unbook(now)
	}
	for i := range u.path {
		at := &u.path[i]
		at.pass(u)
		ls.consider(at.line)
	}
	u.queued = false
	path, arrived, ready, waited, credit, grain, datagram := u.path, u.arrived, u.ready, u.waited, u.credit, u.grain, u.droppable
	bytes, packets, again := u.owner.send(now)
	if bytes|packets != 0 {
		// The thread may have been held up since now was read, and the unit left
		// later than that: charged to the earlier instant, more would follow it
		// than the rate allows.
		now = ls.clock()
	}
	var last leaky.Time
	if paid > 0 {
		path[len(path)-1].leaf.adjust(-paid)
	}
	for i := range path {
		if bytes|packets != 0 {
			at := &path[i]
			l, cost := at.line, at.cost(bytes, packets)
			slack := leaky.Time(credit) * at.cost(max(min(bytes, grain), fullDatagram), packets)
			if datagram {
				slack = max(slack, stall(l.shape))
			}
			charged := leaky.Late(ready, now, slack)
			l.bucket.Charge(l.shape, bytes, packets, charged)
			l.state.Promise.Note(l.meter.Note(l.shape, bytes, packets, slack, now))
			at.did.bytes += bytes
			if paid > 0 && i == len(path)-1 {
				at.leaf.adjust(cost)
			} else {
				at.leaf.charge(cost)
			}
			last = max(last, charged)
			verdict, reason := shaper.Pass, shaper.None
			if waited&(1<<i) != 0 {
				verdict, reason = shaper.Delay, shaper.ByRate
				l.state.Queue.Observe((now - arrived).Duration())
			}
			l.state.Bytes.Add(verdict, reason, bytes)
			l.state.Packets.Add(verdict, reason, packets)
			ls.putOff(l, now)
		}
	}
	if again {
		// It was there all the time, so what is left of the lateness is its own.
		u.arrived, u.ready = now, last
		ls.enqueue(u, now)
	}
	for _, at := range path {
		at.leaf.done()
	}
}

// withdraw takes units out of the lines they are in, and only then lets others
// move.
func (ls *lines) withdraw(now leaky.Time, units ...*unit) {
	for _, u := range units {
		if !u.queued {
			continue
		}
		ls.remove(u)
		ls.consider(u.path[u.pos].line)
		ls.leave(u, u.pos)
	}
	ls.run(now)
}
