package bpf

import (
	"iter"
	"math"
	"slices"
	"unsafe"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/segments"
)

// image is a policy in the format of the programs.
type image struct {
	policy  kernelPolicy
	lines   []kernelLine
	sets    map[shaper.Set]uint32
	setList []shaper.Set // sets by number
}

// hashes are the random multipliers of the bucket table.
type hashes [len(kernelPolicy{}.Hash)][2]uint64

const keyWords = uint64(len(hashes{}))

// newImage encodes p for the programs. The bits of sets are those of p.
func newImage(p *shaper.Policy, n numbers, h hashes, bucketLines uint32) *image {
	im := &image{sets: map[shaper.Set]uint32{}}
	k := &im.policy
	k.Hash = h
	k.BucketLines = bucketLines
	k.Paced = uint64(p.Paced())
	k.Calendars = uint64(p.Calendars())
	k.ChargeOnArrival = uint64(p.ChargedOnArrival())
	k.Blocks = uint64(p.Blocks())
	k.AlwaysEnforced = uint64(p.Always())
	for protocol := range k.Protocol {
		k.Protocol[protocol] = uint64(p.ProtocolSet(shaper.Protocol(protocol)))
	}
	for name, number := range n.attachments {
		k.Attachment[number] = uint64(p.OriginSet(p.AttachmentIndex(name)))
	}
	for i := range p.Len() {
		l := p.Limit(i)
		bit := uint64(1) << i
		if l.Observe {
			k.Observed |= bit
		}
		if l.CountsConnections() {
			k.Counted |= bit
		}
		k.Limit[i] = encodeLimit(l, p.Shape(i), p.NewConnections(i), p.MaxTotalDelay(i), n.limits[l.Name], h)
		k.Limit[i].LongestDelay = uint64(p.MaxTotalDelay(i))
		for meter, slots := range p.Slots(i) {
			k.Limit[i].Meter[meter].SlotShift, k.Limit[i].Meter[meter].Unit = uint64(slots.Shift), uint64(slots.Unit)
		}
	}
	im.lines = append(im.lines, kernelLine{}) // line 0 means none
	k.Source4 = im.segments4(p.Sources4())
	k.Source6 = im.segments6(p.Sources6())
	k.Destination4 = im.segments4(asClasses(p.Destinations4()))
	k.Destination6 = im.segments6(asClasses(p.Destinations6()))
	k.Port = im.segments4(portClasses(p.Ports()))
	k.Sets = uint32(len(im.lines))
	for chunk := range slices.Chunk(im.setList, 8) {
		var l kernelLine
		for i, set := range chunk {
			l.Word[i] = uint64(set)
		}
		im.lines = append(im.lines, l)
	}
	return im
}

// encodeLimit encodes one limit. longest is the maximum time for which a packet may be held under it.
func encodeLimit(l *shaper.Limit, shape, newConns *leaky.Shape, longest leaky.Time, number uint32, h hashes) kernelLimit {
	k := kernelLimit{
		MaxDelay:       uint64(shape.MaxDelay),
		MarkDelay:      markDelay(l, shape),
		QueueTimeout:   uint64(newConns.MaxDelay),
		MaxConnections: uint32(l.MaxConnections),
		Overhead:       uint32(shape.Overhead),
		KeyFields:      uint32(l.Key),
		Id:             number,
	}
	const full = 1448                                 // bytes of payload in a full TCP packet
	const largestBytes, largestPackets = 1 << 16, 128 // maximum of a GRO or GSO packet
	for i, m := range []struct {
		rate              leaky.Rate
		burst, wait, held leaky.Time
		unit, largest     uint64
	}{
		{shape.Bytes, shape.BytesBurst, shape.MaxDelay, longest, full + shape.Overhead, largestBytes + largestPackets*shape.Overhead},
		{shape.Packets, shape.PacketsBurst, shape.MaxDelay, longest, 1, largestPackets},
		{newConns.Packets, newConns.PacketsBurst, newConns.MaxDelay, 0, 1, 1},
	} {
		k.Meter[i] = encodeMeter(m.rate, m.burst, meterNumber(number, i), h)
		k.Meter[i].BacklogBounds = encodeBacklogBounds(m.burst.Add(max(m.wait, m.rate.Cost(m.unit))), max(m.burst.Add(m.wait), m.held).Add(m.rate.Cost(m.largest)))
		if l.Key == 0 {
			k.Meter[i].Tag |= neverEvicted
		}
	}
	k.Mask = [2][4]uint32{mask(96 + l.IPv4Prefix), mask(l.IPv6Prefix)}
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
)

// meterOf returns the number of the meter that a bucket's tag names.
func meterOf(tag uint64) uint64 { return tag &^ neverEvicted >> tagMeterShift }

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

// indexThreshold is the number of lines from which an index by the upper 16 bits of a
// number, of 512 KiB, pays.
const indexThreshold = 512

// segments4 encodes segments of 32-bit numbers.
func (im *image) segments4(all iter.Seq2[uint32, shaper.Class]) kernelSegments {
	s := kernelSegments{Line: uint32(len(im.lines))}
	var last *kernelLine4
	var first shaper.Class
	var starts []uint32 // first numbers of the lines
	n := 0
	for start, c := range all {
		if n == 0 {
			first = c
		}
		if n%len(last.Start) == 0 {
			im.lines = append(im.lines, kernelLine{})
			starts = append(starts, start)
		}
		last = (*kernelLine4)(unsafe.Pointer(&im.lines[len(im.lines)-1]))
		last.Start[last.Used] = start
		last.Asn[last.Used] = c.ASN
		last.Set[last.Used] = im.setNumber(c.Set)
		last.Used++
		n++
	}
	if n == 1 && first.ASN == 0 {
		im.lines = im.lines[:s.Line]
		return kernelSegments{Set: uint64(first.Set)}
	}
	s.Lines = uint32(len(im.lines)) - s.Line
	if s.Lines >= indexThreshold {
		s.Index = uint32(len(im.lines))
		im.index(starts)
	}
	return s
}

// index encodes, for each value of the upper 16 bits, the range of lines that may contain
// such a number: the first line, and the one after the last.
func (im *image) index(starts []uint32) {
	low, high := 0, 0
	for upper := uint64(0); upper < 1<<16; upper++ {
		if upper%8 == 0 {
			im.lines = append(im.lines, kernelLine{})
		}
		for low+1 < len(starts) && uint64(starts[low+1]) <= upper<<16 {
			low++
		}
		for high < len(starts) && uint64(starts[high]) < (upper+1)<<16 {
			high++
		}
		im.lines[len(im.lines)-1].Word[upper%8] = uint64(low) | uint64(high)<<32
	}
}

// segments6 encodes segments of 128-bit numbers, and a search tree above them.
func (im *image) segments6(all iter.Seq2[segments.Addr6, shaper.Class]) kernelSegments {
	var leaves []kernelLine6
	for start, c := range all {
		if n := len(leaves); n == 0 || leaves[n-1].Used == uint64(len(leaves[n-1].Start)) {
			leaves = append(leaves, kernelLine6{})
		}
		last := &leaves[len(leaves)-1]
		last.Start[last.Used] = [2]uint64{start.Hi, start.Lo}
		last.Asn[last.Used] = c.ASN
		last.Set[last.Used] = im.setNumber(c.Set)
		last.Used++
	}
	if len(leaves) == 1 && leaves[0].Used == 1 && leaves[0].Asn[0] == 0 {
		return kernelSegments{Set: uint64(im.setList[leaves[0].Set[0]])}
	}
	s := kernelSegments{Line: uint32(len(im.lines)), Lines: uint32(len(leaves))}
	starts := make([][2]uint64, len(leaves))
	for i := range leaves {
		starts[i] = leaves[i].Start[0]
	}
	im.tree(starts)
	for i := range leaves {
		im.lines = append(im.lines, *(*kernelLine)(unsafe.Pointer(&leaves[i])))
	}
	return s
}

// tree encodes the search tree above lines that begin with starts, level by level from the
// root. Children without a line have the highest address.
func (im *image) tree(starts [][2]uint64) {
	const children = len(kernelNode6{}.Start)
	all := 1 // lines that the tree can address
	for all < len(starts) {
		all *= children
	}
	for below := all / children; below >= 1; below /= children { // lines below a child
		for at := 0; at < all; {
			var n kernelNode6
			for i := range n.Start {
				n.Start[i] = [2]uint64{math.MaxUint64, math.MaxUint64}
				if at < len(starts) {
					n.Start[i] = starts[at]
				}
				at += below
			}
			im.lines = append(im.lines, *(*kernelLine)(unsafe.Pointer(&n)))
		}
	}
}

// setNumber returns the number of a set.
func (im *image) setNumber(set shaper.Set) uint32 {
	n, ok := im.sets[set]
	if !ok {
		n = uint32(len(im.setList))
		im.sets[set] = n
		im.setList = append(im.setList, set)
	}
	return n
}

// asClasses yields segments without an ASN.
func asClasses[K any](all iter.Seq2[K, shaper.Set]) iter.Seq2[K, shaper.Class] {
	return func(yield func(K, shaper.Class) bool) {
		for start, set := range all {
			if !yield(start, shaper.Class{Set: set}) {
				return
			}
		}
	}
}

// portClasses yields segments of ports as segments of 32-bit numbers.
func portClasses(all iter.Seq2[uint16, shaper.Set]) iter.Seq2[uint32, shaper.Class] {
	return func(yield func(uint32, shaper.Class) bool) {
		for start, c := range asClasses(all) {
			if !yield(uint32(start), c) {
				return
			}
		}
	}
}
