package leaky

// Shape is what a bucket holds its units to. Bytes and packets are limited
// together: a unit leaves when both allow it.
type Shape struct {
	Bytes   Rate
	Packets Rate

	// Overhead is how many bytes each packet counts for beside those it brings:
	// its headers, which are no payload but take room on a line.
	Overhead uint64

	// BytesBurst and PacketsBurst are how long a bucket may have been idle to
	// its credit, as time at the rate. 0 is strict smoothing.
	BytesBurst   Time
	PacketsBurst Time

	// MaxDelay is the depth of the queue: a unit that would wait longer is
	// excess. The unit's own cost does not count, so that a unit larger than
	// the queue passes when the bucket is empty.
	MaxDelay Time
}

// Cost returns how long a unit takes at the rate of bytes, and at that of packets.
func (s *Shape) Cost(bytes, packets uint64) (ofBytes, ofPackets Time) {
	return s.Bytes.Cost(bytes + packets*s.Overhead), s.Packets.Cost(packets)
}

// Bucket is the state of a leaky bucket: two virtual times that move together.
// The zero Bucket is empty. A bucket with Drained(now) is indistinguishable from
// the zero one, so it may be forgotten.
//
// A Bucket is not safe for concurrent use: its owner, or the owner's lock,
// makes each decision one step.
type Bucket struct {
	bytes   Time
	packets Time
}

// Depart returns the earliest instant, not before now, at which the next unit
// may leave.
func (b *Bucket) Depart(s *Shape, now Time) Time {
	return max(now, b.bytes.Sub(s.BytesBurst), b.packets.Sub(s.PacketsBurst))
}

// Charge adds a unit that leaves at now, which may be an instant to come.
func (b *Bucket) Charge(s *Shape, bytes, packets uint64, now Time) {
	ofBytes, ofPackets := s.Cost(bytes, packets)
	if !s.Bytes.Unlimited() {
		b.bytes = max(b.bytes, now).Add(ofBytes)
	}
	if !s.Packets.Unlimited() {
		b.packets = max(b.packets, now).Add(ofPackets)
	}
}

// Offer decides over a unit that arrives at now. It returns the instant at which
// the unit may leave, and charges it; or, when that is more than MaxDelay away,
// false, and changes nothing.
func (b *Bucket) Offer(s *Shape, bytes, packets uint64, now Time) (depart Time, ok bool) {
	depart = b.Depart(s, now)
	if depart-now > s.MaxDelay {
		return depart, false
	}
	b.Charge(s, bytes, packets, now)
	return depart, true
}

// Watch charges a unit of a stream that has left at now, whether b would have let it or
// not, and returns when that would have been. A stream that is held sends later: the bucket
// stays at most the burst and this unit behind now.
func (b *Bucket) Watch(s *Shape, bytes, packets uint64, now Time) (depart Time) {
	depart = b.Depart(s, now)
	b.Charge(s, bytes, packets, now)
	ofBytes, ofPackets := s.Cost(bytes, packets)
	b.bytes = min(b.bytes, now.Add(s.BytesBurst).Add(ofBytes))
	b.packets = min(b.packets, now.Add(s.PacketsBurst).Add(ofPackets))
	return depart
}

// Enforce lets a bucket that was only watched until now owe no more than the burst: what it
// would have held up has left.
func (b *Bucket) Enforce(s *Shape, now Time) {
	b.bytes = min(b.bytes, now.Add(s.BytesBurst))
	b.packets = min(b.packets, now.Add(s.PacketsBurst))
}

// Refund takes back a charge that nothing but charges has followed.
func (b *Bucket) Refund(s *Shape, bytes, packets uint64) {
	ofBytes, ofPackets := s.Cost(bytes, packets)
	b.bytes = b.bytes.Sub(ofBytes)
	b.packets = b.packets.Sub(ofPackets)
}

// Owes returns how long b has to drain from now on, of bytes and of packets.
func (b *Bucket) Owes(now Time) (ofBytes, ofPackets Time) {
	return b.bytes.Sub(now), b.packets.Sub(now)
}

// Owe has b drain for so long from now on, of bytes and of packets.
func (b *Bucket) Owe(ofBytes, ofPackets, now Time) {
	b.bytes, b.packets = now.Add(ofBytes), now.Add(ofPackets)
}

// Until returns the instant at which b will have drained.
func (b *Bucket) Until() Time { return max(b.bytes, b.packets) }

// Drained reports whether b equals the zero Bucket at now and ever after.
func (b *Bucket) Drained(now Time) bool { return b.Until() <= now }

// Inherit puts b as deep into debt, in time, as a bucket of any shape is.
func (b *Bucket) Inherit(debt Bucket) {
	b.Merge(Bucket{bytes: debt.Until(), packets: debt.Until()})
}

// fullPacket is what a full packet of TCP in an Ethernet frame holds, in bytes.
const fullPacket = 1448

// Bound puts b no deeper into debt than the burst of s and then its max_delay, or one full
// packet where that takes longer: about as deep as full packets bring a bucket.
func (b *Bucket) Bound(s *Shape, now Time) {
	ofBytes, ofPackets := s.Cost(fullPacket, 1)
	b.bytes = min(b.bytes, now.Add(s.BytesBurst).Add(max(s.MaxDelay, ofBytes)))
	b.packets = min(b.packets, now.Add(s.PacketsBurst).Add(max(s.MaxDelay, ofPackets)))
}

// Merge puts b at least as deep into debt as o, a bucket of the same shape.
func (b *Bucket) Merge(o Bucket) {
	b.bytes = max(b.bytes, o.bytes)
	b.packets = max(b.packets, o.packets)
}

// Rescale keeps the backlog in bytes and in packets when the shape changes from
// old to next at now, so that a new rate hands out no fresh burst. An empty bucket
// stays empty.
func (b *Bucket) Rescale(old, next *Shape, now Time) {
	if backlog := b.bytes.Sub(now); backlog > 0 {
		b.bytes = now.Add(old.Bytes.Rescale(backlog, next.Bytes))
	}
	if backlog := b.packets.Sub(now); backlog > 0 {
		b.packets = now.Add(old.Packets.Rescale(backlog, next.Packets))
	}
}

// Backlog returns how many bytes and packets have not drained at now.
func (b *Bucket) Backlog(s *Shape, now Time) (bytes, packets uint64) {
	if left := b.bytes.Sub(now); left > 0 && !s.Bytes.Unlimited() {
		bytes = s.Bytes.Units(left)
	}
	if left := b.packets.Sub(now); left > 0 && !s.Packets.Unlimited() {
		packets = s.Packets.Units(left)
	}
	return bytes, packets
}

// Age has b drain for d.
func (b *Bucket) Age(d Time) {
	b.bytes, b.packets = b.bytes.Sub(d), b.packets.Sub(d)
}

// Late returns the instant to charge for a unit that was ready at ready, and
// that leaves at now because whoever released it woke up late. The lateness is
// given back up to slack, and no further: with a slack of one unit, at most two
// leave at once.
//
// Without it every late wake-up is lost for ever and the mean falls short of the
// rate; with all of it, a stall ends in a burst.
func Late(ready, now, slack Time) Time {
	return min(now, max(ready, now.Sub(slack)))
}
