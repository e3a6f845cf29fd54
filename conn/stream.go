package conn

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// accept returns a connection of a listening socket, and the address of its client.
func accept(fd int) (int, netip.AddrPort, unix.Errno) {
	var name unix.RawSockaddrInet6
	size := uint32(unsafe.Sizeof(name))
	n, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), uintptr(unsafe.Pointer(&name)),
		uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	if errno != 0 {
		return -1, netip.AddrPort{}, errno
	}
	from, _ := fromSockaddr(&name)
	return int(n), unmap(from), 0
}

func recv(fd int, b []byte) (int, unix.Errno) { return recvfrom(fd, b, unix.MSG_DONTWAIT) }

// peek is recv without consuming the bytes.
func peek(fd int, b []byte) (int, unix.Errno) {
	return recvfrom(fd, b, unix.MSG_DONTWAIT|unix.MSG_PEEK)
}

func recvfrom(fd int, b []byte, flags uintptr) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), flags, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

func send(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

func splice(from, to, n int) (int, unix.Errno) {
	moved, _, errno := unix.RawSyscall6(unix.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(n),
		unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
	if errno != 0 {
		return 0, errno
	}
	return int(moved), 0
}
