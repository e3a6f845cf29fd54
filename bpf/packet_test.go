package bpf

import (
	"encoding/binary"
	"hash/fnv"
	"math/rand/v2"
	"net/netip"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// sample is a packet, with the properties that a policy looks at.
type sample struct {
	data     []byte
	ip       bool // other packets are not limited
	flow     shaper.Flow
	bytes    uint64
	segments uint64
	gsoSize  uint32
	stamp    uint64 // departure time before the program, ns; 0 is none
	l3       int    // offset of the IP header
	ecn      byte   // codepoint (RFC 3168)
	after    []byte // packet data after the program

	anyPort, anyProtocol bool // unknown: it is under the limits of all ports or protocols
}

// Numbers of IP protocols, for the tests.
const (
	ipICMP   = 1
	ipTCP    = 6
	ipUDP    = 17
	ipSCTP   = 132
	ipICMPv6 = 58
)

// generator makes random packets of few flows, so that keys recur.
type generator struct {
	*rand.Rand
	flows     []tuple
	fragments map[fragmentKey]*fragmented
}

// tuple identifies a flow.
type tuple struct {
	source, destination netip.Addr
	protocol            byte
	sport, dport        uint16
}

type fragmentKey struct {
	source, destination netip.Addr
	id                  uint32
	protocol            byte // IPv4 only
}

// fragmented is the state of a fragmented datagram: see fragments.h.
type fragmented struct {
	protocol     byte
	sport, dport uint16
	paid         uint64
	disputed     bool
	until        uint64 // ns
}

const reassembly = uint64(time.Minute)

// firstFragment records a first fragment, and returns the bytes of other fragments that it is charged for.
func (m *generator) firstFragment(key fragmentKey, protocol byte, sport, dport uint16, now uint64) uint64 {
	f := m.fragments[key]
	if f == nil || now >= f.until {
		m.fragments[key] = &fragmented{protocol: protocol, sport: sport, dport: dport, until: now + reassembly}
		return 0
	}
	f.until = now + reassembly
	if f.disputed = f.disputed || f.protocol != protocol || f.sport != sport || f.dport != dport; f.disputed {
		return f.paid
	}
	return 0
}

// laterFragment returns the datagram of a later fragment of n bytes, or nil if unknown.
func (m *generator) laterFragment(key fragmentKey, n int, now uint64) *fragmented {
	f := m.fragments[key]
	if f == nil || now >= f.until {
		delete(m.fragments, key)
		return nil
	}
	f.until = now + reassembly
	if f.disputed {
		return nil
	}
	if f.paid < 0xffff {
		f.paid += uint64(n)
	}
	return f
}

func newGenerator(rnd *rand.Rand) *generator {
	m := &generator{Rand: rnd, fragments: map[fragmentKey]*fragmented{}}
	for range 300 {
		ipv4 := m.IntN(2) == 0
		protocol := []byte{ipTCP, ipTCP, ipTCP, ipUDP, ipUDP, ipICMP, ipSCTP}[m.IntN(7)]
		if protocol == ipICMP && !ipv4 {
			protocol = ipICMPv6
		}
		m.flows = append(m.flows, tuple{
			m.address(ipv4), m.address(ipv4), protocol,
			uint16(1024 + m.IntN(3)), somePorts[m.IntN(len(somePorts))],
		})
	}
	return m
}

// address draws from a small space that random prefixes divide.
func (m *generator) address(ipv4 bool) netip.Addr {
	if ipv4 {
		return netip.AddrFrom4([4]byte{byte(10 + m.IntN(2)), byte(m.IntN(2)), byte(m.IntN(3)), byte(m.IntN(4))})
	}
	a := [16]byte{0x20, 0x01, 0x0d, byte(0xb8 + m.IntN(2))}
	a[7], a[8], a[15] = byte(m.IntN(3)), byte(m.IntN(2)), byte(m.IntN(4))
	return netip.AddrFrom16(a)
}

func (m *generator) dscp() shaper.DSCP { return []shaper.DSCP{0, 0, 8, 10, 46, 63}[m.IntN(6)] }

func (m *generator) mark() uint32 {
	return []uint32{0, 0, 1, 0x10, 0xff10, 1 << 31, 1<<32 - 1}[m.IntN(7)]
}

var somePorts = []uint16{22, 53, 80, 443, 5432, 8000, 8005, 8010, 65535}

// packet makes a packet that arrives at now, in ns.
func (m *generator) packet(now uint64) sample {
	var s sample
	flow := m.flows[m.IntN(len(m.flows))]
	source, destination, protocol := flow.source, flow.destination, flow.protocol
	sport, dport := flow.sport, flow.dport
	ipv4 := source.Is4()
	payload := m.IntN(300)
	s.segments = 1
	s.ip = true

	var l4 []byte
	ported := false
	switch protocol {
	case ipTCP:
		l4 = make([]byte, 20+4*m.IntN(5))
		l4[12] = byte(len(l4)/4) << 4
		l4[13] = 0x10
		ported = true
	case ipUDP:
		l4 = make([]byte, 8)
		ported = true
	}
	if ported {
		binary.BigEndian.PutUint16(l4, sport)
		binary.BigEndian.PutUint16(l4[2:], dport)
	}
	headers := len(l4)
	l4 = append(l4, make([]byte, payload)...)

	// Some packets are fragments, truncated, or trains of segments.
	fragment, first := m.IntN(10) == 0, m.IntN(2) == 0
	id := uint32(m.IntN(50))
	switch {
	case fragment:
		if !first {
			headers = 0
		}
	case m.IntN(20) == 0: // truncated within or after the header
		l4 = l4[:m.IntN(min(len(l4), 8)+1)]
		if len(l4) < headers {
			headers = 0
			sport, dport = 0, 0
		}
	case (protocol == ipTCP || protocol == ipUDP) && m.IntN(5) == 0:
		s.gsoSize = uint32(1 + m.IntN(100))
		s.segments = uint64(1 + m.IntN(40))
	}
	if !ported {
		sport, dport = 0, 0
	}
	carried, bytes := protocol, uint64(len(l4)-headers)
	key := fragmentKey{source, destination, id, 0}
	if ipv4 {
		key.protocol = protocol
	}
	switch {
	case !fragment || ipv4 && !ported:
	case first:
		bytes += m.firstFragment(key, protocol, sport, dport, now)
	default:
		sport, dport = 0, 0
		if f := m.laterFragment(key, len(l4), now); f != nil {
			carried, sport, dport = f.protocol, f.sport, f.dport
		} else {
			s.anyPort, s.anyProtocol = true, !ipv4
		}
	}
	s.bytes = max(bytes, 1)

	var l3 []byte
	if ipv4 {
		l3 = m.ipv4(source, destination, protocol, l4, fragment, first, id)
	} else {
		l3 = m.ipv6(source, destination, protocol, l4, fragment, first, id)
	}
	s.ecn = byte(m.IntN(4))
	dscp := m.dscp()
	setDSCP(l3, byte(dscp))
	setECN(l3, s.ecn)
	s.data = m.ethernet(ipv4)
	s.l3 = len(s.data)
	s.data = append(s.data, l3...)
	if ipv4 || len(l3) > 40 { // without a length field the padding would be payload
		s.data = append(s.data, make([]byte, m.IntN(2)*m.IntN(46))...) // padding is no payload
	}

	h := fnv.New64a()
	_, _ = h.Write(source.AsSlice())
	_, _ = h.Write(destination.AsSlice())
	_, _ = h.Write([]byte{byte(sport >> 8), byte(sport), byte(dport >> 8), byte(dport), carried})
	s.flow = shaper.Flow{Source: source, Destination: destination, Port: dport, DSCP: dscp, Mark: m.mark(), Connection: h.Sum64()}
	switch carried {
	case ipTCP:
		s.flow.Protocol = shaper.TCP
	case ipUDP:
		s.flow.Protocol = shaper.UDP
	case ipICMP, ipICMPv6:
		s.flow.Protocol = shaper.ICMP
	}
	if m.IntN(50) == 0 && !fragment {
		m.corrupt(&s, ipv4)
	}
	return s
}

// setDSCP sets the DSCP of an IP packet without a checksum.
func setDSCP(l3 []byte, dscp byte) {
	if l3[0]>>4 == 6 {
		l3[0], l3[1] = l3[0]&0xf0|dscp>>2, l3[1]&0x3f|dscp<<6
		return
	}
	l3[1] = l3[1]&3 | dscp<<2
}

// setECN sets the ECN codepoint of an IP packet.
func setECN(l3 []byte, ecn byte) {
	if l3[0]>>4 == 6 {
		l3[1] = l3[1]&^0x30 | ecn<<4
		return
	}
	l3[1] = l3[1]&^3 | ecn
	size := int(l3[0]&0xf) * 4
	binary.BigEndian.PutUint16(l3[10:], 0)
	binary.BigEndian.PutUint16(l3[10:], ^checksum(l3[:size], 0))
}

// corrupt makes a packet invalid IP.
func (m *generator) corrupt(s *sample, ipv4 bool) {
	s.ip = false
	at := 12
	for binary.BigEndian.Uint16(s.data[at:]) == 0x8100 || binary.BigEndian.Uint16(s.data[at:]) == 0x88a8 {
		at += 4
	}
	l3 := at + 2
	size := 40
	if ipv4 {
		size = 20
	}
	switch n := m.IntN(3); {
	case n == 0:
		s.data[at], s.data[at+1] = 0x08, 0x06 // ARP
	case n == 1 || at == 12: // a test run rejects a truncated IP header
		s.data[l3] ^= 0x10 // the other IP version
	default:
		s.data = s.data[:l3+1+m.IntN(size-1)]
	}
}

func (m *generator) ethernet(ipv4 bool) []byte {
	b := make([]byte, 12)
	for range m.IntN(4) - 1 { // 0, 0, 1 or 2 tags
		b = append(b, 0x81, 0x00, 0, byte(m.IntN(256)))
	}
	if len(b) > 16 {
		b[12], b[13] = 0x88, 0xa8
	}
	if ipv4 {
		return append(b, 0x08, 0x00)
	}
	return append(b, 0x86, 0xdd)
}

func (m *generator) ipv4(source, destination netip.Addr, protocol byte, l4 []byte, fragment, first bool, id uint32) []byte {
	b := make([]byte, 20+4*m.IntN(3)) // with options
	b[0] = 0x40 | byte(len(b)/4)
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)+len(l4)))
	binary.BigEndian.PutUint16(b[4:], uint16(id))
	if fragment && first {
		b[6] = 0x20
	} else if fragment {
		binary.BigEndian.PutUint16(b[6:], uint16(m.IntN(2))<<13|uint16(1+m.IntN(8000)))
	} else if m.IntN(2) == 0 {
		b[6] = 0x40 // don't fragment
	}
	b[9] = protocol
	copy(b[12:], source.AsSlice())
	copy(b[16:], destination.AsSlice())
	return append(b, l4...)
}

func (m *generator) ipv6(source, destination netip.Addr, protocol byte, l4 []byte, fragment, first bool, id uint32) []byte {
	type extension struct {
		number byte
		data   []byte
	}
	var chain []extension
	if m.IntN(4) == 0 {
		chain = append(chain, extension{0, make([]byte, 8*(1+m.IntN(2)))})
	}
	if m.IntN(8) == 0 {
		chain = append(chain, extension{43, make([]byte, 8)})
	}
	if fragment {
		f := make([]byte, 8)
		if first {
			f[3] = 1
		} else {
			binary.BigEndian.PutUint16(f[2:], uint16(1+m.IntN(8000))<<3|uint16(m.IntN(2)))
		}
		binary.BigEndian.PutUint32(f[4:], id)
		chain = append(chain, extension{44, f})
	}
	if m.IntN(8) == 0 && (!fragment || first) {
		chain = append(chain, extension{60, make([]byte, 8)})
	}
	next := protocol
	body := l4
	for i := len(chain) - 1; i >= 0; i-- {
		e := chain[i]
		e.data[0] = next
		if e.number != 44 {
			e.data[1] = byte(len(e.data)/8 - 1)
		}
		next = e.number
		body = append(e.data, body...)
	}
	b := make([]byte, 40)
	b[0] = 0x60
	binary.BigEndian.PutUint16(b[4:], uint16(len(body)))
	b[6], b[7] = next, 64
	copy(b[8:], source.AsSlice())
	copy(b[24:], destination.AsSlice())
	return append(b, body...)
}
