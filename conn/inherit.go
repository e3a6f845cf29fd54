package conn

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"shaperd/shaper"
)

// Port is an open port: where it listens, and its socket.
type Port struct {
	Protocol shaper.Protocol
	Addr     netip.AddrPort
	FD       int // the proxy's; valid until the next Apply, Drain or Close
}

func (p Port) String() string { return p.Protocol.String() + "://" + p.Addr.String() }

// Ports returns the ports that are open.
func (p *Proxy) Ports() []Port {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []Port
	for e, l := range p.ports {
		all = append(all, Port{e.Protocol, e.Addr, l.descriptor()})
	}
	return all
}

// Inherit gives p sockets that this process was started with, and returns the ports
// they are. A port of Apply that one of them is bound to is not opened anew, and what
// waits in the socket is not lost. The next Apply closes those that it has no use for.
func (p *Proxy) Inherit(fds []int) (ports []Port) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, fd := range fds {
		e, err := endpointOf(fd)
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
		if _, twice := p.inherited[e]; err != nil || twice {
			p.log.Warn("a descriptor that was handed over is of no use", "descriptor", fd, "err", err)
			unix.Close(fd)
			continue
		}
		p.inherited[e] = fd
		ports = append(ports, Port{e.Protocol, e.Addr, fd})
	}
	return ports
}

// endpointOf is what a socket is bound to.
func endpointOf(fd int) (Endpoint, error) {
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

// inheritedSocket returns the socket for e that was inherited, or -1.
func (p *Proxy) inheritedSocket(e Endpoint) int {
	fd, ok := p.inherited[e]
	if !ok {
		return -1
	}
	delete(p.inherited, e)
	return fd
}

// closeInherited closes what no port took.
func (p *Proxy) closeInherited() {
	for e, fd := range p.inherited {
		p.log.Warn("no listener has the address of a socket that was handed over", "address", e.Protocol.String()+"://"+e.Addr.String())
		unix.Close(fd)
		delete(p.inherited, e)
	}
}
