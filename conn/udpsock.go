package conn

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// batch is the reusable memory of recvmmsg and sendmsg calls.
type batch struct {
	headers  [batchSize]mmsghdr
	vectors  [batchSize]unix.Iovec
	names    [batchSize]unix.RawSockaddrInet6
	controls [batchSize][controlSize]byte
	data     [batchSize][]byte

	train  train // the datagrams of the last receive
	single train // a datagram that was queued
}

const (
	batchSize   = 32
	maxDatagram = 65536 // one more than the maximum, to detect truncation

	// controlSize has room for an IP_PKTINFO or IPV6_PKTINFO, and a UDP_GRO or UDP_SEGMENT.
	controlSize = unix.SizeofCmsghdr + unix.SizeofInet6Pktinfo + 4 + segmentControl

	segmentControl = unix.SizeofCmsghdr + 8
)

// mmsghdr is the struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	header unix.Msghdr
	len    uint32
	_      [4]byte
}

// message is a datagram, or several of one source that the kernel has coalesced. Its data are
// valid until the next receive.
type message struct {
	from      netip.AddrPort
	scope     uint32     // interface index of a link-local from; netip would need its name
	to        netip.Addr // the local address it was sent to
	data      []byte
	size      int // bytes of each datagram except the last, which may be shorter
	truncated bool
	broadcast bool // sent to a broadcast or multicast address
}

// count returns the number of datagrams in m.
func (m *message) count() int {
	if m.size == 0 {
		return 1
	}
	return (len(m.data) + m.size - 1) / m.size
}

func newBatch() *batch {
	b := new(batch)
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
	}
	return b
}

// receive receives up to batchSize datagrams from fd. An error pending from an ICMP message is
// returned, and cleared, before any datagrams.
func (b *batch) receive(fd int) (int, unix.Errno) {
	for i := range b.headers {
		b.headers[i].header.Namelen = unix.SizeofSockaddrInet6
		b.headers[i].header.SetControllen(controlSize)
	}
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd),
		uintptr(unsafe.Pointer(&b.headers[0])), batchSize, unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// message returns datagram i of the last receive.
func (b *batch) message(i int) message {
	h := &b.headers[i]
	m := message{
		data:      b.data[i][:min(h.len, maxDatagram)],
		truncated: h.header.Flags&unix.MSG_TRUNC != 0,
	}
	if h.header.Namelen > 0 {
		m.from, m.scope = fromSockaddr(&b.names[i])
	}
	m.size = len(m.data)
	for control := b.controls[i][:h.header.Controllen]; len(control) >= unix.SizeofCmsghdr; {
		c := (*unix.Cmsghdr)(unsafe.Pointer(&control[0]))
		if c.Len < unix.SizeofCmsghdr || c.Len > uint64(len(control)) {
			break
		}
		info := control[unix.SizeofCmsghdr:c.Len]
		control = control[min(len(control), unix.CmsgSpace(len(info))):]
		switch {
		case c.Level == unix.IPPROTO_UDP && c.Type == unix.UDP_GRO && len(info) >= 4:
			m.size = int(binary.NativeEndian.Uint32(info))
		case c.Level == unix.IPPROTO_IP && c.Type == unix.IP_PKTINFO && len(info) >= unix.SizeofInet4Pktinfo:
			m.to = netip.AddrFrom4([4]byte(info[4:8])) // ipi_spec_dst
			m.broadcast = [4]byte(info[4:8]) != [4]byte(info[8:12])
		case c.Level == unix.IPPROTO_IPV6 && c.Type == unix.IPV6_PKTINFO && len(info) >= unix.SizeofInet6Pktinfo:
			m.to = netip.AddrFrom16([16]byte(info[:16]))
			m.broadcast = m.to.IsMulticast()
		}
	}
	return m
}

// replyTo holds the destination and source addresses of replies, ready for sendmsg.
type replyTo struct {
	name       unix.RawSockaddrInet6
	nameLen    uint32
	control    [controlSize]byte
	controlLen int
}

func newReplyTo(m message) replyTo {
	var r replyTo
	r.nameLen = toSockaddr(m.from, m.scope, &r.name)
	c := (*unix.Cmsghdr)(unsafe.Pointer(&r.control[0]))
	info := r.control[unix.SizeofCmsghdr:]
	switch {
	case m.to.IsMulticast(): // cannot be a source address
	case m.to.Is4():
		c.Level, c.Type = unix.IPPROTO_IP, unix.IP_PKTINFO
		a := m.to.As4()
		copy(info[4:8], a[:])
		c.SetLen(unix.CmsgLen(unix.SizeofInet4Pktinfo))
		r.controlLen = unix.CmsgSpace(unix.SizeofInet4Pktinfo)
	case m.to.Is6():
		c.Level, c.Type = unix.IPPROTO_IPV6, unix.IPV6_PKTINFO
		a := m.to.As16()
		copy(info[:16], a[:])
		binary.NativeEndian.PutUint32(info[16:], m.scope)
		c.SetLen(unix.CmsgLen(unix.SizeofInet6Pktinfo))
		r.controlLen = unix.CmsgSpace(unix.SizeofInet6Pktinfo)
	}
	return r
}

// bindUDP opens the socket of a port.
func bindUDP(addr netip.AddrPort, transparent bool) (int, error) {
	fd, err := socket(addr.Addr(), unix.SOCK_DGRAM)
	if err != nil {
		return -1, err
	}
	if addr.Addr().Is6() {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
	}
	if err == nil {
		err = setUDPOptions(fd, addr.Addr())
	}
	if err == nil && transparent {
		err = setTransparent(fd, addr.Addr(), true)
	}
	if err == nil {
		err = unix.Bind(fd, sockaddr(addr))
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// setUDPOptions makes the socket of a port report the destination address of each datagram,
// and sets its buffer.
func setUDPOptions(fd int, a netip.Addr) (err error) {
	if a.Is4() {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
	} else {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
	}
	enableGRO(fd)
	// SO_RCVBUFFORCE exceeds net.core.rmem_max, and takes CAP_NET_ADMIN.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, UDPBuffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, UDPBuffer)
	}
	return err
}

// connectUDP returns a socket connected to to. If from is valid the socket has that address of
// another host.
func connectUDP(from netip.Addr, to netip.AddrPort) (int, error) {
	fd, err := socket(to.Addr(), unix.SOCK_DGRAM)
	if err != nil {
		return -1, err
	}
	if from.IsValid() {
		err = bindSource(fd, from, to.Addr())
	}
	if err == nil {
		err = unix.Connect(fd, sockaddr(to))
	}
	if err != nil {
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

func socket(a netip.Addr, kind int) (int, error) {
	family := unix.AF_INET6
	if a.Is4() {
		family = unix.AF_INET
	}
	return unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// fromSockaddr returns the address in sa, of either family. The port in sa is in network order.
func fromSockaddr(sa *unix.RawSockaddrInet6) (a netip.AddrPort, scope uint32) {
	port := sa.Port>>8 | sa.Port<<8
	switch sa.Family {
	case unix.AF_INET:
		v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(sa))
		return netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), port), 0
	case unix.AF_INET6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), port), sa.Scope_id
	}
	return netip.AddrPort{}, 0
}

func toSockaddr(a netip.AddrPort, scope uint32, sa *unix.RawSockaddrInet6) (size uint32) {
	port := a.Port()>>8 | a.Port()<<8
	if a.Addr().Is4() {
		*(*unix.RawSockaddrInet4)(unsafe.Pointer(sa)) = unix.RawSockaddrInet4{
			Family: unix.AF_INET, Port: port, Addr: a.Addr().As4(),
		}
		return unix.SizeofSockaddrInet4
	}
	*sa = unix.RawSockaddrInet6{
		Family: unix.AF_INET6, Port: port, Addr: a.Addr().As16(), Scope_id: scope,
	}
	return unix.SizeofSockaddrInet6
}
