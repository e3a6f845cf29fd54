package leaky

// Meter measures the conformance of the units that leave a bucket, from their departure
// times alone and independently of the bucket's charges. It computes sigma, the largest
// excess over rate × time of any interval up to now: the last of the running sums of
// (units - rate × time) minus the smallest. Kept as time it is one number for bytes and
// one for packets. The zero Meter is ready for use. It is not safe for concurrent use.
type Meter struct {
	bucket Bucket
	slack  Time // longest lateness credited since the meter was last idle
}

// Record adds a unit that left at now, for which lateness of up to slack may have been
// credited, see [CatchUp]. It returns the largest excess over the rate in any interval
// that ends now, and the allowed excess: burst, the unit, and slack. Both are time at the
// rate, of bytes or of packets, whichever comes closer to its allowed excess.
func (m *Meter) Record(s *Shape, bytes, packets uint64, slack, now Time) (excess, allowed Time) {
	if m.bucket.Drained(now) {
		m.slack = 0
	}
	m.slack = max(m.slack, slack)
	m.bucket.Charge(s, bytes, packets, now)
	byteCost, packetCost := s.Cost(bytes, packets)
	if s.Bytes.Unlimited() {
		return m.bucket.packets.Sub(now), s.PacketsBurst.Add(packetCost).Add(m.slack)
	}
	excess, allowed = m.bucket.bytes.Sub(now), s.BytesBurst.Add(byteCost).Add(m.slack)
	if s.Packets.Unlimited() {
		return excess, allowed
	}
	excess2, allowed2 := m.bucket.packets.Sub(now), s.PacketsBurst.Add(packetCost).Add(m.slack)
	if excess2.Sub(allowed2) > excess.Sub(allowed) {
		return excess2, allowed2
	}
	return excess, allowed
}
