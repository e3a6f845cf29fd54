package conn

import (
	"fmt"
	"net"
	"net/netip"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/shaper"
)

// Sockets of a transparent listener have addresses of other hosts (IP_TRANSPARENT,
// kernel.org/doc/Documentation/networking/tproxy.txt): listening sockets have the address of
// the server that clients connect to, and sockets to a downstream have the client's.

// intercepts reports whether the socket of e, of l, has to be transparent. Traffic to a wildcard
// address is addressed to this host, so there is nothing to intercept.
func intercepts(l *shaper.Listener, e shaper.Endpoint) bool {
	return l.Transparent && !e.Addr.Addr().IsUnspecified()
}

// checkTransparent reports why l is not possible if it is transparent.
func checkTransparent(l *shaper.Listener) error {
	if !l.Transparent {
		return nil
	}
	if err := checkRemote(l); err != nil {
		return err
	}
	for _, a := range l.Addresses {
		if err := sock.ProbeTransparent(a.Addr); err != nil {
			return err
		}
	}
	return nil
}

// checkRemote returns an error if a downstream is on this host: it would reply to the
// source directly, and not to the proxy. Over loopback both may be here, unless they are the same.
func checkRemote(l *shaper.Listener) error {
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
		for _, a := range l.Addresses {
			itself := a.Addr == to && d.PortFor(a.Ports.First, !a.Single()) == a.Ports.First
			if onThisHost && (itself || !to.IsLoopback() || !a.Addr.IsLoopback()) {
				return fmt.Errorf("transparent: downstream %s is on this host, and its replies would bypass the listener", d.Name())
			}
		}
	}
	return nil
}
