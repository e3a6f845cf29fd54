package bpf

import (
	"encoding/binary"
)

// extension is an IPv6 extension header.
type extension struct {
	number byte
	data   []byte
}

// chain makes extension headers, for before and after the fragment header.
func (b *builder) chain() (before, behind []extension) {
	if b.to.Is4() {
		return nil, nil
	}
	make1 := func(number byte) extension {
		n := 8
		switch b.IntN(8) {
		case 0:
			n = 8 * (1 + b.IntN(4))
		case 1:
			n = 8 * (1 + b.IntN(30))
		}
		h := extension{number, make([]byte, n)}
		if number == ipRouting {
			h.data[2] = byte(b.IntN(5)) // type; segments left is 0
			return h
		}
		// One option fills it: padding, or an unknown one that is to be skipped.
		for at := 2; at < n; {
			size := min(n-at-2, 255)
			if size < 0 {
				break
			}
			h.data[at], h.data[at+1] = []byte{1, 0x1e}[b.IntN(2)], byte(size)
			at += 2 + size
		}
		if n == 8 && b.chance(50) {
			h.data[2], h.data[3] = 1, 4
		}
		return h
	}
	if b.chance(35) {
		before = append(before, make1(ipHopByHop))
	}
	for b.chance(15) {
		before = append(before, make1([]byte{ipDestination, ipRouting}[b.IntN(2)]))
	}
	for b.chance(20) {
		behind = append(behind, make1([]byte{ipDestination, ipRouting}[b.IntN(2)]))
	}
	for n := 0; b.chance(2) || n > 0 && n < 10; n++ {
		behind = append(behind, make1(ipDestination))
	}
	return before, behind
}

// Extension headers of IPv6.
const (
	ipHopByHop    = 0
	ipRouting     = 43
	ipFragment    = 44
	ipNone        = 59
	ipDestination = 60
)

// linked prepends headers to a body. It returns the number of the first header.
func linked(headers []extension, protocol byte, body []byte) (byte, []byte) {
	for i := len(headers) - 1; i >= 0; i-- {
		h := headers[i]
		data := append([]byte{}, h.data...)
		data[0] = protocol
		if h.number != ipFragment {
			data[1] = byte(len(data)/8 - 1)
		}
		protocol = h.number
		body = append(data, body...)
	}
	return protocol, body
}

// whole makes an unfragmented packet.
func (b *builder) whole(headers []extension, protocol byte, l4 []byte) []byte {
	if b.to.Is6() && b.chance(5) { // an atomic fragment
		headers = append(headers, extension{ipFragment, make([]byte, 8)})
	}
	first, body := linked(headers, protocol, l4)
	p := b.packet(first, body)
	if b.to.Is4() {
		return b.options(p)
	}
	if b.chance(25) && (first == ipHopByHop || b.chance(20)) {
		binary.BigEndian.PutUint16(p[4:], 0)
	}
	return p
}

// options adds options to an IPv4 packet.
func (b *builder) options(p []byte) []byte {
	if b.chance(85) {
		return p
	}
	n := 4 * (1 + b.IntN(10))
	options := make([]byte, n)
	for i := range options {
		options[i] = 1
	}
	p = append(append(append([]byte{}, p[:20]...), options...), p[20:]...)
	p[0] = 0x40 | byte(5+n/4)
	setLength4(p, len(p))
	return p
}

// fragments splits a datagram into fragments in any order, some of them repeated or wrong.
func (b *builder) fragments(before, behind []extension, protocol byte, l4 []byte) [][]byte {
	next, body := linked(behind, protocol, l4)
	cuts := []int{0}
	for range 1 + b.IntN(4) {
		from := cuts[len(cuts)-1]
		cut := from + 8*(1+b.IntN(3))
		if b.chance(30) {
			cut = from + 8*(1+b.IntN(40))
		}
		if cut >= len(body) {
			break
		}
		cuts = append(cuts, cut)
	}
	id := b.Uint32()
	var packets [][]byte
	make1 := func(from, to int, next byte) []byte {
		return b.fragment(before, next, body[from:to], id, from, to < len(body))
	}
	for i, from := range cuts {
		to := len(body)
		if i+1 < len(cuts) {
			to = cuts[i+1]
		}
		n := next
		if from > 0 && b.to.Is6() && b.chance(25) {
			n = []byte{ipUnknown, ipNone, ipUDP, ipTCP, ipICMPv6, ipDestination, ipHopByHop}[b.IntN(7)]
		}
		packets = append(packets, make1(from, to, n))
		if b.chance(15) { // one that the receiver does not accept
			bad := b.spoiled(make1(from, to, n), before)
			if b.chance(50) {
				packets = append(packets, bad)
			} else {
				packets = append([][]byte{bad}, packets...)
			}
		}
	}
	switch b.IntN(4) {
	case 0:
		for i, j := 0, len(packets)-1; i < j; i, j = i+1, j-1 {
			packets[i], packets[j] = packets[j], packets[i]
		}
	case 1:
		b.Shuffle(len(packets), func(i, j int) { packets[i], packets[j] = packets[j], packets[i] })
	}
	if b.chance(10) {
		packets = append(packets, append([]byte{}, packets[b.IntN(len(packets))]...))
	}
	return packets
}

func (b *builder) fragment(before []extension, next byte, data []byte, id uint32, from int, more bool) []byte {
	if b.to.Is4() {
		p := b.packet(next, data)
		binary.BigEndian.PutUint16(p[4:], uint16(id))
		binary.BigEndian.PutUint16(p[6:], uint16(from/8))
		if more {
			p[6] |= 0x20
		}
		sum4(p)
		return p
	}
	h := extension{ipFragment, make([]byte, 8)}
	binary.BigEndian.PutUint16(h.data[2:], uint16(from))
	if more {
		h.data[3] |= 1
	}
	binary.BigEndian.PutUint32(h.data[4:], id)
	first, body := linked(append(append([]extension{}, before...), h), next, data)
	return b.packet(first, body)
}

// spoiled turns a fragment into one that does not arrive, or belongs to another datagram.
func (b *builder) spoiled(p []byte, before []extension) []byte {
	at := 20
	if b.to.Is6() {
		at = 48
		for _, h := range before {
			at += len(h.data)
		}
	}
	if len(p) >= at+4 && b.chance(80) {
		binary.BigEndian.PutUint16(p[at+2:], []uint16{escapePort, otherPort, 5}[b.IntN(3)])
	}
	if b.to.Is4() {
		switch b.IntN(3) {
		case 0:
			p[8] = 1
			sum4(p)
		case 1:
			p[10] ^= 0xff
		}
		return p
	}
	switch b.IntN(3) {
	case 0:
		p[7] = 1
	case 1:
		binary.BigEndian.PutUint16(p[4:], uint16(len(p)-40+8))
	}
	return p
}

// mutate changes a packet's headers.
func (b *builder) mutate(p []byte) {
	switch {
	case b.to.Is4() && b.chance(30):
		binary.BigEndian.PutUint16(p[2:], uint16(b.IntN(len(p)+10)))
	case b.to.Is6() && b.chance(30):
		binary.BigEndian.PutUint16(p[4:], uint16(b.IntN(len(p)-30)))
	default:
		for range 1 + b.IntN(2) {
			p[b.IntN(min(len(p), 80))] ^= byte(1 << b.IntN(8))
		}
	}
	if b.to.Is4() && b.chance(90) {
		sum4(p)
	}
}
