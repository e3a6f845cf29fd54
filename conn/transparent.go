package conn

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Sockets of a transparent listener have addresses of other hosts (IP_TRANSPARENT,
// kernel.org/doc/Documentation/networking/tproxy.txt): listening sockets have the address of
// the server that clients connect to, and sockets to a downstream have the client's.

// errSourceAddr is returned if a client's address cannot be used toward a downstream.
var errSourceAddr = errors.New("the source address cannot be used toward this downstream: it is not that of another host, in the same family")

// probeTransparent returns an error if this process may not open transparent sockets.
func probeTransparent(a netip.Addr) error {
	fd, err := socket(a, unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return setTransparent(fd, a, true)
}

// setTransparent sets or clears IP_TRANSPARENT on a socket of the family of a.
func setTransparent(fd int, a netip.Addr, on bool) error {
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

// intercepts reports whether the socket of e has to be transparent. Traffic to a wildcard
// address is addressed to this host, so there is nothing to intercept.
func (e Endpoint) intercepts(l Listen) bool { return l.Transparent && !e.Addr.Addr().IsUnspecified() }

// bindSource binds a socket that will connect to to, to the address from of another host. The
// kernel chooses the port: the client's may be in use toward to already, or by a program on this
// host.
func bindSource(fd int, from, to netip.Addr) error {
	usable := from.IsGlobalUnicast() && from != to || from.IsLoopback() && to.IsLoopback()
	if !usable || from.Is4() != to.Is4() {
		return errSourceAddr
	}
	if err := setTransparent(fd, from, true); err != nil {
		return err
	}
	// The port is chosen on connect, so that one port can be used toward several downstreams.
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	return unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0)))
}

// matchesFamily reports whether d has the family of source, which matters only if the listener is
// transparent.
func (d *downstream) matchesFamily(source netip.Addr) bool {
	return !d.listener.config.Load().Transparent || source.Is4() == d.host.addr().Is4()
}

// checkTransparent returns an error if a downstream is on this host: it would reply to the
// source directly, and not to the proxy. Over loopback both may be here, unless they are the same.
func (l *Listen) checkTransparent() error {
	local, err := net.InterfaceAddrs()
	if err != nil {
		return nil // cannot tell
	}
	for _, d := range l.Downstream {
		to, err := netip.ParseAddr(d.Host)
		if err != nil {
			continue
		}
		onThisHost := to.IsLoopback()
		for _, a := range local {
			n, ok := a.(*net.IPNet)
			onThisHost = onThisHost || ok && n.IP.Equal(to.AsSlice())
		}
		for _, e := range l.Endpoints {
			itself := e.Addr.Addr() == to && d.port(e.Addr.Port(), e.SamePort) == e.Addr.Port()
			if onThisHost && (itself || !to.IsLoopback() || !e.Addr.Addr().IsLoopback()) {
				return fmt.Errorf("transparent: downstream %v is on this host, and its replies would bypass the listener", d)
			}
		}
	}
	return nil
}
