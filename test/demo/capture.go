package main

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// An arrival is one TCP or UDP packet at the downstream's interface.
type arrival struct {
	at       time.Duration  // since the capture began, by the kernel's clock
	peer     netip.AddrPort // the other side
	tcp      bool
	flags    uint8 // TCP's
	payload  int   // bytes behind the TCP or UDP header
	first    byte  // of the payload
	outgoing bool  // sent by the downstream
}

// TCP header flags.
const (
	flagFIN = 0x01
	flagSYN = 0x02
	flagRST = 0x04
	flagACK = 0x10
)

const (
	frameSize  = 256     // of a ring slot: all headers and the first bytes of a payload
	blockSize  = 1 << 20 // of the ring's memory
	ringSize   = 16 << 20
	drainEvery = 20 * time.Millisecond
	// linkOffset is where the link-layer address stands in a ring slot.
	linkOffset = (int(unsafe.Sizeof(unix.Tpacket2Hdr{})) + unix.TPACKET_ALIGNMENT - 1) &^ (unix.TPACKET_ALIGNMENT - 1)
)

// A capture records what passes an interface. The kernel stamps each frame and
// writes it to a ring; a goroutine empties the ring now and then, which costs the
// machine few wake-ups.
type capture struct {
	fd      int
	ring    []byte
	began   time.Duration // by the clock of the timestamps
	payload atomic.Int64  // bytes that came in so far
	stop    chan struct{}
	done    chan struct{}
	list    []arrival // of the goroutine, until done
}

func newCapture(h *host, link string) (*capture, error) {
	c := &capture{fd: -1, stop: make(chan struct{}), done: make(chan struct{})}
	if err := h.do(func() error { return c.open(link) }); err != nil {
		c.close()
		return nil, fmt.Errorf("capture at %s in %s: %w", link, h.name, err)
	}
	go c.run()
	return c, nil
}

func (c *capture) open(link string) error {
	var err error
	if c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return fmt.Errorf("open packet socket: %w", err)
	}
	if err := unix.SetsockoptInt(c.fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V2); err != nil {
		return fmt.Errorf("set ring version: %w", err)
	}
	// Stamps a frame where it enters the host, not where it reaches the socket.
	if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1); err != nil {
		return fmt.Errorf("ask for timestamps: %w", err)
	}
	err = unix.SetsockoptTpacketReq(c.fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &unix.TpacketReq{
		Block_size: blockSize, Block_nr: ringSize / blockSize,
		Frame_size: frameSize, Frame_nr: ringSize / frameSize,
	})
	if err != nil {
		return fmt.Errorf("make ring: %w", err)
	}
	if c.ring, err = unix.Mmap(c.fd, 0, ringSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map ring: %w", err)
	}
	index, err := unixIfIndex(c.fd, link)
	if err != nil {
		return err
	}
	c.began = wallClock()
	everything := uint16(unix.ETH_P_ALL)<<8 | uint16(unix.ETH_P_ALL)>>8 // in network order
	return unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: everything, Ifindex: index})
}

func unixIfIndex(fd int, link string) (int, error) {
	req, err := unix.NewIfreq(link)
	if err != nil {
		return 0, err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, req); err != nil {
		return 0, fmt.Errorf("find interface: %w", err)
	}
	return int(req.Uint32()), nil
}

// wallClock is the time of day, the clock that packets are stamped with.
func wallClock() time.Duration { return time.Duration(time.Now().UnixNano()) }

// elapsed is the time since the capture began, as arrivals have it.
func (c *capture) elapsed() time.Duration { return wallClock() - c.began }

func (c *capture) run() {
	defer close(c.done)
	slot := 0
	for {
		ended := false
		select {
		case <-c.stop:
			ended = true
		case <-time.After(drainEvery):
		}
		for c.take(slot) {
			slot = (slot + 1) % (ringSize / frameSize)
		}
		if ended {
			return
		}
	}
}

// take moves one frame from its slot to the list. It is false when the slot is
// still empty.
func (c *capture) take(slot int) bool {
	at := slot * frameSize
	head := (*unix.Tpacket2Hdr)(unsafe.Pointer(&c.ring[at]))
	if atomic.LoadUint32(&head.Status)&unix.TP_STATUS_USER == 0 {
		return false
	}
	from := (*unix.RawSockaddrLinklayer)(unsafe.Pointer(&c.ring[at+linkOffset]))
	packet := c.ring[at+int(head.Net) : at+frameSize]
	a, ok := parse(packet[:min(int(head.Snaplen), len(packet))], from.Pkttype == unix.PACKET_OUTGOING)
	if ok {
		a.at = time.Duration(head.Sec)*time.Second + time.Duration(head.Nsec) - c.began
		c.list = append(c.list, a)
		if !a.outgoing {
			c.payload.Add(int64(a.payload))
		}
	}
	atomic.StoreUint32(&head.Status, unix.TP_STATUS_KERNEL)
	return true
}

// finish ends the capture and returns what it saw. It is an error when the kernel
// had to leave out a frame: the measurement would be incomplete.
func (c *capture) finish() ([]arrival, error) {
	close(c.stop)
	<-c.done
	defer c.close()
	stats, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return nil, fmt.Errorf("read capture statistics: %w", err)
	}
	if stats.Drops != 0 {
		return nil, fmt.Errorf("the capture missed %d of %d packets: the machine is too busy", stats.Drops, stats.Packets)
	}
	return c.list, nil
}

func (c *capture) close() {
	if c.ring != nil {
		_ = unix.Munmap(c.ring)
	}
	if c.fd >= 0 {
		_ = unix.Close(c.fd)
	}
}

// parse reads the headers of an IPv4 packet. It is false for anything else than
// TCP and UDP.
func parse(p []byte, outgoing bool) (a arrival, ok bool) {
	if len(p) < 20 || p[0]>>4 != 4 {
		return a, false
	}
	header := int(p[0]&0xf) * 4
	if header < 20 || len(p) < header+8 {
		return a, false
	}
	transport := p[header:]
	size := 8 // of the transport header
	switch p[9] {
	case unix.IPPROTO_TCP:
		if len(transport) < 20 {
			return a, false
		}
		a.tcp, a.flags, size = true, transport[13], int(transport[12]>>4)*4
	case unix.IPPROTO_UDP:
	default:
		return a, false
	}
	a.payload = int(binary.BigEndian.Uint16(p[2:])) - header - size
	if a.payload > 0 && len(transport) > size {
		a.first = transport[size]
	}
	a.outgoing = outgoing
	addr, portAt := p[12:16], transport[0:2]
	if outgoing {
		addr, portAt = p[16:20], transport[2:4]
	}
	a.peer = netip.AddrPortFrom(netip.AddrFrom4([4]byte(addr)), binary.BigEndian.Uint16(portAt))
	return a, a.payload >= 0
}
