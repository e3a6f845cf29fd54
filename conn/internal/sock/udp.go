package sock

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// OpenUDP returns a socket that receives datagrams at addr, with the options of SetUDPOptions. If others is set, others may be
// bound there, too.
func OpenUDP(addr netip.AddrPort, transparent, others bool, buffer int) (int, error) {
	fd, err := newSocket(addr.Addr(), unix.SOCK_DGRAM)
	if err != nil {
		return -1, err
	}
	err = SetUDPOptions(fd, addr.Addr(), buffer)
	if err == nil && others {
		err = PermitOthers(fd)
	}
	if err == nil {
		err = bind(fd, addr, transparent)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// SetUDPOptions makes a socket report the destination address of each datagram, and sets its receive
// buffer, in bytes.
func SetUDPOptions(fd int, a netip.Addr, buffer int) (err error) {
	if a.Is4() {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
	} else {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
	}
	enableGRO(fd)
	// SO_RCVBUFFORCE exceeds net.core.rmem_max, and takes CAP_NET_ADMIN.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer)
	}
	return err
}

// ConnectUDP returns a socket connected to to. If from is valid the socket has that address of
// another host.
func ConnectUDP(from netip.Addr, to netip.AddrPort) (int, error) {
	fd, err := newSocket(to.Addr(), unix.SOCK_DGRAM)
	if err != nil {
		return -1, err
	}
	if err := Connect(fd, from, to); err != nil {
		unix.Close(fd)
		return -1, err
	}
	enableGRO(fd)
	return fd, nil
}

// enableGRO lets the kernel coalesce received datagrams, and deliver those unsplit that a
// virtual network card has coalesced. On an error they arrive one by one.
func enableGRO(fd int) {
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1)
}

// Batch is the reusable memory of recvmmsg calls.
type Batch struct {
	headers  [batchSize]mmsghdr
	vectors  [batchSize]unix.Iovec
	names    [batchSize]unix.RawSockaddrInet6
	controls [batchSize][controlSize]byte
	data     [batchSize][]byte
	received int // by the last Receive
}

const (
	batchSize   = 32
	maxDatagram = 65536 // one more than the maximum, to detect truncation

	// controlSize has room for an IP_PKTINFO or IPV6_PKTINFO, and a UDP_GRO or UDP_SEGMENT.
	controlSize = unix.SizeofCmsghdr + unix.SizeofInet6Pktinfo + 4 + segmentControl

	segmentControl = unix.SizeofCmsghdr + 8
)

// Message is a datagram, or several of one source that the kernel has coalesced. Its data are
// valid until the next Receive.
type Message struct {
	From      netip.AddrPort
	Scope     uint32     // interface index of a link-local From; netip would need its name
	To        netip.Addr // the local address it was sent to
	Data      []byte
	Size      int // bytes of each datagram except the last, which may be shorter
	Truncated bool
	Broadcast bool // sent to a broadcast or multicast address
}

// Count returns the number of datagrams in m.
func (m *Message) Count() int {
	if m.Size == 0 {
		return 1
	}
	return (len(m.Data) + m.Size - 1) / m.Size
}

// NewBatch returns a batch with buffers.
func NewBatch() *Batch {
	b := new(Batch)
	for i := range b.headers {
		b.data[i] = make([]byte, maxDatagram)
		b.vectors[i].Base = &b.data[i][0]
		b.vectors[i].SetLen(maxDatagram)
		b.headers[i].header = unix.Msghdr{
			Name: (*byte)(unsafe.Pointer(&b.names[i])),
			Iov:  &b.vectors[i],
		}
		b.headers[i].header.SetIovlen(1)
		b.headers[i].header.Control = &b.controls[i][0]
		b.reset(i)
	}
	return b
}

// Receive receives datagrams from fd, and returns how many messages there are. An error pending from an
// ICMP message is returned, and cleared, before any datagrams.
func (b *Batch) Receive(fd int) (int, unix.Errno) {
	for i := range b.received { // the kernel has changed these
		b.reset(i)
	}
	b.received = 0
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd),
		uintptr(unsafe.Pointer(&b.headers[0])), batchSize, unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	b.received = int(n)
	return b.received, 0
}

// reset makes header i state how much room there is.
func (b *Batch) reset(i int) {
	b.headers[i].header.Namelen = unix.SizeofSockaddrInet6
	b.headers[i].header.SetControllen(controlSize)
}

// Message returns message i of the last Receive.
func (b *Batch) Message(i int) Message {
	h := &b.headers[i]
	m := Message{
		Data:      b.data[i][:min(h.len, maxDatagram)],
		Truncated: h.header.Flags&unix.MSG_TRUNC != 0,
	}
	if h.header.Namelen > 0 {
		m.From, m.Scope = fromSockaddr(&b.names[i])
	}
	m.Size = len(m.Data)
	for control := b.controls[i][:h.header.Controllen]; len(control) >= unix.SizeofCmsghdr; {
		c := (*unix.Cmsghdr)(unsafe.Pointer(&control[0]))
		if c.Len < unix.SizeofCmsghdr || uint64(c.Len) > uint64(len(control)) {
			break
		}
		info := control[unix.SizeofCmsghdr:c.Len]
		control = control[min(len(control), unix.CmsgSpace(len(info))):]
		switch {
		case c.Level == unix.IPPROTO_UDP && c.Type == unix.UDP_GRO && len(info) >= 4:
			m.Size = int(binary.NativeEndian.Uint32(info))
		case c.Level == unix.IPPROTO_IP && c.Type == unix.IP_PKTINFO && len(info) >= unix.SizeofInet4Pktinfo:
			m.To = netip.AddrFrom4([4]byte(info[4:8])) // ipi_spec_dst
			m.Broadcast = [4]byte(info[4:8]) != [4]byte(info[8:12])
		case c.Level == unix.IPPROTO_IPV6 && c.Type == unix.IPV6_PKTINFO && len(info) >= unix.SizeofInet6Pktinfo:
			m.To = netip.AddrFrom16([16]byte(info[:16]))
			m.Broadcast = m.To.IsMulticast()
		}
	}
	return m
}

// ReplyAddr is the destination and source address of replies, ready for sendmsg.
type ReplyAddr struct {
	name       unix.RawSockaddrInet6
	nameLen    uint32
	control    [controlSize]byte
	controlLen int
}

// NewReplyAddr returns the addresses of replies to client, whose interface index is scope if it is
// link-local, from the address local if that can be a source address.
func NewReplyAddr(client netip.AddrPort, scope uint32, local netip.Addr) ReplyAddr {
	var r ReplyAddr
	r.nameLen = toSockaddr(client, scope, &r.name)
	c := (*unix.Cmsghdr)(unsafe.Pointer(&r.control[0]))
	info := r.control[unix.SizeofCmsghdr:]
	switch {
	case local.IsMulticast(): // cannot be a source address
	case local.Is4():
		c.Level, c.Type = unix.IPPROTO_IP, unix.IP_PKTINFO
		a := local.As4()
		copy(info[4:8], a[:])
		c.SetLen(unix.CmsgLen(unix.SizeofInet4Pktinfo))
		r.controlLen = unix.CmsgSpace(unix.SizeofInet4Pktinfo)
	case local.Is6():
		c.Level, c.Type = unix.IPPROTO_IPV6, unix.IPV6_PKTINFO
		a := local.As16()
		copy(info[:16], a[:])
		binary.NativeEndian.PutUint32(info[16:], scope)
		c.SetLen(unix.CmsgLen(unix.SizeofInet6Pktinfo))
		r.controlLen = unix.CmsgSpace(unix.SizeofInet6Pktinfo)
	}
	return r
}
