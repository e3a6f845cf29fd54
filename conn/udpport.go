// Owner: the loop's thread, once a port is bound to a listener.

package conn

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// udpPort is a socket that receives the datagrams of clients.
type udpPort struct {
	proxy   *worker // of the listener; nil until the port is bound
	fd      int
	local   netip.AddrPort
	binding *binding
}

// UDPBuffer is the receive buffer size, in bytes, that a port requests, so that it can hold
// what arrives while the loop is busy.
const UDPBuffer = 4 << 20

func (p *Proxy) openUDP(e shaper.Endpoint, l *shaper.Listener) (port, error) {
	fd, err := p.takeInherited(e), error(nil)
	if fd >= 0 {
		err = sock.SetUDPOptions(fd, e.Addr.Addr(), UDPBuffer)
	} else {
		fd, err = sock.OpenUDP(e.Addr, intercepts(l, e), l.Instances > 1, UDPBuffer)
	}
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, explainBind(err, "udp://"+e.Addr.String())
	}
	return &udpPort{fd: fd, local: localAddr(fd)}, nil
}

func (u *udpPort) listen() error { return nil } // it receives since it was bound

func (u *udpPort) descriptor() int { return u.fd }

func (u *udpPort) bound() *binding { return u.binding }

func (u *udpPort) bind(b binding) {
	b.counts.MaxFlows.Store(int64(b.config.Load().MaxFlows))
	started := u.binding != nil
	u.binding, u.proxy = &b, b.proxy
	if started {
		return
	}
	if err := u.proxy.loop.watch(u.fd, unix.EPOLLIN, u); err != nil {
		u.proxy.log.Error("watching UDP port failed", "listener", b.name, "port", u.local.Port(), "err", err)
	}
}

// close closes the port and its flows, which cannot send replies any more.
func (u *udpPort) close() {
	if u.proxy == nil {
		unix.Close(u.fd)
		return
	}
	u.proxy.loop.call(func(now leaky.Time) {
		u.proxy.pendingFlows.each(func(w *pendingFlow) {
			if w.udp.key.port == u {
				w.close(now)
			}
		})
		u.proxy.flowList.each(func(f *udpFlow) { // including those just admitted
			if f.key.port == u {
				f.close(now)
			}
		})
		u.proxy.loop.unwatch(u.fd) // systemd may have a duplicate
		unix.Close(u.fd)
	})
}

// pause stops receiving datagrams from clients. Replies go on.
func (u *udpPort) pause() { u.proxy.loop.unwatch(u.fd) }

// ready receives a batch of datagrams. Epoll reports the port again if there are more.
func (u *udpPort) ready(_ uint32, now leaky.Time) {
	l := u.proxy.loop
	n, _ := l.batch.Receive(u.fd)
	l.moderation.received += n
	for i := range n {
		m := l.batch.Message(i)
		if m.Truncated || !m.From.IsValid() {
			u.binding.counts.SendErrors.Add(1)
			continue
		}
		if f := u.flowFor(m, now); f != nil {
			f.receive(m, now)
		}
	}
	l.train.flush()
}

// destination returns the address that m was sent to.
func (u *udpPort) destination(m sock.Message) netip.Addr {
	to := m.To
	if !to.IsValid() {
		to = u.local.Addr()
	}
	return to.Unmap().WithZone("")
}

// flowFor returns the flow of m, which it creates if needed, or nil if there is none, or not
// yet.
func (u *udpPort) flowFor(m sock.Message, now leaky.Time) *udpFlow {
	p, b := u.proxy, u.binding
	key := flowKey{port: u, client: m.From, scope: m.Scope, local: m.To}
	if f := p.flows[key]; f != nil {
		return f
	}
	if w := p.pendingByKey[key]; w != nil {
		w.addDropped(w.buffer(m))
		return nil
	}
	f := &udpFlow{key: key, proxy: p, listener: b.listener, fd: -1, unanswered: true, to: sock.NewReplyAddr(m.From, m.Scope, m.To), broadcast: m.Broadcast, lastActive: now}
	f.started = now
	f.flow = shaper.Flow{
		Source: m.From.Addr().Unmap().WithZone(""), Destination: u.destination(m), Port: u.local.Port(), Protocol: shaper.UDP,
		Connection: p.nextID.Add(1),
	}
	if !f.admit(*b, m, now) {
		return nil
	}
	return f
}
