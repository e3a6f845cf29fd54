// Owner: the loop's thread.

package conn

import (
	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// queue is the queue of one bucket. It exists while a flow needs it. Sources take turns in it, and so
// do the flows of a source.
type queue struct {
	pacing
	policy     *shaper.Policy // of whole, see refresh
	state      *shaper.LimitState
	sendReject bool         // reply to the source of a refused datagram with an ICMP error
	budget     *budget      // of the limit's quota; nil without one
	slow       *leaky.Shape // in effect while the quota is used up; nil while it is not
	observes   bool         // the limit only observes, and hosts share it: others have no queue
	meter      leaky.Meter  // of what left
	ofLimit    *leaky.Shape // what whole is for most keys: that of the limit, not of a tier
	refs       int          // flows

	root          fairq.Node[unit]
	sources       map[memberKey]*sourceQueue
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

// full reports whether q cannot take another unit at now.
func (q *queue) full(now leaky.Time) bool {
	if q.shut() { // until nobody knows when: what would be full at the whole rate is full at any share
		return max(q.whole.Cost(q.queuedBytes, q.queuedPackets)) > q.shape.MaxDelay
	}
	b := q.bucket
	b.Charge(q.shape, q.queuedBytes, q.queuedPackets, now)
	return b.Depart(q.shape, now)-now > q.shape.MaxDelay
}

// cost is how long q lets nothing leave after a unit of that size.
func (q *queue) cost(bytes, packets uint64) leaky.Time {
	return max(q.shape.Cost(bytes, packets))
}

// The weights of a byte and of a packet are such that parts of a datagram of some bytes are exact to a percent, and that sums last for ten years at
// 100 Gbit/s.
const (
	byteWeight   leaky.Time = 4
	packetWeight            = 1024 * byteWeight
)

// weight is what a unit of that size counts for among the sources of q: its bytes, or the bytes that could leave while its packets do. It is
// no time: a change of the rate, the share or the quota must not favor those that were served before it, or after.
func (q *queue) weight(bytes, packets uint64) leaky.Time {
	s := q.whole
	if s.Bytes.Unlimited() {
		return leaky.Time(packets) * packetWeight
	}
	bytes += packets * s.Overhead
	if !s.Packets.Unlimited() {
		bytes = max(bytes, s.Bytes.Units(s.Packets.Cost(packets)))
	}
	return leaky.Time(bytes) * byteWeight
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

// markForwarded records that the unit that last moved on from q waits in a later queue.
func (q *queue) markForwarded() {
	u := q.forwarding
	q.forwarding = nil
	for i := range u.path {
		if h := &u.path[i]; h.queue == q {
			h.flowQueue.EndService()
			if h.lane.laterBytes += u.weight; h.lane.laterBytes+u.weight > laneLimit && !h.lane.Suspended() {
				h.lane.Suspend()
			}
		}
	}
}

// refresh updates q to the current policy. Its bucket keeps its backlog.
func (sc *scheduler) refresh(q *queue, now leaky.Time) {
	policy := sc.shaper.Policy()
	if q.policy == policy {
		return
	}
	q.policy = policy
	for _, sq := range q.sources {
		q.weigh(sq)
	}
	i := policy.IndexOf(q.state)
	if i < 0 {
		return // the limit was removed; connections of removed listeners keep it
	}
	l := policy.Limit(i)
	q.ofLimit = policy.Shape(i)
	sc.followQuota(q, l, i, now)
	changed := sc.sharing.reshape(&q.pacing, q, nil, policy.ShapeOf(i, &q.key), l.Shared, now)
	if q.observes && !l.Observe {
		q.bucket.CapToBurst(q.shape, now)
	}
	q.sendReject, q.observes = l.RefuseWith == shaper.RefuseReject, l.Observe
	if changed {
		sc.reshaped(q, now)
	}
}

// inLimit converts a time of q to the time that as much takes at the rate of the limit: conformance is told in that.
func (q *queue) inLimit(t leaky.Time) leaky.Time {
	switch {
	case q.whole == q.ofLimit:
		return t
	case q.whole.Bytes.Unlimited():
		return q.whole.Packets.Rescale(t, q.ofLimit.Packets)
	}
	return q.whole.Bytes.Rescale(t, q.ofLimit.Bytes)
}

// reshaped is called when the shape of q has changed.
func (sc *scheduler) reshaped(q *queue, now leaky.Time) {
	q.meter = leaky.Meter{} // the old rate no longer applies
	sc.rebook(q, now)
	sc.markRunnable(q)
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
