package bpf

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
)

// ipUnknown is a protocol for experiments (RFC 3692).
const ipUnknown = 253

// step is one step of a sequence: a frame to send, or an action of the receiver.
type step struct {
	kind   string
	vnet   [10]byte // struct virtio_net_hdr
	frame  []byte
	tcp    int // offset of a TCP header with an acknowledgment relative to the receiver's ISN; 0 is none
	number int // index in the generated sequence
}

// Kinds of steps.
const (
	stepFrame    = "frame"
	stepWrite    = "write"    // the receiver sends 100 bytes on its connections
	stepShutdown = "shutdown" // the receiver shuts down its connections for writing
	stepWait     = "wait"     // until handshakes are dropped early
)

func formatSteps(steps []step) string {
	var b strings.Builder
	for _, s := range steps {
		if s.kind == stepFrame {
			fmt.Fprintf(&b, "frame %x %d %x\n", s.vnet, s.tcp, s.frame)
		} else {
			fmt.Fprintln(&b, s.kind)
		}
	}
	return b.String()
}

// parseSteps reads what formatSteps wrote. Lines that begin with # are comments.
func parseSteps(text string) (steps []step, err error) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 0 || strings.HasPrefix(line, "#"):
		case fields[0] == stepFrame && len(fields) == 4:
			s := step{kind: stepFrame}
			vnet, err1 := hex.DecodeString(fields[1])
			frame, err2 := hex.DecodeString(fields[3])
			_, err3 := fmt.Sscan(fields[2], &s.tcp)
			if copy(s.vnet[:], vnet); err1 != nil || err2 != nil || err3 != nil {
				return nil, fmt.Errorf("%q", line)
			}
			s.frame = frame
			steps = append(steps, s)
		case slices.Contains([]string{stepWrite, stepShutdown, stepWait}, fields[0]):
			steps = append(steps, step{kind: fields[0]})
		default:
			return nil, fmt.Errorf("%q", line)
		}
	}
	return steps, nil
}

// builder makes frames from one source to the receiver.
type builder struct {
	*rand.Rand
	source, to netip.Addr
	waits      bool
	steps      []step
}

// newSequence generates a random sequence.
func newSequence(r *rand.Rand, source uint64, counts, waits bool) []step {
	b := &builder{Rand: r, waits: waits}
	if r.IntN(2) == 0 {
		b.source, b.to = netip.AddrFrom4([4]byte{10, 1, byte(source >> 8 % 255), byte(source)}), escapeTo4
	} else {
		a := [16]byte{0xfd, 0x01, 7: byte(source & 1)}
		binary.BigEndian.PutUint64(a[8:], source<<8|1)
		b.source, b.to = netip.AddrFrom16(a), escapeTo6
	}
	if counts && b.IntN(8) > 0 || b.IntN(6) == 0 {
		b.conversation()
	} else {
		for range 1 + b.IntN(2) {
			b.datagrams()
		}
	}
	for i := range b.steps {
		b.steps[i].number = i
	}
	return b.steps
}

func (b *builder) chance(n int) bool { return b.IntN(100) < n }

func (b *builder) port() uint16 { return []uint16{escapePort, otherPort}[b.IntN(2)] }

// size draws a payload size, mostly a small one.
func (b *builder) size() int {
	switch b.IntN(6) {
	case 0:
		return b.IntN(3)
	case 1:
		return b.IntN(1400)
	case 2:
		return 8 * b.IntN(10)
	}
	return b.IntN(200)
}

func udpDatagram(sport, dport uint16, data []byte) []byte {
	l4 := make([]byte, 8, 8+len(data))
	binary.BigEndian.PutUint16(l4, sport)
	binary.BigEndian.PutUint16(l4[2:], dport)
	binary.BigEndian.PutUint16(l4[4:], uint16(8+len(data)))
	return append(l4, data...)
}

// datagrams adds a datagram: whole, as a train, or in fragments.
func (b *builder) datagrams() {
	protocol := byte(ipUDP)
	var l4 []byte
	switch b.IntN(8) {
	case 0:
		protocol, l4 = ipUnknown, make([]byte, b.size())
		if b.chance(30) {
			protocol = ipSCTP
		}
	case 1:
		protocol, l4 = ipICMP, make([]byte, 8+b.size())
		if b.to.Is6() {
			protocol = ipICMPv6
		}
		l4[0] = byte(b.IntN(256))
		b.checksum(protocol, l4, 2)
	default:
		l4 = udpDatagram(uint16(1024+b.IntN(4)), b.port(), make([]byte, b.size()))
		if b.chance(10) {
			binary.BigEndian.PutUint16(l4[4:], uint16(b.IntN(len(l4)+20)))
		}
	}
	if protocol == ipUDP && b.chance(10) {
		b.train(protocol, l4)
		return
	}
	b.wrapped(protocol, l4)
}

// checksum sets the checksum of a transport header at offset at.
func (b *builder) checksum(protocol byte, l4 []byte, at int) {
	sum := uint32(checksum(b.source.AsSlice(), 0)) + uint32(checksum(b.to.AsSlice(), 0)) + uint32(protocol) + uint32(len(l4))
	if protocol == ipICMP {
		sum = 0
	}
	binary.BigEndian.PutUint16(l4[at:], 0)
	binary.BigEndian.PutUint16(l4[at:], ^checksum(l4, sum))
}

// train adds a train that a guest sends as one packet, and the kernel splits.
func (b *builder) train(protocol byte, l4 []byte) {
	p := b.packet(protocol, l4)
	s := step{kind: stepFrame, frame: b.frame(p)}
	offset := 14 + len(p) - len(l4)
	header, sum, kind := 8, 6, byte(5)
	if protocol == ipTCP {
		header, sum, kind = int(l4[12]>>4)*4, 16, 1
		if b.to.Is6() {
			kind = 4
		}
	} else if b.chance(30) {
		kind = 3 // split by IP
	}
	s.vnet[0], s.vnet[1] = 1, kind
	binary.LittleEndian.PutUint16(s.vnet[2:], uint16(offset+header))
	binary.LittleEndian.PutUint16(s.vnet[4:], uint16(1+b.IntN(1400)))
	if b.chance(50) {
		binary.LittleEndian.PutUint16(s.vnet[4:], uint16(8*(1+b.IntN(20))))
	}
	binary.LittleEndian.PutUint16(s.vnet[6:], uint16(offset))
	binary.LittleEndian.PutUint16(s.vnet[8:], uint16(sum))
	at := s.frame[offset:]
	pseudoSum := fold16(uint32(checksum(b.source.AsSlice(), 0)) + uint32(checksum(b.to.AsSlice(), 0)) + uint32(protocol) + uint32(len(l4)))
	binary.BigEndian.PutUint16(at[sum:], pseudoSum)
	if b.chance(40) { // without a length in the IP header
		if b.to.Is4() {
			setLength4(s.frame[14:], 0)
		} else {
			binary.BigEndian.PutUint16(s.frame[18:], 0)
		}
	}
	if protocol == ipTCP && l4[13]&ack != 0 {
		s.tcp = offset
	}
	b.steps = append(b.steps, s)
}

// packet makes a plain IP packet.
func (b *builder) packet(protocol byte, body []byte) []byte {
	var p []byte
	if b.to.Is4() {
		p = make([]byte, 20)
		p[0], p[8], p[9] = 0x45, 64, protocol
		copy(p[12:], b.source.AsSlice())
		copy(p[16:], b.to.AsSlice())
		setLength4(p, 20+len(body))
	} else {
		p = make([]byte, 40)
		p[0], p[6], p[7] = 0x60, protocol, 64
		binary.BigEndian.PutUint16(p[4:], uint16(len(body)))
		copy(p[8:], b.source.AsSlice())
		copy(p[24:], b.to.AsSlice())
	}
	return append(p, body...)
}

func setLength4(p []byte, n int) {
	binary.BigEndian.PutUint16(p[2:], uint16(n))
	sum4(p)
}

// sum4 sets the checksum of an IPv4 header.
func sum4(p []byte) {
	size := min(int(p[0]&0xf)*4, len(p))
	if size < 20 {
		return
	}
	binary.BigEndian.PutUint16(p[10:], 0)
	binary.BigEndian.PutUint16(p[10:], ^checksum(p[:size], 0))
}

// frame prepends an Ethernet header to a packet.
func (b *builder) frame(p []byte) []byte {
	f := append(append([]byte{}, escapeMAC[:]...), 2, 0, 0, 0, 0, 9)
	if p[0]>>4 == 4 {
		f = append(f, 0x08, 0x00)
	} else {
		f = append(f, 0x86, 0xdd)
	}
	return append(f, p...)
}

// add adds a packet to the sequence, with the padding and tags that a link may add.
func (b *builder) add(p []byte) {
	f := b.frame(p)
	if b.chance(8) {
		f = append(f, make([]byte, b.IntN(60))...)
	}
	if b.chance(2) {
		f = append(f, make([]byte, b.IntN(1400))...)
	}
	if b.chance(4) {
		f = append(append(append([]byte{}, f[:12]...), 0x81, 0, byte(b.IntN(256)&0xe0), 0), f[12:]...)
	}
	b.steps = append(b.steps, step{kind: stepFrame, frame: f})
}

// wrapped adds a transport datagram with random IP options, extension headers or fragmentation.
func (b *builder) wrapped(protocol byte, l4 []byte) {
	before, behind := b.chain()
	packets := [][]byte{}
	if b.chance(50) {
		packets = append(packets, b.whole(append(before, behind...), protocol, l4))
	} else {
		packets = b.fragments(before, behind, protocol, l4)
	}
	if b.chance(15) {
		p := packets[b.IntN(len(packets))]
		b.mutate(p)
	}
	for _, p := range packets {
		b.add(p)
	}
}
