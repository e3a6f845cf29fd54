package sock

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// NewTCP returns a socket of the family of a.
func NewTCP(a netip.Addr) (int, error) { return newSocket(a, unix.SOCK_STREAM) }

// keepAliveSeconds is the idle time before the first keep-alive probe, and the interval between
// probes.
const keepAliveSeconds = 15

// SetNoDelay makes a socket send small segments at once. Failures are ignored.
func SetNoDelay(fd int) { _ = SetOption(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) }

// DelayAck makes a socket that will connect acknowledge the peer's SYN with its first bytes, which saves a packet, and the
// peer a wake-up. If they do not follow soon SendAck has to.
func DelayAck(fd int) { _ = SetOption(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 0) }

// SendAck sends an acknowledgement that is delayed.
func SendAck(fd int) { _ = SetOption(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 1) }

// SetKeepAlive makes a socket detect a dead peer. Failures are ignored.
func SetKeepAlive(fd int) {
	_ = SetOption(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepAliveSeconds)
	_ = SetOption(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, keepAliveSeconds)
	_ = SetOption(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
}

// BindTCP binds a socket that will listen. Connections inherit its options. If others is set, others may be bound there, too.
func BindTCP(fd int, addr netip.AddrPort, transparent, others bool) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return err
	}
	if others {
		if err := PermitOthers(fd); err != nil {
			return err
		}
	}
	return bind(fd, addr, transparent)
}

// Accept returns a connection of a listening socket, and the address of its client.
func Accept(fd int) (int, netip.AddrPort, unix.Errno) {
	var name unix.RawSockaddrInet6
	size := uint32(unsafe.Sizeof(name))
	n, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), uintptr(unsafe.Pointer(&name)),
		uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	if errno != 0 {
		return -1, netip.AddrPort{}, errno
	}
	from, _ := fromSockaddr(&name)
	return int(n), Unmap(from), 0
}

// Shutdown sends a FIN after what was sent.
func Shutdown(fd int) { _, _, _ = unix.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), unix.SHUT_WR, 0) }

// ResetOnClose makes close send a reset instead of a FIN.
func ResetOnClose(fd int) {
	linger := unix.Linger{Onoff: 1}
	_ = setOption(fd, unix.SOL_SOCKET, unix.SO_LINGER, unsafe.Pointer(&linger), unsafe.Sizeof(linger))
}

// TCPInfo fills in info, the kernel's state of a connection.
func TCPInfo(fd int, info *unix.TCPInfo) unix.Errno {
	size := uint32(unsafe.Sizeof(*info))
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(info)), uintptr(unsafe.Pointer(&size)), 0)
	return errno
}

// Unacked returns how many bytes that were sent are not acknowledged yet; 0 if it is not a connection any more.
func Unacked(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return 0
	}
	return n
}

// Recv receives bytes of a stream.
func Recv(fd int, b []byte) (int, unix.Errno) { return recvfrom(fd, b, unix.MSG_DONTWAIT) }

// Peek is Recv without consuming the bytes.
func Peek(fd int, b []byte) (int, unix.Errno) {
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

// Send sends bytes of a stream, and returns how many were accepted.
func Send(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// Pieces is the reusable memory of a send in pieces.
type Pieces struct {
	headers [maxPieces]mmsghdr
	vectors [maxPieces]unix.Iovec // of headers
}

const maxPieces = 64

// Send sends b in pieces that a socket sends separately where the kernel paces them: merged, up to
// 64 KiB would leave at once. It returns how many bytes were accepted.
func (p *Pieces) Send(fd int, b []byte, size int) (int, unix.Errno) {
	whole := b
	n := 0
	for ; len(b) > 0 && n < maxPieces; n++ {
		piece := b[:min(size, len(b))]
		b = b[len(piece):]
		p.vectors[n].Base = &piece[0]
		p.vectors[n].SetLen(len(piece))
		p.headers[n].header.Iov = &p.vectors[n]
		p.headers[n].header.SetIovlen(1)
	}
	sent, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&p.headers[0])), uintptr(n),
		unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL|unix.MSG_EOR, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	total := 0
	for i := range int(sent) {
		total += int(p.headers[i].len)
	}
	if last := &p.headers[sent-1]; int(sent) < n && uint64(last.len) == uint64(p.vectors[sent-1].Len) {
		// The error that ended the call is not reported, and may be lost: a reset.
		more, errno := Send(fd, whole[total:][:min(size, len(whole)-total)])
		if errno != 0 && errno != unix.EAGAIN {
			return 0, errno
		}
		total += more
	}
	return total, 0
}
