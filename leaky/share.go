package leaky

import "math/bits"

// Share is what one of several hosts may use of a shape. If their parts add up to the whole at most
// at every instant, whatever the history of each, then in any interval [s, e] all hosts together let
// at most rate * (e - s) + burst leave, and one unit for each host.
//
// Bursts are time at the rate: so they are shared as the rate is, and add up to the burst.
type Share struct {
	Shape // of the parts; of one part if there are none

	Parts uint32 // 0 lets nothing leave
	since Time   // for 0 parts: from when on the backlog stands still
}

// NewShare returns the share of so many parts of whole, from now on. parts is at most whole.
func NewShare(s *Shape, parts, whole uint32, now Time) Share {
	sh := Share{Shape: *s, Parts: parts, since: now}
	sh.Bytes = s.Bytes.share(max(parts, 1), whole)
	sh.Packets = s.Packets.share(max(parts, 1), whole)
	return sh
}

// Depart is [Bucket.Depart] of a bucket of this share. It is Never if the share has no parts.
func (sh *Share) Depart(b *Bucket, now Time) Time {
	if sh.Parts == 0 {
		return Never
	}
	return b.Depart(&sh.Shape, now)
}

// Reshare changes the share of b at now. b keeps in bytes and in packets what it owes beyond its
// burst, and its credit as far as the new burst allows. A share that grows brings no credit: others
// may have used it before they gave it back. One without parts has no credit, and its bucket stands
// still.
func (b *Bucket) Reshare(from, to *Share, now Time) {
	if from.Parts == 0 {
		b.bytes = max(b.bytes, from.since.Add(from.BytesBurst)).Add(now.Sub(from.since))
		b.packets = max(b.packets, from.since.Add(from.PacketsBurst)).Add(now.Sub(from.since))
	}
	bytes := from.Bytes.keepCredit(b.bytes.Sub(now), from.BytesBurst, to.Bytes, to.BytesBurst)
	packets := from.Packets.keepCredit(b.packets.Sub(now), from.PacketsBurst, to.Packets, to.PacketsBurst)
	if to.Parts == 0 {
		bytes, packets = max(bytes, to.BytesBurst), max(packets, to.PacketsBurst)
	}
	b.SetDrainTimes(bytes, packets, now)
	if to.Parts == 0 {
		b.Drain(now.Sub(to.since))
	}
}

// keepCredit returns the backlog at rate next that leaves the credit, the burst less the backlog, as
// it is at rate r, in units; or that of a full burst if the credit is more than that.
func (r Rate) keepCredit(backlog, burst Time, next Rate, nextBurst Time) Time {
	switch {
	case r == next && burst == nextBurst:
		return backlog
	case r.Unlimited() || next.Unlimited():
		return 0
	case backlog > burst:
		return nextBurst.Add(r.Rescale(backlog-burst, next))
	}
	credit, _ := r.rescaleDown(burst-backlog, next)
	return nextBurst.Sub(credit)
}

// share returns the rate of so many parts of whole, rounded down: a cost is never less than exact,
// and at most one part in 2^31 and a tick more. parts is 1 to whole.
func (r Rate) share(parts, whole uint32) Rate {
	if r.Unlimited() || parts == whole {
		return r
	}
	hi, lo := bits.Mul64(r.mult, uint64(whole))
	lo, carry := bits.Add64(lo, uint64(parts-1), 0)
	hi += carry
	if hi >= uint64(parts) {
		return Rate{mult: uint64(Forever), max: 1}
	}
	mult, _ := bits.Div64(hi, lo, uint64(parts))
	if mult > uint64(Forever) {
		return Rate{mult: uint64(Forever), max: 1}
	}
	return Rate{mult: mult, max: uint64(Forever) / mult, shift: r.shift}
}
