package leaky

// Meter measures what leaves a bucket, by when it leaves, and knows nothing of what the
// bucket was charged for it: sigma, the most by which what left in any interval up to now
// exceeds rate × time. It is the least of all running sums of (units - rate × time),
// subtracted from the last one; kept as time it is one number for bytes and one for
// packets. The zero Meter has seen nothing. It is not safe for concurrent use.
type Meter struct {
	left  Bucket
	slack Time // the longest lateness given back since it was last idle
}

// Note takes in a unit that left at now, for which lateness of up to slack may have been
// given back, see [Late]. It returns by how much the limit of s that comes closest to what
// it allows, bytes or packets, is exceeded in some interval that ends now, and what it
// allows: burst, the unit, and slack, all as time at its rate.
func (m *Meter) Note(s *Shape, bytes, packets uint64, slack, now Time) (excess, allowed Time) {
	if m.left.Drained(now) {
		m.slack = 0
	}
	m.slack = max(m.slack, slack)
	m.left.Charge(s, bytes, packets, now)
	ofBytes, ofPackets := s.Cost(bytes, packets)
	if s.Bytes.Unlimited() {
		return m.left.packets.Sub(now), s.PacketsBurst.Add(ofPackets).Add(m.slack)
	}
	excess, allowed = m.left.bytes.Sub(now), s.BytesBurst.Add(ofBytes).Add(m.slack)
	if s.Packets.Unlimited() {
		return excess, allowed
	}
	excess2, allowed2 := m.left.packets.Sub(now), s.PacketsBurst.Add(ofPackets).Add(m.slack)
	if excess2.Sub(allowed2) > excess.Sub(allowed) {
		return excess2, allowed2
	}
	return excess, allowed
}
