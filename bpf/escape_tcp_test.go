package bpf

import (
	"encoding/binary"
)

// conversation adds a connection, opened in some way, and segments that may look like its
// end.
func (b *builder) conversation() {
	port, dport := uint16(20000+b.IntN(40000)), b.port()
	if b.chance(70) {
		dport = escapePort
	}
	first := b.Uint32()
	options := 0
	segment := func(flags byte, seq uint32, ack int32, n int) []byte {
		l4 := make([]byte, 20+options+n)
		binary.BigEndian.PutUint16(l4, port)
		binary.BigEndian.PutUint16(l4[2:], dport)
		binary.BigEndian.PutUint32(l4[4:], seq)
		binary.BigEndian.PutUint32(l4[8:], uint32(ack))
		l4[12], l4[13] = byte(5+options/4)<<4, flags
		if options > 0 { // a timestamp
			copy(l4[20:], []byte{1, 1, 8, 10})
			binary.BigEndian.PutUint32(l4[24:], b.Uint32()>>b.IntN(2))
		}
		binary.BigEndian.PutUint16(l4[14:], 64240)
		b.checksum(ipTCP, l4, 16)
		return l4
	}
	opening := segment(byte(syn|b.IntN(2)*0x40|b.IntN(2)*8), first, 0, b.IntN(2)*b.IntN(40))
	for again := true; again; again = b.chance(5) {
		if b.chance(50) {
			b.add(b.packet(ipTCP, opening))
		} else {
			b.wrapped(ipTCP, opening)
		}
	}
	b.wait(40)
	next := first + 1   // what the receiver expects
	known := []uint32{} // candidates for the next sequence number
	sent := int32(0)    // by the receiver
	say := func(flags byte, seq uint32, n int) {
		ack := sent
		if b.chance(10) {
			ack += int32(b.IntN(5)) - 2
		}
		l4 := segment(flags, seq, ack, n)
		fake := false
		if b.chance(20) {
			l4[16+b.IntN(2)] ^= byte(1 << b.IntN(8))
			fake = true
		}
		p := b.packet(ipTCP, l4)
		if b.chance(5) {
			p[7] = 1
			if b.to.Is4() {
				p[7], p[8] = 0, 1
				sum4(p)
			}
			fake = true
		}
		if b.to.Is4() && b.chance(3) {
			p[10] ^= 1
			fake = true
		}
		s := step{kind: stepFrame, frame: b.frame(p), tcp: 14 + len(p) - len(l4)}
		if flags&ack1 == 0 {
			s.tcp = 0
		}
		if b.chance(3) {
			s.frame[5] ^= 4 // to another host
			fake = true
		}
		b.steps = append(b.steps, s)
		if !fake && seq == next && flags&rst == 0 {
			next += uint32(n)
			if flags&fin != 0 {
				next++
			}
		}
		known = append(known, seq, seq+uint32(n))
	}
	if b.chance(10) { // invalid segments first
		say([]byte{ack1, ack1, rst, rst | ack1, fin | ack1, ack1 | syn, syn}[b.IntN(7)], next, b.IntN(2)*b.IntN(10))
	}
	if b.chance(95) {
		b.steps = append(b.steps, b.segmentStep(segment(ack1, next, 0, 0)))
	}
	for range b.IntN(7) {
		b.wait(10)
		switch b.IntN(9) {
		case 8:
			say(syn, b.Uint32(), 0)
		case 0, 1: // in order
			say(ack1, next, b.IntN(30))
		case 2: // out of order
			say(ack1, next+b.drawDistance(known, next), b.IntN(30))
		case 3, 4:
			flags := byte(rst)
			if b.chance(40) {
				flags |= ack1
			}
			if b.chance(20) {
				options = 12
			}
			if b.chance(10) {
				b.wrapped(ipTCP, segment(rst, next+b.drawDistance(known, next), 0, b.IntN(2)*b.IntN(30)))
			} else {
				say(flags, next+b.drawDistance(known, next), 0)
			}
			options = 0
		case 5:
			say(fin|ack1, next+b.drawDistance(known, next), b.IntN(3))
		case 6:
			if b.chance(50) {
				b.steps = append(b.steps, step{kind: stepWrite})
				sent += 100
			} else {
				b.steps = append(b.steps, step{kind: stepShutdown})
			}
		case 7:
			l4 := segment(ack1, next, 0, 1+b.IntN(3000))
			b.train(ipTCP, l4)
			next += uint32(len(l4) - 20)
		}
	}
}

// wait adds a wait with a probability, in percent.
func (b *builder) wait(chance int) {
	if b.waits && b.chance(chance) {
		b.steps = append(b.steps, step{kind: stepWait})
	}
}

// ack1 is ack, where a parameter has that name.
const ack1 = ack

// segmentStep returns a step with a plain segment that acknowledges the receiver's data.
func (b *builder) segmentStep(l4 []byte) step {
	p := b.packet(ipTCP, l4)
	return step{kind: stepFrame, frame: b.frame(p), tcp: 14 + len(p) - len(l4)}
}

// drawDistance draws the distance of a segment from the next sequence number.
func (b *builder) drawDistance(known []uint32, next uint32) uint32 {
	switch b.IntN(6) {
	case 0, 1:
		return 0
	case 2:
		return uint32(b.IntN(7)) - 3
	case 3:
		return b.Uint32()
	}
	if len(known) == 0 {
		return 1 << 30
	}
	return known[b.IntN(len(known))] - next
}
