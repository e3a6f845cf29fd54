package lab

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// An Arrival is one captured TCP or UDP frame.
type Arrival struct {
	At       time.Duration // since the capture began, by the kernel's clock
	From, To netip.AddrPort
	Payload  int      // bytes after the TCP or UDP header
	Seq      uint32   // of TCP
	Flags    uint8    // of TCP; 0 of UDP
	Outgoing bool     // sent by the capturing host
	Marked   bool     // ECN CE mark: the frame met congestion (RFC 3168)
	Head     [16]byte // the first bytes of the payload, fewer behind many TCP options
}

// TCP header flags.
const (
	FIN = 0x01
	SYN = 0x02
	RST = 0x04
	ACK = 0x10
)

const (
	slotSize  = 160     // bytes of the ring per frame, including 80 of metadata
	snapSize  = 80      // bytes captured of a frame: headers and the start of the payload
	blockSize = 1 << 20 // of the ring's memory
	// linkOffset is the offset of the link-layer address in a slot.
	linkOffset = (int(unsafe.Sizeof(unix.Tpacket2Hdr{})) + unix.TPACKET_ALIGNMENT - 1) &^ (unix.TPACKET_ALIGNMENT - 1)
	perBlock   = blockSize / slotSize
)

// A Capture records the frames to and from one port at one interface. The kernel
// timestamps them and writes them to a ring that holds all of them, which is read only at
// the end: a capture causes no wake-ups on the machine under test.
type Capture struct {
	fd    int
	ring  []byte
	began instant
}

// instant is one moment on two clocks: frames are stamped with the first, which may be
// stepped; the second is never stepped.
type instant struct{ real, mono time.Duration }

// now reads both clocks, and retries when too much time passed between the two reads.
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
	_ = unix.ClockGettime(id, &ts) // cannot fail
	return time.Duration(ts.Nano())
}

// A Filter selects the frames that a capture records.
type Filter struct {
	Port     uint16 // source or destination port
	Incoming bool   // only frames that the host receives
}

// Capture starts a capture at an interface, with room for the given number of frames.
func (h *Host) Capture(link string, filter Filter, frames int) (*Capture, error) {
	c := &Capture{fd: -1}
	if err := h.Do(func() error { return c.open(link, filter, frames) }); err != nil {
		c.Close()
		return nil, fmt.Errorf("capture at %s in %s: %w", link, h.Name, err)
	}
	return c, nil
}

func (c *Capture) open(link string, filter Filter, frames int) error {
	var err error
	if c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return fmt.Errorf("open packet socket: %w", err)
	}
	blocks := (frames + perBlock - 1) / perBlock
	if err := errors.Join(
		unix.SetsockoptInt(c.fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V2),
		setFilter(c.fd, filter.program()),
		// Timestamps are taken where frames enter the host, not where they reach the socket.
		unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
	); err != nil {
		return fmt.Errorf("set up packet socket: %w", err)
	}
	if err := unix.SetsockoptTpacketReq(c.fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &unix.TpacketReq{
		Block_size: blockSize, Block_nr: uint32(blocks),
		Frame_size: slotSize, Frame_nr: uint32(blocks * perBlock),
	}); err != nil {
		return fmt.Errorf("make ring of %d frames: %w", frames, err)
	}
	if c.ring, err = unix.Mmap(c.fd, 0, blocks*blockSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return fmt.Errorf("map ring: %w", err)
	}
	req, err := unix.NewIfreq(link)
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(c.fd, unix.SIOCGIFINDEX, req); err != nil {
		return fmt.Errorf("find interface: %w", err)
	}
	c.began = now()
	everything := uint16(unix.ETH_P_ALL)<<8 | uint16(unix.ETH_P_ALL)>>8 // in network order
	return unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: everything, Ifindex: int(req.Uint32())})
}

// At converts t to the time since the capture began, as in [Arrival].
func (c *Capture) At(t time.Time) time.Duration { return time.Duration(t.UnixNano()) - c.began.real }

// Elapsed returns the time since the capture began.
func (c *Capture) Elapsed() time.Duration { return c.At(time.Now()) }

// Finish ends the capture and returns the frames, ordered by time. It fails when the
// kernel dropped a frame or the clock was stepped, because the measurement is worthless
// then.
func (c *Capture) Finish() ([]Arrival, error) {
	defer c.Close()
	if err := setFilter(c.fd, []bpf.Instruction{bpf.RetConstant{}}); err != nil {
		return nil, fmt.Errorf("stop capture: %w", err)
	}
	end := now()
	stats, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return nil, fmt.Errorf("read capture statistics: %w", err)
	}
	if stats.Drops != 0 {
		return nil, fmt.Errorf("the capture lost %d of %d frames: its ring is too small", stats.Drops, stats.Packets)
	}
	if step := (end.real - c.began.real) - (end.mono - c.began.mono); step.Abs() > time.Millisecond {
		return nil, fmt.Errorf("the clock of the timestamps was stepped by %v during the capture", step)
	}
	list := make([]Arrival, stats.Packets)
	for i := range list {
		slot := c.ring[i/perBlock*blockSize+i%perBlock*slotSize:][:slotSize]
		head := (*unix.Tpacket2Hdr)(unsafe.Pointer(&slot[0]))
		if head.Status&unix.TP_STATUS_USER == 0 {
			return nil, fmt.Errorf("the capture's ring holds %d frames, but its statistics report %d", i, len(list))
		}
		a, ok := parse(slot[head.Net:][:head.Snaplen])
		if !ok {
			return nil, fmt.Errorf("the capture holds a frame that is neither TCP nor UDP: % x", slot[head.Net:][:head.Snaplen])
		}
		a.At = time.Duration(head.Sec)*time.Second + time.Duration(head.Nsec) - c.began.real
		a.Outgoing = (*unix.RawSockaddrLinklayer)(unsafe.Pointer(&slot[linkOffset])).Pkttype == unix.PACKET_OUTGOING
		list[i] = a
	}
	// Several processors timestamp frames and write them to the ring.
	slices.SortStableFunc(list, func(a, b Arrival) int { return cmp.Compare(a.At, b.At) })
	return list, nil
}

// Close ends the capture. It may be called more than once.
func (c *Capture) Close() {
	if c.ring != nil {
		_ = unix.Munmap(c.ring)
	}
	if c.fd >= 0 {
		_ = unix.Close(c.fd)
	}
	c.ring, c.fd = nil, -1
}

// parse reads the headers of an IP packet. It does not support IPv6 extension headers.
func parse(p []byte) (a Arrival, ok bool) {
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
		a.Marked = p[1]&3 == 3
		length = int(binary.BigEndian.Uint16(p[2:])) - header
	case len(p) >= 40 && p[0]>>4 == 6:
		src, dst = netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:]))
		proto, transport = p[6], p[40:]
		a.Marked = p[1]>>4&3 == 3
		length = int(binary.BigEndian.Uint16(p[4:]))
	default:
		return a, false
	}
	header := 8
	switch {
	case proto == unix.IPPROTO_TCP && len(transport) >= 20:
		header = int(transport[12]>>4) * 4
		a.Seq = binary.BigEndian.Uint32(transport[4:])
		a.Flags = transport[13]
	case proto == unix.IPPROTO_UDP && len(transport) >= 8:
	default:
		return a, false
	}
	a.From = netip.AddrPortFrom(src, binary.BigEndian.Uint16(transport))
	a.To = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(transport[2:]))
	a.Payload = length - header
	copy(a.Head[:], transport[min(header, len(transport)):])
	return a, a.Payload >= 0
}

// program returns a filter that accepts TCP and UDP from and to the port. Of IPv4
// fragments it accepts the first, which has the ports; of IPv6 fragments none.
func (f Filter) program() []bpf.Instruction {
	const v6, accept, reject = 16, 23, 24 // jump targets
	to := func(at, target int) uint8 { return uint8(target - at - 1) }
	port := uint32(f.Port)
	first := []bpf.Instruction{bpf.LoadConstant{}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipFalse: to(1, reject)}}
	if f.Incoming {
		first[0] = bpf.LoadExtension{Num: bpf.ExtType}
		first[1] = bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.PACKET_OUTGOING, SkipTrue: to(1, reject)}
	}
	return append(first,
		bpf.LoadAbsolute{Off: 0, Size: 1},
		bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 6, SkipTrue: to(4, v6)},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 4, SkipFalse: to(5, reject)},
		bpf.LoadAbsolute{Off: 9, Size: 1}, // IPv4: protocol, fragment offset, ports
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_TCP, SkipTrue: to(7, 9)},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_UDP, SkipFalse: to(8, reject)},
		bpf.LoadAbsolute{Off: 6, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: 0x1fff, SkipTrue: to(10, reject)},
		bpf.LoadMemShift{Off: 0},
		bpf.LoadIndirect{Off: 0, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: port, SkipTrue: to(13, accept)},
		bpf.LoadIndirect{Off: 2, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: port, SkipTrue: to(15, accept), SkipFalse: to(15, reject)},
		bpf.LoadAbsolute{Off: 6, Size: 1}, // IPv6: protocol, ports
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_TCP, SkipTrue: to(17, 19)},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_UDP, SkipFalse: to(18, reject)},
		bpf.LoadAbsolute{Off: 40, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: port, SkipTrue: to(20, accept)},
		bpf.LoadAbsolute{Off: 42, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: port, SkipTrue: to(22, accept), SkipFalse: to(22, reject)},
		bpf.RetConstant{Val: snapSize},
		bpf.RetConstant{},
	)
}

func setFilter(fd int, program []bpf.Instruction) error {
	raw, err := bpf.Assemble(program)
	if err != nil {
		return err
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
}
