package conn

import (
	"net/netip"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// unit is what leaves in one piece: a datagram, or the next grant of a TCP direction.
//
// It passes the queues of its path in order, most specific first. In each it waits for its turn and
// for the bucket, and then moves to the next one. It leaves from the last one, and at that instant all
// buckets are charged with what really left. So the output of every bucket conforms to its own
// envelope, whatever the other buckets do. While it waits in a later queue it holds back only the
// units of its lane; see booking.
type unit struct {
	owner      sender
	path       []hop
	pos        int
	delayedAt  shaper.Set // positions in path where it had to wait
	arrived    leaky.Time
	readySince leaky.Time // from when lateness counts; before arrived for a unit that was requeued
	bytes      uint64     // expected size; a TCP grant may move less
	packets    uint64
	weight     uint64 // bytes, as lanes count them
	credit     uint64 // lateness to compensate, in multiples of grain, or of what left if that is less
	grain      uint64 // bytes

	droppable   bool // may be refused by a full queue
	accepted    bool // was in its queues before, and is not refused for lack of space
	queued      bool
	enqueuedAt  leaky.Time // in the queue at pos, or when it was booked
	cost        leaky.Time // in the queue at pos
	booked      bool       // had its turn in the last queue, but not all buckets were ready
	due         leaky.Time // departure time of a booked unit
	bookingSeq  uint64     // order of booking
	charged     leaky.Time // in the last queue, when booked
	bottleneck  int        // position of the queue that becomes ready last
	postponedAt shaper.Set // positions of queues in which it was postponed
	next, prev  *unit      // of the same flow, in the queue
}

// hop is where the units of one flow wait in one queue.
type hop struct {
	*queue
	source    *sourceQueue
	lane      *lane
	flowQueue *node
	fifo      bool       // all flows share one sub-queue
	usage     usage      // here, since the last report
	waited    leaky.Time // here, in total
}

// sender puts a unit on the wire. It returns what really left, and whether to requeue the unit.
type sender interface {
	send(now leaky.Time) (bytes, packets uint64, again bool)

	// resubmit is called for a unit that was withdrawn because its path changed.
	resubmit(now leaky.Time)

	// refused is called for a droppable unit that found no space in a queue, or lost it.
	refused(by *queue, why shaper.Reason)
}

// queue is the queue of one bucket. It exists while a flow needs it. Sources take turns in it, and so
// do the flows of a source.
type queue struct {
	key        shaper.Key
	policy     *shaper.Policy // of shape, see refresh
	shape      *leaky.Shape
	state      *shaper.LimitState
	sendReject bool // reply to the source of a refused datagram with an ICMP error
	bucket     leaky.Bucket
	meter      leaky.Meter // of what left
	refs       int

	root          node
	sources       map[netip.Addr]*sourceQueue
	idleSources   []*sourceQueue // without flows, and with start tags ahead of virtual time
	forwarding    *unit          // the last unit that moved to a later queue, until it waits there
	bookings      []booking      // ordered by from
	blocked       *unit          // the unit, at most one, that was booked because of other bookings of this queue
	booked        []*unit        // units booked whose last queue this is, ordered by due
	queuedBytes   uint64         // of datagrams, including those that moved to a later queue
	queuedPackets uint64
	grants        int // queued TCP grants, including those that moved to a later queue
	timer         pacer.Event
	pending       bool // in scheduler.work
}

// fullDatagram is the least size for which lateness is compensated: that of a datagram that fills an
// Ethernet frame. A small one costs less time than a wake-up takes, and the mean rate would fall
// short.
const fullDatagram = 1472

const (
	// packetSlack is the least lateness that a limit in packets compensates for datagrams. On a busy
	// host threads stall for up to a scheduler tick, 4 ms at 250 Hz. At 10,000 packets/s that would
	// lose 40 times the slack of a unit.
	packetSlack = leaky.Second / 200

	// byteSlack is the same for a limit in bytes, where slack makes larger bursts: as much as that of
	// TCP.
	byteSlack = leaky.Second / 500
)

// datagramSlack is the least lateness that s compensates for datagrams.
func datagramSlack(s *leaky.Shape) leaky.Time {
	if s.Bytes.Unlimited() {
		return packetSlack
	}
	return byteSlack
}

// expired reports whether u, a datagram, has waited far beyond max_delay because others went first.
// The margin allows for a late thread, which would otherwise lose datagrams that it only delays.
func (u *unit) expired(shape *leaky.Shape, now leaky.Time) bool {
	return u.droppable && now.Sub(u.enqueuedAt) > u.cost+shape.MaxDelay+shape.MaxDelay/2+leaky.Second/50
}

// scheduler holds the queues in use. It belongs to the loop's thread.
type scheduler struct {
	shaper      *shaper.Shaper
	wheel       *pacer.Wheel
	clock       func() leaky.Time
	byKey       map[shaper.Key]*queue
	work        []*queue // queues whose head may be able to move
	running     bool     // run is on the stack
	lastBooking uint64   // bookingSeq of the last unit booked
}

func newScheduler(s *shaper.Shaper, w *pacer.Wheel, clock func() leaky.Time) *scheduler {
	return &scheduler{shaper: s, wheel: w, clock: clock, byKey: map[shaper.Key]*queue{}}
}

// newPath returns the hops of a flow's units under set, in order. Limits that have no rate, or only
// observe, have no hop. A flow is unverified until the downstream has replied to it.
func (sc *scheduler) newPath(p *shaper.Policy, f *shaper.Flow, r shaper.Route, set shaper.Set, unverified bool) []hop {
	var list []*queue
	var fifo shaper.Set // positions in list
	for i := range set.All {
		if !hasQueue(p, i) {
			continue
		}
		key := p.Key(i, f, r)
		q := sc.byKey[key]
		if q == nil {
			q = &queue{key: key, bucket: sc.shaper.CheckOut(key, sc.clock()), state: p.State(i), shape: p.Shape(i)}
			q.timer.Fire = func(now leaky.Time) { sc.markRunnable(q); sc.run(now) }
			sc.byKey[key] = q
		}
		sc.refresh(q, sc.clock())
		if p.Limit(i).Scheduling == shaper.ScheduleFIFO {
			fifo |= 1 << len(list)
		}
		list = append(list, q)
	}
	path := make([]hop, len(list))
	for i, q := range list {
		path[i] = q.addFlow(f, fifo&(1<<i) != 0, unverified, list[i+1:])
	}
	return path
}

// hasQueue reports whether limit i of p queues units.
func hasQueue(p *shaper.Policy, i int) bool {
	shape := p.Shape(i)
	return !p.Limit(i).Observe && !(shape.Bytes.Unlimited() && shape.Packets.Unlimited())
}

// releasePath releases the hops of a path.
func (sc *scheduler) releasePath(path []hop, now leaky.Time) {
	for i := range path {
		q := path[i].queue
		path[i].removeFlow()
		if q.refs--; q.refs == 0 {
			sc.wheel.Cancel(&q.timer)
			delete(sc.byKey, q.key)
			sc.refresh(q, now)
			sc.shaper.CheckIn(q.key, q.bucket, now)
		}
	}
}

// full reports whether q cannot take another unit at now.
func (q *queue) full(now leaky.Time) bool {
	b := q.bucket
	b.Charge(q.shape, q.queuedBytes, q.queuedPackets, now)
	return b.Depart(q.shape, now)-now > q.shape.MaxDelay
}

// submit enqueues u, which must have a path. It may leave or be refused before submit returns.
func (sc *scheduler) submit(u *unit, now leaky.Time) {
	u.arrived, u.readySince = now, now
	sc.begin(u, now)
	sc.run(now)
}

// begin enqueues u in the first queue of its path.
func (sc *scheduler) begin(u *unit, now leaky.Time) {
	u.pos, u.delayedAt, u.queued, u.weight = 0, 0, true, u.bytes
	sc.enqueue(u, now)
}

// enqueue puts u into the queue at its position. It counts in that queue and not in the later ones, so
// what is held up here takes no space from others there. When q is full, the longest sub-queue of
// datagrams loses its last one, or u if u would make its own the longest.
func (sc *scheduler) enqueue(u *unit, now leaky.Time) {
	h := &u.path[u.pos]
	q := h.queue
	u.enqueuedAt, u.cost = now, q.cost(u.bytes, u.packets)
	for u.droppable && !u.accepted && q.full(now) {
		longest := q.root.longestQueue(h.flowQueue, u.cost)
		if longest == nil {
			h.usage.dropped++
			u.queued = false
			sc.leaveEarlier(u, u.pos)
			u.owner.refused(q, shaper.QueueFull)
			return
		}
		last := longest.tail
		for !last.droppable {
			last = last.prev
		}
		sc.drop(last, shaper.QueueFull)
	}
	q.addBacklog(u)
	h.flowQueue.push(u)
	if q.root.nextUnit() != u {
		u.delayedAt |= 1 << u.pos
	}
	sc.markRunnable(q)
}

// drop refuses a queued datagram.
func (sc *scheduler) drop(u *unit, why shaper.Reason) {
	h := &u.path[u.pos]
	h.usage.dropped++
	sc.remove(u)
	sc.leaveEarlier(u, u.pos)
	u.owner.refused(h.queue, why)
}

// evict refuses a queued datagram because the memory for datagrams is used up.
func (sc *scheduler) evict(u *unit, now leaky.Time) {
	sc.markRunnable(u.path[u.pos].queue)
	sc.drop(u, shaper.MemoryFull)
	sc.run(now)
}

// remove takes u out of the queue that it waits in.
func (sc *scheduler) remove(u *unit) {
	h := &u.path[u.pos]
	u.queued = false
	if u.booked {
		h.flowQueue.adjust(-u.charged)
		u.cancelBooking(sc.clock())
	} else {
		h.flowQueue.remove(u)
	}
	h.subBacklog(u)
}

// addBacklog and subBacklog count a unit in q. The bytes of a grant are not counted: they wait at
// their source, and sources take turns.
func (q *queue) addBacklog(u *unit) {
	if !u.droppable {
		q.grants++
		return
	}
	q.queuedBytes += u.bytes
	q.queuedPackets += u.packets
}

func (q *queue) subBacklog(u *unit) {
	if !u.droppable {
		q.grants--
		return
	}
	q.queuedBytes -= u.bytes
	q.queuedPackets -= u.packets
}

// cost is how long q lets nothing leave after a unit of that size.
func (q *queue) cost(bytes, packets uint64) leaky.Time {
	return max(q.shape.Cost(bytes, packets))
}

// leaveEarlier removes u from the first n of its queues, which it had moved on from.
func (sc *scheduler) leaveEarlier(u *unit, n int) {
	for i := range u.path[:n] {
		h := &u.path[i]
		h.release(u)
		h.flowQueue.endService()
		sc.markRunnable(h.queue)
	}
}

// release ends the count of u at a hop that it had moved on from or leaves from.
func (h *hop) release(u *unit) {
	h.subBacklog(u)
	if h.forwarding == u {
		h.forwarding = nil
		return
	}
	if u.path[u.pos].queue == h.queue {
		return
	}
	ln := h.lane
	ln.laterBytes -= u.weight
	if ln.suspended && ln.laterBytes+u.weight <= max(laneLimit, u.weight) {
		ln.resume()
	}
}

// markForwarded records that the unit that last moved on from q waits in a later queue.
func (q *queue) markForwarded() {
	u := q.forwarding
	q.forwarding = nil
	for i := range u.path {
		if h := &u.path[i]; h.queue == q {
			h.flowQueue.endService()
			if h.lane.laterBytes += u.weight; h.lane.laterBytes+u.weight > laneLimit && !h.lane.suspended {
				h.lane.suspend()
			}
		}
	}
}

// markRunnable makes run serve q.
func (sc *scheduler) markRunnable(q *queue) {
	if !q.pending {
		q.pending = true
		sc.work = append(sc.work, q)
	}
}

// run serves queues until no head can move.
func (sc *scheduler) run(now leaky.Time) {
	if sc.running {
		return
	}
	sc.running = true
	for len(sc.work) > 0 {
		q := sc.work[len(sc.work)-1]
		sc.work = sc.work[:len(sc.work)-1]
		q.pending = false
		sc.serve(q, now)
	}
	sc.running = false
}

// serve moves the units of q whose turn it is, as far as they may go at now.
func (sc *scheduler) serve(q *queue, now leaky.Time) {
	if q.forwarding != nil {
		q.markForwarded()
	}
	if u := q.nextBooked(now); u != nil {
		sc.depart(u, now)
		return
	}
	for u := q.root.nextUnit(); u != nil; u = q.root.nextUnit() {
		if u.expired(q.shape, now) {
			sc.drop(u, shaper.QueueFull)
			continue
		}
		h, last := &u.path[u.pos], u.pos+1 == len(u.path)
		ready := q.bucket.Depart(q.shape, now)
		if last && q.blocked != nil {
			ready = q.earliest(u, now, now)
		}
		if ready > now {
			u.delayedAt |= 1 << u.pos
			sc.armTimer(q, ready)
			return
		}
		h.flowQueue.beginService(u)
		if u.delayedAt&(1<<u.pos) != 0 {
			h.addWait(now.Sub(u.enqueuedAt))
		}
		if !last {
			q.forwarding = u
			sc.markRunnable(q) // once u has left, or waits
			u.pos++
			sc.enqueue(u, now)
			return
		}
		if due := u.earliest(now); due > now {
			sc.book(u, due, now)
			continue
		}
		sc.depart(u, now)
		return
	}
	sc.armTimer(q, leaky.Never)
}

func (sc *scheduler) depart(u *unit, now leaky.Time) {
	paid := u.charged
	if u.booked {
		u.cancelBooking(now)
	}
	for i := range u.path {
		h := &u.path[i]
		h.release(u)
		sc.markRunnable(h.queue)
	}
	u.queued = false
	path, arrived, ready, waited, credit, grain, datagram := u.path, u.arrived, u.readySince, u.delayedAt, u.credit, u.grain, u.droppable
	bytes, packets, requeue := u.owner.send(now)
	if bytes|packets != 0 {
		// The thread may have been delayed since now was read, and the unit left later. If it were
		// charged to the earlier instant, units after it would exceed the rate.
		now = sc.clock()
	}
	var last leaky.Time
	if paid > 0 {
		path[len(path)-1].flowQueue.adjust(-paid)
	}
	for i := range path {
		if bytes|packets != 0 {
			h := &path[i]
			q, cost := h.queue, h.cost(bytes, packets)
			slack := leaky.Time(credit) * h.cost(max(min(bytes, grain), fullDatagram), packets)
			if datagram {
				slack = max(slack, datagramSlack(q.shape))
			}
			charged := leaky.CatchUp(ready, now, slack)
			q.bucket.Charge(q.shape, bytes, packets, charged)
			q.state.Conformance.Record(q.meter.Record(q.shape, bytes, packets, slack, now))
			h.usage.bytes += bytes
			if paid > 0 && i == len(path)-1 {
				h.flowQueue.adjust(cost)
			} else {
				h.flowQueue.charge(cost)
			}
			last = max(last, charged)
			verdict, reason := shaper.Pass, shaper.None
			if waited&(1<<i) != 0 {
				verdict, reason = shaper.Delay, shaper.ByRate
				q.state.QueueDelay.Observe((now - arrived).Duration())
			}
			q.state.Bytes.Add(verdict, reason, bytes)
			q.state.Packets.Add(verdict, reason, packets)
			sc.postpone(q, now)
		}
	}
	if requeue {
		// It was there all the time, so it keeps what is left of the lateness.
		u.arrived, u.readySince = now, last
		sc.begin(u, now)
	}
	for _, h := range path {
		h.flowQueue.endService()
	}
}

// withdraw removes units from their queues, and only then lets others move.
func (sc *scheduler) withdraw(now leaky.Time, units ...*unit) {
	for _, u := range units {
		if !u.queued {
			continue
		}
		sc.remove(u)
		sc.markRunnable(u.path[u.pos].queue)
		sc.leaveEarlier(u, u.pos)
	}
	sc.run(now)
}
