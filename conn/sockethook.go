package conn

import (
	"sync"

	"shaperd.dev/shaperd/leaky"
)

// socketHook is the function that OnSocket has registered.
type socketHook struct {
	sync.RWMutex
	// The mutex protects:
	call func(fd int) error // nil while none is registered
}

// OnSocket registers a hook that is called with every TCP socket of the proxy: at once with the
// existing ones, and later with each new one before it listens or connects. nil removes the
// hook. Its errors are logged, and otherwise ignored. It is called from several goroutines;
// once OnSocket has returned, an earlier hook is not called any more.
func (p *Proxy) OnSocket(hook func(fd int) error) {
	p.socketHook.Lock()
	p.socketHook.call = hook
	p.socketHook.Unlock()
	p.mu.Lock()
	for _, port := range p.ports {
		if t, ok := port.(*tcpPort); ok {
			p.tagSocket(t.fd)
		}
	}
	p.mu.Unlock()
	p.eachWorker(func(w *worker, _ leaky.Time) {
		w.sessions.each(func(s *session) {
			p.tagSocket(s.client.fd)
			if s.server.fd >= 0 {
				p.tagSocket(s.server.fd)
			}
		})
	})
}

// tagSocket calls the hook, which tags a socket as the proxy's own.
func (p *Proxy) tagSocket(fd int) {
	p.socketHook.RLock()
	defer p.socketHook.RUnlock()
	if p.socketHook.call == nil {
		return
	}
	if err := p.socketHook.call(fd); err != nil {
		p.trafficLog.warn("tagging proxied socket failed; the packet plane may count it too", "err", err)
	}
}
