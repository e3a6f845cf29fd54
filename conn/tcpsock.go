package conn

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// tcpSocket returns a socket that sends small segments at once and detects dead peers. Failures to set
// these options are ignored.
func tcpSocket(a netip.Addr) (int, error) {
	fd, err := socket(a, unix.SOCK_STREAM)
	if err == nil {
		setTCPOptions(fd)
	}
	return fd, err
}

func setTCPOptions(fd int) {
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepAliveSeconds)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, keepAliveSeconds)
}

// keepAliveSeconds is the idle time before the first keep-alive probe, and the interval between
// probes.
const keepAliveSeconds = 15
