package netns

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// An arrival is one frame that a capture saw.
type arrival struct {
	at       time.Duration // since the capture began, by the kernel's clock
	from, to netip.AddrPort
	payload  int      // bytes behind the TCP or UDP header
	seq      uint32   // TCP
	flags    uint8    // TCP; 0 of UDP
	outgoing bool     // sent by the host that captures
	marked   bool     // CE: it met congestion (RFC 3168)
	head     [16]byte // the first bytes of a UDP payload
}

// TCP header flags.
const (
	flagFIN = 0x01
	flagSYN = 0x02
	flagRST = 0x04
)

const (
	frameSize = 256     // of a ring slot; holds all headers and the first bytes of a payload
	snapSize  = 160     // bytes of a frame that are kept
	blockSize = 1 << 20 // of the ring's memory
)

// A capture records the frames to and from one port at one interface. The kernel
// writes them to a ring that holds them all, and nothing reads before stop: a
// capture costs the machine it measures on no wake-ups.
type capture struct {
	t       testing.TB
	fd      int
	ring    []byte
	began   instant
	stopped bool
}

// instant is one moment on two clocks: frames have the first, pacing the second.
type instant struct{ real, mono time.Duration }

// now reads both clocks again when too much passed between them.
func now() instant {
	for {
		before := clock(unix.CLOCK_MONOTONIC)
		real := clock(unix.CLOCK_REALTIME)
		if mono := clock(unix.CLOCK_MONOTONIC); mono-before < 200*time.Microsecond {
			return instant{real, mono}
		}
	}
}

func clock(id int32) time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		panic(err)
	}
	return time.Duration(ts.Nano())
}

// capture begins to capture at link, with room for so many frames.
func (h *host) capture(t testing.TB, link string, port uint16, frames int) *capture {
	t.Helper()
	index := h.mustLink(t, link).Attrs().Index
	c := &capture{t: t, fd: -1}
	t.Cleanup(c.close)
	var err error
	h.do(func() { c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) })
	if err != nil {
		t.Fatalf("open packet socket in %s: %v", h.name, err)
	}
	size := (frames*frameSize + blockSize - 1) / blockSize * blockSize
	must := func(doing string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s at %s in %s: %v", doing, link, h.name, err)
		}
	}
	must("set ring version", unix.SetsockoptInt(c.fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V2))
	must("set filter", setFilter(c.fd, portFilter(port)))
	// Stamps frames where they enter the host, not where they reach the socket.
	must("ask for timestamps", unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1))
	must("make ring", unix.SetsockoptTpacketReq(c.fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &unix.TpacketReq{
		Block_size: blockSize,
		Block_nr:   uint32(size / blockSize),
		Frame_size: frameSize,
		Frame_nr:   uint32(size / frameSize),
	}))
	c.ring, err = unix.Mmap(c.fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must("map ring", err)
	c.began = now()
	must("bind", unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: bigEndian(unix.ETH_P_ALL), Ifindex: index}))
	return c
}

// elapsed is the time since the capture began, as arrivals have it.
func (c *capture) elapsed() time.Duration { return clock(unix.CLOCK_REALTIME) - c.began.real }

// stop ends the capture and returns what it saw. It fails the test when the
// kernel had to leave out a frame.
func (c *capture) stop() []arrival {
	c.t.Helper()
	defer c.close()
	if err := setFilter(c.fd, []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}); err != nil {
		c.t.Fatalf("stop capture: %v", err)
	}
	end := now()
	stats, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		c.t.Fatalf("read capture statistics: %v", err)
	}
	if stats.Drops != 0 {
		c.t.Fatalf("the capture lost %d of %d frames: its ring is too small", stats.Drops, stats.Packets)
	}
	if step := (end.real - c.began.real) - (end.mono - c.began.mono); step.Abs() > time.Millisecond {
		c.t.Fatalf("the clock of the timestamps was set by %v during the capture", step)
	}
	var list []arrival
	for off := 0; off < len(c.ring); off += frameSize {
		h := (*unix.Tpacket2Hdr)(unsafe.Pointer(&c.ring[off]))
		if h.Status&unix.TP_STATUS_USER == 0 {
			break
		}
		link := (*unix.RawSockaddrLinklayer)(unsafe.Pointer(&c.ring[off+linkOffset]))
		a, ok := parse(c.ring[off+int(h.Net) : off+int(h.Net)+int(h.Snaplen)])
		if !ok {
			c.t.Fatalf("the capture holds a frame that is no TCP or UDP: % x", c.ring[off+int(h.Net):][:h.Snaplen])
		}
		a.at = time.Duration(h.Sec)*time.Second + time.Duration(h.Nsec) - c.began.real
		a.outgoing = link.Pkttype == unix.PACKET_OUTGOING
		list = append(list, a)
	}
	if len(list) != int(stats.Packets) {
		c.t.Fatalf("the capture's ring holds %d frames, its statistics say %d", len(list), stats.Packets)
	}
	return list
}

// linkOffset is where the link-layer address stands in a ring slot.
const linkOffset = (int(unsafe.Sizeof(unix.Tpacket2Hdr{})) + unix.TPACKET_ALIGNMENT - 1) &^ (unix.TPACKET_ALIGNMENT - 1)

func (c *capture) close() {
	if c.stopped {
		return
	}
	c.stopped = true
	if c.ring != nil {
		_ = unix.Munmap(c.ring)
	}
	if c.fd >= 0 {
		_ = unix.Close(c.fd)
	}
}

// parse reads the headers of an IP packet, without IPv6 extension headers.
func parse(p []byte) (a arrival, ok bool) {
	var src, dst netip.Addr
	var proto byte
	var transport []byte
	var length int // of transport header and payload
	switch {
	case len(p) >= 20 && p[0]>>4 == 4:
		header := int(p[0]&0xf) * 4
		if header < 20 || len(p) < header {
			return a, false
		}
		src, dst = netip.AddrFrom4([4]byte(p[12:])), netip.AddrFrom4([4]byte(p[16:]))
		proto, transport = p[9], p[header:]
		a.marked = p[1]&3 == 3
		length = int(binary.BigEndian.Uint16(p[2:])) - header
	case len(p) >= 40 && p[0]>>4 == 6:
		src, dst = netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:]))
		proto, transport = p[6], p[40:]
		a.marked = p[1]>>4&3 == 3
		length = int(binary.BigEndian.Uint16(p[4:]))
	default:
		return a, false
	}
	header := 8
	switch {
	case proto == unix.IPPROTO_TCP && len(transport) >= 20:
		header = int(transport[12]>>4) * 4
		a.seq = binary.BigEndian.Uint32(transport[4:])
		a.flags = transport[13]
	case proto == unix.IPPROTO_UDP && len(transport) >= 8:
		copy(a.head[:], transport[8:])
	default:
		return a, false
	}
	a.from = netip.AddrPortFrom(src, binary.BigEndian.Uint16(transport))
	a.to = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(transport[2:]))
	a.payload = length - header
	return a, a.payload >= 0
}

// portFilter keeps TCP and UDP from and to port, and of fragments the first.
func portFilter(port uint16) []unix.SockFilter {
	const (
		load   = unix.BPF_LD | unix.BPF_ABS
		equals = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		// Where the jumps below lead to.
		v6, accept, reject = 14, 21, 22
	)
	program := make([]unix.SockFilter, 0, reject+1)
	emit := func(code uint16, k uint32) {
		program = append(program, unix.SockFilter{Code: code, K: k})
	}
	jump := func(code uint16, k uint32, yes, no int) {
		// Jumps count from the next instruction; next stands for it.
		rel := func(to int) uint8 {
			if to == next {
				return 0
			}
			return uint8(to - len(program) - 1)
		}
		program = append(program, unix.SockFilter{Code: code, K: k, Jt: rel(yes), Jf: rel(no)})
	}
	emit(load|unix.BPF_B, 0)
	emit(unix.BPF_ALU|unix.BPF_RSH|unix.BPF_K, 4)
	jump(equals, 6, v6, next)
	jump(equals, 4, next, reject)
	emit(load|unix.BPF_B, 9) // IPv4: protocol, fragment offset, ports
	jump(equals, unix.IPPROTO_TCP, 7, next)
	jump(equals, unix.IPPROTO_UDP, next, reject)
	emit(load|unix.BPF_H, 6)
	jump(unix.BPF_JMP|unix.BPF_JSET|unix.BPF_K, 0x1fff, reject, next)
	emit(unix.BPF_LDX|unix.BPF_B|unix.BPF_MSH, 0)
	emit(unix.BPF_LD|unix.BPF_H|unix.BPF_IND, 0)
	jump(equals, uint32(port), accept, next)
	emit(unix.BPF_LD|unix.BPF_H|unix.BPF_IND, 2)
	jump(equals, uint32(port), accept, reject)
	emit(load|unix.BPF_B, 6) // IPv6: protocol, ports
	jump(equals, unix.IPPROTO_TCP, 17, next)
	jump(equals, unix.IPPROTO_UDP, next, reject)
	emit(load|unix.BPF_H, 40)
	jump(equals, uint32(port), accept, next)
	emit(load|unix.BPF_H, 42)
	// The last test falls through to accept or jumps over it.
	jump(equals, uint32(port), next, reject)
	emit(unix.BPF_RET|unix.BPF_K, snapSize)
	emit(unix.BPF_RET|unix.BPF_K, 0)
	return program
}

// next is the jump target that stands for the instruction that follows.
const next = -1

func setFilter(fd int, program []unix.SockFilter) error {
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
}

func bigEndian(n uint16) uint16 { return n<<8 | n>>8 }
