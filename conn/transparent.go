package conn

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Sockets of a transparent listener have addresses of other hosts (IP_TRANSPARENT,
// kernel.org/doc/Documentation/networking/tproxy.txt): those that listen have the
// address of a server that sources ask for, and those to a downstream the source's.

// errCannotShow is why a source cannot show at a downstream.
var errCannotShow = errors.New("the source's address cannot show there: it is not one of a host beyond this one")

// mayBeTransparent returns an error where this process may not have such sockets.
func mayBeTransparent(a netip.Addr) error {
	fd, err := socket(a, unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return setTransparent(fd, a, true)
}

// setTransparent lets a socket have an address of another host, of the family of a, or no
// more.
func setTransparent(fd int, a netip.Addr, on bool) error {
	level, option, value := unix.IPPROTO_IP, unix.IP_TRANSPARENT, 0
	if a.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT
	}
	if on {
		value = 1
	}
	if err := unix.SetsockoptInt(fd, level, option, value); err != nil {
		return fmt.Errorf("transparent: CAP_NET_RAW or CAP_NET_ADMIN: %w", err)
	}
	return nil
}

// intercepts reports whether the socket of e is transparent, if its listener is. A
// wildcard takes what is addressed to this host, and nothing that passes it.
func (e Endpoint) intercepts(l Listen) bool { return l.Transparent && !e.Addr.Addr().IsUnspecified() }

// bindSource has a socket on its way to to come from from. The kernel chooses the port:
// the source's may be in use towards to already, or by a program of this host.
func bindSource(fd int, from, to netip.Addr) error {
	beyond := from.IsGlobalUnicast() && from != to || from.IsLoopback() && to.IsLoopback()
	if !beyond || from.Is4() != to.Is4() {
		return errCannotShow
	}
	if err := setTransparent(fd, from, true); err != nil {
		return err
	}
	// With the port only when it connects: the same one may go to several downstreams.
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	return unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0)))
}

// reaches reports whether source can show at d, if it is to.
func (d *downstream) reaches(source netip.Addr) bool {
	return !d.site.config.Load().Transparent || source.Is4() == d.host.addr().Is4()
}

// checkTransparent refuses a downstream on this host: it would answer to the source, and
// not to the proxy. Over loopback both may be here, but not the same.
func (l *Listen) checkTransparent() error {
	own, err := net.InterfaceAddrs()
	if err != nil {
		return nil // then nothing can be said
	}
	for _, d := range l.Downstream {
		to, err := netip.ParseAddr(d.Host)
		if err != nil {
			continue
		}
		here := to.IsLoopback()
		for _, a := range own {
			n, ok := a.(*net.IPNet)
			here = here || ok && n.IP.Equal(to.AsSlice())
		}
		for _, e := range l.Endpoints {
			itself := e.Addr.Addr() == to && d.port(e.Addr.Port(), e.SamePort) == e.Addr.Port()
			if here && (itself || !to.IsLoopback() || !e.Addr.Addr().IsLoopback()) {
				return fmt.Errorf("transparent: downstream %v is on this host, and would answer sources past the listener", d)
			}
		}
	}
	return nil
}
