package sock

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// ErrSourceAddr is returned if a client's address cannot be used toward a downstream.
var ErrSourceAddr = errors.New("the source address cannot be used toward this downstream: it is not that of another host, in the same family")

// ProbeTransparent returns an error if this process may not open transparent sockets.
func ProbeTransparent(a netip.Addr) error {
	fd, err := newSocket(a, unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return SetTransparent(fd, a, true)
}

// SetTransparent sets or clears IP_TRANSPARENT on a socket of the family of a.
func SetTransparent(fd int, a netip.Addr, on bool) error {
	level, option, value := unix.IPPROTO_IP, unix.IP_TRANSPARENT, 0
	if a.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT
	}
	if on {
		value = 1
	}
	if err := unix.SetsockoptInt(fd, level, option, value); err != nil {
		return fmt.Errorf("transparent needs CAP_NET_RAW or CAP_NET_ADMIN: %w", err)
	}
	return nil
}

// bindSource binds a socket that will connect to to, to the address from of another host. The
// kernel chooses the port: the client's may be in use toward to already, or by a program on this
// host.
func bindSource(fd int, from, to netip.Addr) error {
	usable := from.IsGlobalUnicast() && from != to || from.IsLoopback() && to.IsLoopback()
	if !usable || from.Is4() != to.Is4() {
		return ErrSourceAddr
	}
	if err := SetTransparent(fd, from, true); err != nil {
		return err
	}
	// The port is chosen on connect, so that one port can be used toward several downstreams.
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	return unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0)))
}
