// Package sock has the system calls of the proxy plane's sockets: streams and the pipes between them,
// datagrams in batches and segments, transparent sockets, and ICMP errors. Its sockets do not block. It
// knows no connection, flow or policy, and holds no state that goroutines share.
package sock

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// newSocket returns a socket of the family of a.
func newSocket(a netip.Addr, kind int) (int, error) {
	family := unix.AF_INET6
	if a.Is4() {
		family = unix.AF_INET
	}
	return unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
}

// bind binds a socket to addr. An IPv6 address accepts no IPv4 traffic.
func bind(fd int, addr netip.AddrPort, transparent bool) (err error) {
	if addr.Addr().Is6() {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
	}
	if err == nil && transparent {
		err = SetTransparent(fd, addr.Addr(), true)
	}
	if err == nil {
		err = unix.Bind(fd, sockaddr(addr))
	}
	return err
}

// Connect connects a socket to to, from the address from of another host if that is valid. A connection
// of a TCP socket is only started.
func Connect(fd int, from netip.Addr, to netip.AddrPort) error {
	if from.IsValid() {
		if err := bindSource(fd, from, to.Addr()); err != nil {
			return err
		}
	}
	var name unix.RawSockaddrInet6
	size := toSockaddr(to, 0, &name)
	_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&name)), uintptr(size))
	if errno != 0 && errno != unix.EINPROGRESS {
		return errno
	}
	return nil
}

// The calls that each connection makes bypass the Go scheduler. None of them blocks, and the runtime's monitor
// would take the processor of a thread that it sees in one of them, again and again, since that thread is never
// rescheduled.

// Close closes a socket.
func Close(fd int) { _, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

// SetOption sets an option of a socket.
func SetOption(fd, level, option, value int) error {
	v := int32(value)
	return setOption(fd, level, option, unsafe.Pointer(&v), unsafe.Sizeof(v))
}

func setOption(fd, level, option int, value unsafe.Pointer, size uintptr) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), uintptr(value), size, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// PendingError returns the error of a socket that epoll has reported, and clears it.
func PendingError(fd int) error {
	errno, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	return unix.Errno(errno)
}

// LocalAddr returns the address that a socket is bound to.
func LocalAddr(fd int) (netip.AddrPort, error) {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}, err
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)), nil
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port)), nil
	}
	return netip.AddrPort{}, unix.EAFNOSUPPORT
}

// Unmap returns a with an IPv4 address instead of an IPv4-mapped IPv6 address.
func Unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

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

// mmsghdr is the struct mmsghdr of recvmmsg(2) and sendmmsg(2).
type mmsghdr struct {
	header unix.Msghdr
	len    uint32
}
