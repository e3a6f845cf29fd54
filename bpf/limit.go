package bpf

import (
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// encodeLimit encodes limit i of p, which has a number in the kernel.
func encodeLimit(p *shaper.Policy, i int, number uint32, h hashes) kernelLimit {
	l, shape, newConns := p.Limit(i), p.Shape(i), p.NewConnections(i)
	longest := p.MaxTotalDelay(i) // for which a packet may be held under it
	k := kernelLimit{
		MaxDelay:       uint64(shape.MaxDelay),
		LongestDelay:   uint64(longest),
		MarkDelay:      markDelay(l, shape),
		QueueTimeout:   uint64(newConns.MaxDelay),
		MaxConnections: uint32(l.MaxConnections),
		Overhead:       uint32(shape.Overhead),
		KeyFields:      uint32(l.Key),
		Id:             number,
	}
	const full = 1448                                 // bytes of payload in a full TCP packet
	const largestBytes, largestPackets = 1 << 16, 128 // maximum of a GRO or GSO packet
	for meter, m := range []struct {
		rate              leaky.Rate
		burst, wait, held leaky.Time
		unit, largest     uint64
	}{
		{shape.Bytes, shape.BytesBurst, shape.MaxDelay, longest, full + shape.Overhead, largestBytes + largestPackets*shape.Overhead},
		{shape.Packets, shape.PacketsBurst, shape.MaxDelay, longest, 1, largestPackets},
		{newConns.Packets, newConns.PacketsBurst, newConns.MaxDelay, 0, 1, 1},
	} {
		k.Meter[meter] = encodeMeter(m.rate, m.burst, meterNumber(number, meter), h)
		burst := m.burst
		if meter == int(meterNew) {
			k.Meter[meter].Window = uint64(newConns.Window)
			burst = burst.Add(newConns.Window) // its clock is ahead by that at most
		}
		k.Meter[meter].BacklogBounds = encodeBacklogBounds(burst.Add(max(m.wait, m.rate.Cost(m.unit))), max(burst.Add(m.wait), m.held).Add(m.rate.Cost(m.largest)))
		if l.Key == 0 {
			k.Meter[meter].Tag |= neverEvicted
		}
		if l.Shared {
			k.Meter[meter].Tag |= sharedTag
		}
	}
	for meter, slots := range p.Slots(i) {
		k.Meter[meter].SlotShift, k.Meter[meter].Unit = uint64(slots.Shift), uint64(slots.Unit)
	}
	k.Mask = [2][4]uint32{mask(96 + l.IPv4Prefix), mask(l.IPv6Prefix)}
	if l.Shared {
		k.Shared = 1
	}
	if l.RefuseWith == shaper.RefuseDrop {
		k.NoRst = 1
	}
	return k
}

const backlogShiftBits = kernelBacklogBoundsBACKLOG_SHIFT_BITS

// encodeBacklogBounds encodes the bounds of a meter's backlog: the maximum that a new key inherits, and the
// maximum of any key.
func encodeBacklogBounds(inheritable, maxBacklog leaky.Time) uint64 {
	bound := max(uint64(inheritable)>>backlogShiftBits, 1) << backlogShiftBits
	shift := uint64(0)
	for bound<<shift < uint64(maxBacklog) && bound<<shift < 1<<62 {
		shift++
	}
	return bound | shift
}

// inheritable returns the maximum backlog that a new key inherits under m.
func (m *kernelMeter) inheritable() leaky.Time {
	return leaky.Time(m.BacklogBounds >> backlogShiftBits << backlogShiftBits)
}

// Indexes of a limit's meters.
const (
	meterBytes   = kernelMeterIndexMETER_BYTES
	meterPackets = kernelMeterIndexMETER_PACKETS
	meterNew     = kernelMeterIndexMETER_NEW // of new connections
)

// Parts of a bucket's tag: a hash of the key, and above it the number of the meter.
const (
	tagMeterShift = kernelTagBitsTAG_METER_SHIFT
	tagHash       = 1<<tagMeterShift - 1
	neverEvicted  = 1 << kernelTagBitsTAG_PINNED_BIT // set where the bucket is never evicted
	sharedTag     = 1 << kernelTagBitsTAG_SHARED_BIT // set where hosts share the limit
)

// meterOf returns the number of the meter that a bucket's tag names.
func meterOf(tag uint64) uint64 { return tag &^ (neverEvicted | sharedTag) >> tagMeterShift }

// meterNumber returns the number of a limit's meter in the bucket table. It is not 0.
func meterNumber(limit uint32, meter int) uint64 {
	return uint64(limit)*uint64(len(kernelLimit{}.Meter)) + uint64(meter) + 1
}

func encodeMeter(rate leaky.Rate, burst leaky.Time, number uint64, h hashes) kernelMeter {
	m := kernelMeter{Burst: uint64(burst), Tag: number << tagMeterShift}
	var shift uint8
	m.Rate.Mult, m.Rate.Max, shift = rate.Parts()
	m.Rate.Shift = uint64(shift)
	for i := range m.Hash {
		m.Hash[i] = h[keyWords-1][i] * number
	}
	return m
}

// markDelay returns the delay from which on packets of l are marked.
func markDelay(l *shaper.Limit, shape *leaky.Shape) uint64 {
	if l.ECNMark <= 0 || l.ECNMark >= 100 {
		return 1<<64 - 1
	}
	return uint64(shape.MaxDelay) / 100 * uint64(l.ECNMark)
}

// mask returns the mask of a prefix of an IPv6 address.
func mask(bits int) [4]uint32 {
	var m [4]uint32
	for i := range m {
		m[i] = ^uint32(0) << max(32-max(bits-32*i, 0), 0)
	}
	return m
}
