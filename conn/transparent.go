package conn

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"shaperd/shaper"
)

// Sockets of a transparent listener have addresses of other hosts (IP_TRANSPARENT,
// kernel.org/doc/Documentation/networking/tproxy.txt): those that listen have the
// address of a server that sources ask for, and those to a downstream the source's.

// errOtherFamily is why a source cannot show at a downstream.
var errOtherFamily = errors.New("the source cannot show: its address and the downstream's are IPv4 and IPv6")

// setTransparent lets a socket have an address a of another host, or no more. For the
// unspecified address it only finds out whether that is permitted: a wildcard takes what
// is addressed to this host, and nothing that passes it.
func setTransparent(fd int, a netip.Addr, on bool) error {
	level, option := unix.IPPROTO_IP, unix.IP_TRANSPARENT
	if a.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT
	}
	if on {
		err := unix.SetsockoptInt(fd, level, option, 1)
		if err != nil {
			return fmt.Errorf("transparent: CAP_NET_RAW or CAP_NET_ADMIN: %w", err)
		}
		if !a.IsUnspecified() {
			return nil
		}
	}
	return unix.SetsockoptInt(fd, level, option, 0)
}

// bindSource has a socket on its way to to come from from. TCP leaves the port to the
// kernel: the source's may be in use towards to already, or have been just now.
func bindSource(fd int, from netip.AddrPort, to netip.Addr, protocol shaper.Protocol) error {
	if from.Addr().Is4() != to.Is4() {
		return errOtherFamily
	}
	if err := setTransparent(fd, from.Addr(), true); err != nil {
		return err
	}
	if protocol == shaper.UDP {
		err := unix.Bind(fd, sockaddr(from))
		if err != unix.EADDRINUSE {
			return err
		}
	}
	// With the port only when it connects: the same one may go to several downstreams.
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	return unix.Bind(fd, sockaddr(netip.AddrPortFrom(from.Addr(), 0)))
}

// checkLoops refuses a transparent listener whose downstream is the listener itself: an
// address may be both, but not when it is this host's own.
func checkLoops(l Listen) error {
	own, err := net.InterfaceAddrs()
	if err != nil {
		return nil // then nothing can be said
	}
	for _, d := range l.Downstream {
		to, err := netip.ParseAddr(d.Host)
		if err != nil {
			continue
		}
		for _, e := range l.Endpoints {
			if e.Addr.Addr() != to || d.port(e.Addr.Port(), e.SamePort) != e.Addr.Port() {
				continue
			}
			for _, a := range own {
				if n, ok := a.(*net.IPNet); ok && n.IP.Equal(to.AsSlice()) {
					return fmt.Errorf("downstream %v is the listener itself: %v is an address of this host", d, to)
				}
			}
		}
	}
	return nil
}
