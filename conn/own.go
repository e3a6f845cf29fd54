package conn

import (
	"sync"
	"syscall"

	"shaperd/leaky"
)

// owner is who wants to know of the TCP sockets.
type owner struct {
	sync.RWMutex
	own func(fd int) error // nil when nobody does
}

// Own has own called with every TCP socket: now with those that are there, and from
// now on with those that are to listen or to connect, before they do. nil ends this.
// An error of own is logged, and changes nothing. The calls come from several
// goroutines; once Own has returned, the function of an earlier call gets none.
func (p *Proxy) Own(own func(fd int) error) {
	p.owner.Lock()
	p.owner.own = own
	p.owner.Unlock()
	p.mu.Lock()
	for _, port := range p.ports {
		if t, ok := port.(*tcpPort); ok {
			if c, err := t.ln.SyscallConn(); err == nil {
				_ = p.control("", "", c)
			}
		}
	}
	p.mu.Unlock()
	p.loop.call(func(leaky.Time) {
		p.owner.RLock()
		defer p.owner.RUnlock()
		for s := range p.sessions {
			p.mark(s.client.fd, s.server.fd)
		}
	})
}

// control is what [net.ListenConfig] and [net.Dialer] call with a new socket.
func (p *Proxy) control(_, _ string, c syscall.RawConn) error {
	p.owner.RLock()
	defer p.owner.RUnlock()
	return c.Control(func(fd uintptr) { p.mark(int(fd)) })
}

// mark tells the owner, under its lock, of sockets.
func (p *Proxy) mark(fds ...int) {
	if p.owner.own == nil {
		return
	}
	for _, fd := range fds {
		if err := p.owner.own(fd); err != nil {
			p.refused.note("a connection may count twice", "err", err)
		}
	}
}
