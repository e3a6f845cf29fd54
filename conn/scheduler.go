// Owner: the loop's thread.

package conn

import (
	"slices"

	"shaperd.dev/shaperd/conn/internal/fairq"
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
	weight     uint64   // bytes, as lanes count them
	most       uint64   // bytes that may leave, by quotas, or 0 without one
	rations    []ration // of quotas, by position in path; nil without
	credit     uint64   // lateness to compensate, in multiples of grain, or of what left if that is less
	grain      uint64   // bytes

	droppable   bool // may be refused by a full queue
	accepted    bool // was in its queues before, and is not refused for lack of space
	queued      bool
	enqueuedAt  leaky.Time       // in the queue at pos, or when it was booked
	cost        leaky.Time       // among the sources of the queue at pos; see queue.weight
	booked      bool             // had its turn in the last queue, but not all buckets were ready
	due         leaky.Time       // departure time of a booked unit
	bookingSeq  uint64           // order of booking
	charged     leaky.Time       // in the last queue, when booked
	bottleneck  int              // position of the queue that becomes ready last
	postponedAt shaper.Set       // positions of queues in which it was postponed
	link        fairq.Link[unit] // in its flow, in the queue
}

// sender puts a unit on the wire. It returns what really left, and whether to requeue the unit.
type sender interface {
	send(now leaky.Time) (bytes, packets uint64, again bool)

	// resubmit is called for a unit that was withdrawn because its path changed.
	resubmit(now leaky.Time)

	// refused is called for a droppable unit that found no space in a queue, or lost it.
	refused(by *queue, why shaper.Reason)
}

// scheduler holds the queues in use.
type scheduler struct {
	shaper      *shaper.Shaper
	wheel       *pacer.Wheel
	clock       func() leaky.Time
	byKey       map[shaper.Key]*queue
	work        []*queue // queues whose head may be able to move
	running     bool     // run is on the stack
	lastBooking uint64   // bookingSeq of the last unit booked
	sharing     *sharing
	quotas      *quotas
}

func newScheduler(sg *sharing) *scheduler {
	return &scheduler{shaper: sg.shaper, wheel: sg.wheel, clock: sg.clock, byKey: map[shaper.Key]*queue{}, sharing: sg}
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
	u.most, u.rations = 0, nil
	sc.enqueue(u, now)
}

// enqueue puts u into the queue at its position. It counts in that queue and not in the later ones, so
// what is held up here takes no space from others there. When q is full, the longest sub-queue of
// datagrams loses its last one, or u if u would make its own the longest.
func (sc *scheduler) enqueue(u *unit, now leaky.Time) {
	h := &u.path[u.pos]
	q := h.queue
	u.enqueuedAt, u.cost = now, q.weight(u.bytes, u.packets)
	for u.droppable && !u.accepted && q.full(now) {
		longest := q.root.Longest(h.flowQueue, u.cost)
		if longest == nil {
			h.usage.dropped++
			u.queued = false
			sc.leaveEarlier(u, u.pos)
			u.owner.refused(q, shaper.QueueFull)
			return
		}
		sc.drop(lastDroppable(longest), shaper.QueueFull)
	}
	q.addBacklog(u)
	h.flowQueue.Push(&u.link, u, u.backlog())
	if q.root.Next() != u {
		u.delayedAt |= 1 << u.pos
	}
	sc.markRunnable(q)
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
	if q.budget != nil {
		sc.slowDown(q, now)
	}
	if u := q.nextBooked(now); u != nil {
		sc.depart(u, now)
		return
	}
	for u := q.root.Next(); u != nil; u = q.root.Next() {
		if u.expired(q, now) {
			sc.drop(u, shaper.QueueFull)
			continue
		}
		h, last := &u.path[u.pos], u.pos+1 == len(u.path)
		ready := q.depart(now)
		if last && q.blocked != nil {
			ready = q.earliest(u, now, now)
		}
		if ready > now {
			u.delayedAt |= 1 << u.pos
			if q.share != nil {
				sc.sharing.wait(q.share, ready, now)
				if u.droppable {
					ready = min(ready, u.deadline(q)+1)
				}
			}
			sc.armTimer(q, ready)
			return
		}
		if q.budget != nil {
			switch sc.ration(h, u, now) {
			case rationDenied:
				if sc.slows(q) { // a unit that was just booked holds the last of it
					sc.slowDown(q, now)
					continue
				}
				sc.drop(u, shaper.QuotaUsed)
				continue
			case rationPending:
				return
			}
		}
		h.flowQueue.BeginService(&u.link, u.backlog())
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
	if q.share != nil && len(q.bookings) == 0 {
		q.share.waitsSince = 0
	}
	sc.armTimer(q, leaky.Never)
}

// armTimer schedules q to be served at at, or when a booked unit is due.
func (sc *scheduler) armTimer(q *queue, at leaky.Time) {
	if len(q.booked) > 0 {
		at = min(at, q.booked[0].due)
	}
	if at < leaky.Never {
		sc.wheel.Schedule(&q.timer, at)
	}
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
	path, arrived, ready, waited, credit, grain, datagram, rations := u.path, u.arrived, u.readySince, u.delayedAt, u.credit, u.grain, u.droppable, u.rations
	bytes, packets, requeue := u.owner.send(now)
	if bytes|packets != 0 {
		// The thread may have been delayed since now was read, and the unit left later. If it were
		// charged to the earlier instant, units after it would exceed the rate.
		now = sc.clock()
		if len(sc.sharing.shares) > 0 && slices.ContainsFunc(path, func(h hop) bool { return h.share != nil }) {
			sc.sharing.follow(now)
		}
	}
	var last leaky.Time
	if paid > 0 && bytes|packets == 0 {
		path[len(path)-1].flowQueue.Adjust(-paid)
	}
	for i := range path {
		if bytes|packets != 0 {
			h := &path[i]
			q, cost := h.queue, h.weight(bytes, packets)
			slack := leaky.Time(credit) * h.cost(max(min(bytes, grain), fullDatagram), packets)
			if datagram {
				slack = max(slack, datagramSlack(q.shape))
			}
			charged := leaky.CatchUp(ready, now, slack)
			q.bucket.Charge(q.shape, bytes, packets, charged)
			if q.share != nil {
				sc.sharing.use(q.share, bytes, packets)
			}
			excess, allowed := q.meter.Record(q.shape, bytes, packets, slack, now)
			q.state.Conformance.Record(q.inLimit(excess), q.inLimit(allowed))
			h.usage.bytes += bytes
			if paid > 0 && i == len(path)-1 {
				h.flowQueue.Adjust(cost - paid)
			} else {
				h.flowQueue.Charge(cost)
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
	settle(rations, bytes, packets)
	if requeue {
		// It was there all the time, so it keeps what is left of the lateness.
		u.arrived, u.readySince = now, last
		sc.begin(u, now)
	}
	for _, h := range path {
		h.flowQueue.EndService()
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

// evict refuses a queued datagram because the memory for datagrams is used up.
func (sc *scheduler) evict(u *unit, now leaky.Time) {
	sc.markRunnable(u.path[u.pos].queue)
	sc.drop(u, shaper.MemoryFull)
	sc.run(now)
}

// lastDroppable returns the last datagram of a leaf that has one.
func lastDroppable(leaf *fairq.Node[unit]) *unit {
	for u := range leaf.Backward() {
		if u.droppable {
			return u
		}
	}
	return nil
}

// backlog is what u counts for when a full queue drops a unit of its longest sub-queue.
func (u *unit) backlog() leaky.Time {
	if !u.droppable {
		return 0
	}
	return u.cost
}

// drop refuses a queued datagram.
func (sc *scheduler) drop(u *unit, why shaper.Reason) {
	h := &u.path[u.pos]
	h.usage.dropped++
	sc.remove(u)
	sc.leaveEarlier(u, u.pos)
	u.owner.refused(h.queue, why)
}

// remove takes u out of the queue that it waits in.
func (sc *scheduler) remove(u *unit) {
	h := &u.path[u.pos]
	u.queued = false
	if u.booked {
		h.flowQueue.Adjust(-u.charged)
		u.cancelBooking(sc.clock())
	} else {
		h.flowQueue.Remove(&u.link, u.backlog())
	}
	h.subBacklog(u)
}

// leaveEarlier removes u from the first n of its queues, which it had moved on from. What it holds of quotas is returned.
func (sc *scheduler) leaveEarlier(u *unit, n int) {
	settle(u.rations, 0, 0)
	u.rations = nil
	for i := range u.path[:n] {
		h := &u.path[i]
		h.release(u)
		h.flowQueue.EndService()
		sc.markRunnable(h.queue)
	}
}

// expired reports whether u, a datagram, has waited far beyond max_delay because others went first.
// The margin allows for a late thread, which would otherwise lose datagrams that it only delays.
func (u *unit) expired(q *queue, now leaky.Time) bool {
	return u.droppable && now > u.deadline(q)
}

// deadline is when u expires in q.
func (u *unit) deadline(q *queue) leaky.Time {
	most := q.shape.MaxDelay
	return u.enqueuedAt.Add(max(q.whole.Cost(u.bytes, u.packets)) + most + most/2 + leaky.Second/50)
}
