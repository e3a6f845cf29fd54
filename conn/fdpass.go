package conn

import (
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/shaper"
)

// Port is an open port of the proxy: its address and its socket.
type Port struct {
	shaper.Endpoint
	FD int // owned by the proxy; valid until the next Apply, Drain or Close
}

// Ports returns the open ports that are to be kept while no daemon has them. Ports of one of several instances are not among
// them: the others serve their sources.
func (p *Proxy) Ports() []Port {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []Port
	for e, l := range p.ports {
		if l.bound().config.Load().Instances <= 1 {
			all = append(all, Port{e, l.descriptor()})
		}
	}
	return all
}

// Inherit passes sockets to p that this process was started with, and returns the ports that
// they are bound to. The next Apply uses them instead of opening those ports, so that nothing
// queued in them is lost, and closes the ones that it does not need.
func (p *Proxy) Inherit(fds []int) (ports []Port) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, fd := range fds {
		e, err := boundEndpoint(fd)
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
		if _, duplicate := p.inherited[e]; err != nil || duplicate {
			p.log.Warn("ignoring inherited file descriptor", "fd", fd, "duplicate", duplicate, "err", err)
			unix.Close(fd)
			continue
		}
		p.inherited[e] = fd
		ports = append(ports, Port{e, fd})
	}
	return ports
}

// takeInherited returns the inherited socket for e, or -1.
func (p *Proxy) takeInherited(e shaper.Endpoint) int {
	fd, ok := p.inherited[e]
	if !ok {
		return -1
	}
	delete(p.inherited, e)
	return fd
}

// closeInherited closes the inherited sockets that no port has taken.
func (p *Proxy) closeInherited() {
	for e, fd := range p.inherited {
		p.log.Warn("closed inherited socket: no listener has its address", "address", e.String())
		unix.Close(fd)
		delete(p.inherited, e)
	}
}

// boundEndpoint returns the protocol and address that a socket is bound to.
func boundEndpoint(fd int) (shaper.Endpoint, error) {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return shaper.Endpoint{}, err
	}
	protocol := shaper.TCP
	if kind == unix.SOCK_DGRAM {
		protocol = shaper.UDP
	}
	addr, err := sock.LocalAddr(fd)
	return shaper.Endpoint{Protocol: protocol, Addr: addr}, err
}
