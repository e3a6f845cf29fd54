package conn

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

// localAddr returns the address that a socket is bound to.
func localAddr(fd int) netip.AddrPort {
	e, _ := boundEndpoint(fd)
	return unmap(e.Addr)
}

// boundEndpoint returns the protocol and address that a socket is bound to.
func boundEndpoint(fd int) (Endpoint, error) {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return Endpoint{}, err
	}
	protocol := shaper.TCP
	if kind == unix.SOCK_DGRAM {
		protocol = shaper.UDP
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return Endpoint{}, err
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return Endpoint{Protocol: protocol, Addr: netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))}, nil
	case *unix.SockaddrInet6:
		return Endpoint{Protocol: protocol, Addr: netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))}, nil
	}
	return Endpoint{}, unix.EAFNOSUPPORT
}
