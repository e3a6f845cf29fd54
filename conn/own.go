package conn

import (
	"sync"

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
			p.mark(t.fd)
		}
	}
	p.mu.Unlock()
	p.loop.call(func(leaky.Time) {
		p.sessions.each(func(s *session) {
			p.mark(s.client.fd)
			if s.server.fd >= 0 {
				p.mark(s.server.fd)
			}
		})
	})
}

// mark tells the owner of a socket.
func (p *Proxy) mark(fd int) {
	p.owner.RLock()
	defer p.owner.RUnlock()
	if p.owner.own == nil {
		return
	}
	if err := p.owner.own(fd); err != nil {
		p.refused.note("a connection may count twice", "err", err)
	}
}
