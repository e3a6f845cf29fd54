package leaky

import "time"

// NewWindow returns the rate and the burst, as time, of a [Shape] with a Window that lets n units pass in each, from 1 to
// per / 1ns. The cost of a unit is rounded up, so that no more than n pass in a window if units wait for it, and the burst is longer
// than n - 1 units by half a one, so that n pass if that rounding is all that is owed from before.
func NewWindow(n uint64, per time.Duration) (rate Rate, burst Time) {
	cost := (FromDuration(per) + Time(n) - 1) / Time(n)
	return Rate{mult: uint64(cost), max: uint64(Forever / cost)}, cost*Time(n-1) + cost/2
}

// packetClock is the clock of packets. A fixed window is a bucket whose clock stands at the end of the present window: what
// is charged drains when the next one begins, all at once, and until then the bucket differs from a new one.
func (s *Shape) packetClock(now Time) Time {
	if s.Window == 0 {
		return now
	}
	return now.Sub(now % s.Window).Add(s.Window)
}

// wholePackets returns a backlog in packets: rounded up, if the bucket leaks, or else to the nearest, as it is whole but for the rounding
// of costs.
func (s *Shape) wholePackets(backlog Time) uint64 {
	cost := s.Packets.Cost(1)
	if s.Window > 0 {
		return s.Packets.Units(backlog.Add(cost / 2))
	}
	rounding := Time(s.Packets.Units(backlog)) // a tick for each at most
	return s.Packets.Units(backlog.Sub(rounding).Add(cost - 1))
}

// packetDepart returns the earliest instant, not before now, at which a bucket with the virtual time t lets a packet leave.
func (s *Shape) packetDepart(t, now Time) Time {
	ready := t.Sub(s.PacketsBurst)
	switch {
	case s.Window == 0:
		return max(now, ready)
	case ready <= s.packetClock(now):
		return now
	}
	return ready.Add(s.Window-1)/s.Window*s.Window - s.Window // the window at whose end the clock is not before ready
}

// RefillsAt returns the instant, not before now, from which on a whole burst of packets, or of a window, may pass if none does until then.
func (b *Bucket) RefillsAt(s *Shape, now Time) Time {
	if s.Window == 0 {
		return max(now, b.packets)
	}
	whole := Shape{Packets: s.Packets, PacketsBurst: s.Packets.Cost(1) / 2, Window: s.Window} // half a one is the rounding of costs
	return whole.packetDepart(b.packets, now)
}
