package conn

import (
	"fmt"
	"net"
	"net/netip"

	"shaperd.dev/shaperd/conn/internal/sock"
)

// Sockets of a transparent listener have addresses of other hosts (IP_TRANSPARENT,
// kernel.org/doc/Documentation/networking/tproxy.txt): listening sockets have the address of
// the server that clients connect to, and sockets to a downstream have the client's.

// intercepts reports whether the socket of e has to be transparent. Traffic to a wildcard
// address is addressed to this host, so there is nothing to intercept.
func (e Endpoint) intercepts(l Listen) bool { return l.Transparent && !e.Addr.Addr().IsUnspecified() }

// check reports why a transparent listener is not possible.
func (l *Listen) check() error {
	if !l.Transparent {
		return nil
	}
	if err := l.checkTransparent(); err != nil {
		return err
	}
	for _, e := range l.Endpoints {
		if err := sock.ProbeTransparent(e.Addr.Addr()); err != nil {
			return err
		}
	}
	return nil
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
