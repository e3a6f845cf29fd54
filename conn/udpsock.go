package conn

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// batch is the memory of recvmmsg and sendmsg calls, used again for each.
type batch struct {
	headers  [batchSize]mmsghdr
	vectors  [batchSize]unix.Iovec
	names    [batchSize]unix.RawSockaddrInet6
	controls [batchSize][controlSize]byte
	data     [batchSize][]byte

	train train // of what has just been received
	one   train // of what was queued
}

const (
	batchSize   = 32
	maxDatagram = 65536 // one more than there can be, to see a truncation

	// controlSize holds one IP_PKTINFO or IPV6_PKTINFO, and a UDP_GRO or UDP_SEGMENT.
	controlSize = unix.SizeofCmsghdr + unix.SizeofInet6Pktinfo + 4 + segmentControl

	segmentControl = unix.SizeofCmsghdr + 8
)

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	header unix.Msghdr
	len    uint32
	_      [4]byte
}

// message is what was received from one source: a datagram, or several that the
// kernel has joined. Its data are valid until the next receive.
type message struct {
	from      netip.AddrPort
	scope     uint32     // interface of a link-local from; netip would want its name
	to        netip.Addr // the local address it was sent to
	data      []byte
	size      int // of each datagram but the last, which may be shorter
	truncated bool
	many      bool // it was not sent to one host alone
}

// count is how many datagrams m is.
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

// receive takes in what fd has, up to batchSize datagrams. An error it has
// pending, of an ICMP message, comes instead of datagrams, and is gone then.
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
			m.many = [4]byte(info[4:8]) != [4]byte(info[8:12])
		case c.Level == unix.IPPROTO_IPV6 && c.Type == unix.IPV6_PKTINFO && len(info) >= unix.SizeofInet6Pktinfo:
			m.to = netip.AddrFrom16([16]byte(info[:16]))
			m.many = m.to.IsMulticast()
		}
	}
	return m
}

// replyTo is where replies go and what they come from, ready for sendmsg.
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
	case m.to.IsMulticast(): // nothing is sent from there
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

// setUDPOptions has the socket of a port tell the address each datagram was sent to.
func setUDPOptions(fd int, a netip.Addr) (err error) {
	if a.Is4() {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
	} else {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
	}
	joinDatagrams(fd)
	// Forced past the system's limit where that is allowed; else what it allows.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, UDPBuffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, UDPBuffer)
	}
	return err
}

// connectUDP returns a socket to to, from another host's address where from is one.
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
	joinDatagrams(fd)
	return fd, nil
}

// joinDatagrams has the kernel join what it can on the way in, and not split what came
// joined from a virtual card. An error leaves them apart.
func joinDatagrams(fd int) {
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

// fromSockaddr reads an address of either family. The port is in network order.
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
