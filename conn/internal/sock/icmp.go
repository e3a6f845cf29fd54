package sock

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// ICMP sends ICMP errors, through raw sockets.
type ICMP struct {
	fd4, fd6 int // -1 where the host lacks the family
}

// NewICMP opens the sockets. It requires CAP_NET_RAW.
func NewICMP() (*ICMP, error) {
	c := &ICMP{fd4: -1, fd6: -1}
	var err error
	if c.fd4, err = rawSocket(unix.AF_INET, unix.IPPROTO_ICMP); err == nil {
		c.fd6, err = rawSocket(unix.AF_INET6, unix.IPPROTO_ICMPV6)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	// The sockets only send: filter everything on receive.
	const solRaw, icmpFilter = 255, 1
	_ = unix.SetsockoptInt(c.fd4, solRaw, icmpFilter, -1)
	block := unix.ICMPv6Filter{}
	for i := range block.Data {
		block.Data[i] = ^uint32(0)
	}
	_ = unix.SetsockoptICMPv6Filter(c.fd6, unix.IPPROTO_ICMPV6, unix.ICMPV6_FILTER, &block)
	// The messages of a transparent listener come from another host's address.
	_ = unix.SetsockoptInt(c.fd4, unix.IPPROTO_IP, unix.IP_TRANSPARENT, 1)
	_ = unix.SetsockoptInt(c.fd6, unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT, 1)
	return c, nil
}

func rawSocket(family, protocol int) (int, error) {
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
	if err == unix.EAFNOSUPPORT {
		return -1, nil
	}
	return fd, err
}

// Close closes the sockets.
func (c *ICMP) Close() {
	for _, fd := range []int{c.fd4, c.fd6} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// SendPortUnreachable answers a datagram of n bytes, from client to local, with "port unreachable"
// (RFC 792, RFC 4443). scope is the interface index of a link-local client.
func (c *ICMP) SendPortUnreachable(client netip.AddrPort, scope uint32, local netip.AddrPort, n int) {
	fd, m := c.fd4, icmp.Message{Type: ipv4.ICMPTypeDestinationUnreachable, Code: 3}
	if local.Addr().Is6() {
		fd, m = c.fd6, icmp.Message{Type: ipv6.ICMPTypeDestinationUnreachable, Code: 4}
	}
	m.Body = &icmp.DstUnreach{Data: quotedHeaders(client, local, n)}
	b, err := m.Marshal(nil)
	if err != nil || fd < 0 {
		return
	}
	// Addresses of raw sockets have no port.
	to := NewReplyAddr(netip.AddrPortFrom(client.Addr(), 0), scope, local.Addr())
	vector := unix.Iovec{Base: &b[0]}
	vector.SetLen(len(b))
	header := unix.Msghdr{Name: (*byte)(unsafe.Pointer(&to.name)), Namelen: to.nameLen, Iov: &vector, Control: &to.control[0]}
	header.SetIovlen(1)
	header.SetControllen(to.controlLen)
	_, _, _ = unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&header)), unix.MSG_DONTWAIT)
}

// quotedHeaders returns the IP and UDP headers of a datagram of n bytes. An ICMP error quotes
// them, so that the source can find the socket that it is for.
func quotedHeaders(from, to netip.AddrPort, n int) []byte {
	var b []byte
	const udpHeader, hops = 8, 64
	if from.Addr().Is4() {
		b = binary.BigEndian.AppendUint16([]byte{0x45, 0}, uint16(ipv4.HeaderLen+udpHeader+n))
		b = append(b, 0, 0, 0, 0, hops, unix.IPPROTO_UDP, 0, 0)
	} else {
		b = binary.BigEndian.AppendUint16([]byte{0x60, 0, 0, 0}, uint16(udpHeader+n))
		b = append(b, unix.IPPROTO_UDP, hops)
	}
	b = append(append(b, from.Addr().AsSlice()...), to.Addr().AsSlice()...)
	if from.Addr().Is4() {
		binary.BigEndian.PutUint16(b[10:], checksum(b))
	}
	for _, field := range []uint16{from.Port(), to.Port(), uint16(udpHeader + n), 0} {
		b = binary.BigEndian.AppendUint16(b, field)
	}
	return b
}

// checksum returns the Internet checksum (RFC 1071) of an even number of bytes.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	return ^uint16(sum + sum>>16)
}
