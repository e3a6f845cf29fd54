package leaky

// Shape is the configuration of a bucket. Bytes and packets are limited
// together: a unit leaves when both allow it.
type Shape struct {
	Bytes   Rate
	Packets Rate

	// Overhead is the number of bytes charged for each packet in addition to its
	// payload: its headers, which take up capacity on the wire.
	Overhead uint64

	// BytesBurst and PacketsBurst are the burst tolerances, as time at the rate:
	// the longest idle time that counts as credit. 0 is strict smoothing.
	BytesBurst   Time
	PacketsBurst Time

	// Window makes packets pass in fixed windows of this length, which begin at its multiples: see [NewWindow]. 0 is a leaky
	// bucket.
	Window Time

	// MaxDelay is the depth of the queue: a unit that would wait longer is
	// refused. The unit's own cost does not count, so that a unit larger than
	// the queue passes when the bucket is empty.
	MaxDelay Time
}

// Cost returns the cost of a unit: its time at the rate of bytes, and at the rate of
// packets.
func (s *Shape) Cost(bytes, packets uint64) (byteCost, packetCost Time) {
	return s.Bytes.Cost(bytes + packets*s.Overhead), s.Packets.Cost(packets)
}

// Bucket is the state of a leaky bucket: two virtual times that move together.
// The zero Bucket is empty. A bucket with Drained(now) is indistinguishable from
// the zero one, so it may be discarded.
//
// A Bucket is not safe for concurrent use: its owner, or the owner's lock,
// makes each decision atomic.
type Bucket struct {
	bytes   Time
	packets Time
}

// Depart returns the earliest instant, not before now, at which the next unit
// may leave.
func (b *Bucket) Depart(s *Shape, now Time) Time {
	return max(b.bytes.Sub(s.BytesBurst), s.packetDepart(b.packets, now))
}

// Charge adds a unit that leaves at now, which may be in the future.
func (b *Bucket) Charge(s *Shape, bytes, packets uint64, now Time) {
	byteCost, packetCost := s.Cost(bytes, packets)
	if !s.Bytes.Unlimited() {
		b.bytes = max(b.bytes, now).Add(byteCost)
	}
	if !s.Packets.Unlimited() {
		b.packets = max(b.packets, s.packetClock(now)).Add(packetCost)
	}
}

// Offer admits or refuses a unit that arrives at now. It returns the unit's departure
// time and charges it. If that time is more than MaxDelay away it returns false and
// changes nothing.
func (b *Bucket) Offer(s *Shape, bytes, packets uint64, now Time) (depart Time, ok bool) {
	depart = b.Depart(s, now)
	if depart-now > s.MaxDelay {
		return depart, false
	}
	b.Charge(s, bytes, packets, now)
	return depart, true
}

// Observe charges a unit of a stream that has left at now regardless of b, and returns
// the departure time that b would have given it. An enforced stream would have been
// slowed down by its delays, so the backlog is capped at the burst and this unit.
func (b *Bucket) Observe(s *Shape, bytes, packets uint64, now Time) (depart Time) {
	depart = b.Depart(s, now)
	b.Charge(s, bytes, packets, now)
	byteCost, packetCost := s.Cost(bytes, packets)
	b.bytes = min(b.bytes, now.Add(s.BytesBurst).Add(byteCost))
	b.packets = min(b.packets, s.packetClock(now).Add(s.PacketsBurst).Add(packetCost))
	return depart
}

// CapToBurst limits the backlog to the burst, when a bucket that only observed begins to
// enforce: the units that it would have delayed have left.
func (b *Bucket) CapToBurst(s *Shape, now Time) {
	b.bytes = min(b.bytes, now.Add(s.BytesBurst))
	b.packets = min(b.packets, s.packetClock(now).Add(s.PacketsBurst))
}

// DrainTimes returns the times that the backlogs of bytes and of packets take to drain.
func (b *Bucket) DrainTimes(now Time) (bytes, packets Time) {
	return b.bytes.Sub(now), b.packets.Sub(now)
}

// SetDrainTimes sets the backlogs of b to those that drain in the given times.
func (b *Bucket) SetDrainTimes(bytes, packets, now Time) {
	b.bytes, b.packets = now.Add(bytes), now.Add(packets)
}

// DrainedAt returns the instant at which b will have drained.
func (b *Bucket) DrainedAt() Time { return max(b.bytes, b.packets) }

// Drained reports whether b equals the zero Bucket from now on.
func (b *Bucket) Drained(now Time) bool { return b.DrainedAt() <= now }

// Inherit raises both backlogs of b, as time, to at least the longer one of o, a bucket
// of any shape.
func (b *Bucket) Inherit(o Bucket) {
	b.Merge(Bucket{bytes: o.DrainedAt(), packets: o.DrainedAt()})
}

// fullPacket is the payload of a full TCP packet in an Ethernet frame, in bytes.
const fullPacket = 1448

// CapToQueue limits the backlog to the burst of s plus its MaxDelay, or plus one full
// packet where that takes longer: about the largest backlog that full packets can cause.
func (b *Bucket) CapToQueue(s *Shape, now Time) {
	byteCost, packetCost := s.Cost(fullPacket, 1)
	b.bytes = min(b.bytes, now.Add(s.BytesBurst).Add(max(s.MaxDelay, byteCost)))
	b.packets = min(b.packets, s.packetClock(now).Add(s.PacketsBurst).Add(max(s.MaxDelay, packetCost)))
}

// Merge raises the backlogs of b to at least those of o, a bucket of the same shape.
func (b *Bucket) Merge(o Bucket) {
	b.bytes = max(b.bytes, o.bytes)
	b.packets = max(b.packets, o.packets)
}

// Rescale keeps the backlog in bytes and in packets when the shape changes from
// old to next at now, so that a new rate grants no new burst. An empty bucket
// stays empty. Packets of windows are whole.
func (b *Bucket) Rescale(old, next *Shape, now Time) {
	if backlog := b.bytes.Sub(now); backlog > 0 {
		b.bytes = now.Add(old.Bytes.Rescale(backlog, next.Bytes))
	}
	switch backlog := b.packets.Sub(old.packetClock(now)); {
	case backlog > 0 && !old.Packets.Unlimited() && (old.Window > 0 || next.Window > 0):
		b.packets = next.packetClock(now).Add(next.Packets.Cost(old.wholePackets(backlog)))
	case backlog > 0:
		b.packets = next.packetClock(now).Add(old.Packets.Rescale(backlog, next.Packets))
	case old.Window > 0:
		b.packets = 0 // what passed in an earlier window, by the other clock
	}
}

// Backlog returns the bytes and packets that have not drained at now.
func (b *Bucket) Backlog(s *Shape, now Time) (bytes, packets uint64) {
	if left := b.bytes.Sub(now); left > 0 && !s.Bytes.Unlimited() {
		bytes = s.Bytes.Units(left)
	}
	if left := b.packets.Sub(s.packetClock(now)); left > 0 && !s.Packets.Unlimited() {
		packets = s.Packets.Units(left)
	}
	return bytes, packets
}

// Debt returns the bytes and packets that b owes at now beyond its bursts.
func (b *Bucket) Debt(s *Shape, now Time) (bytes, packets uint64) {
	return s.Bytes.Units(b.bytes.Sub(now).Sub(s.BytesBurst)), s.Packets.Units(b.packets.Sub(s.packetClock(now)).Sub(s.PacketsBurst))
}

// Drain ages b by d.
func (b *Bucket) Drain(d Time) {
	b.bytes, b.packets = b.bytes.Sub(d), b.packets.Sub(d)
}

// CatchUp returns the instant at which to charge a unit that was ready at ready, and
// that leaves only at now because of a late wake-up. The lateness is credited up to
// slack: with a slack of one unit, at most two leave at once.
//
// Without any credit every late wake-up is lost and the mean falls short of the
// rate; with unlimited credit a stall ends in a burst.
func CatchUp(ready, now, slack Time) Time {
	return min(now, max(ready, now.Sub(slack)))
}
