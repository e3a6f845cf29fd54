package conn

import (
	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// udpPort is a socket that datagrams of clients arrive at. It belongs to the
// loop's thread once it serves.
type udpPort struct {
	proxy   *Proxy
	fd      int
	port    uint16
	service *service
}

// UDPBuffer, in bytes, is asked for as the receive buffer of a port, so that it
// holds what arrives while the loop is busy elsewhere.
const UDPBuffer = 4 << 20

func (p *Proxy) openUDP(e Endpoint, transparent bool) (port, error) {
	fd, err := p.inheritedSocket(e), error(nil)
	if fd >= 0 {
		err = setUDPOptions(fd, e.Addr.Addr())
	} else {
		fd, err = bindUDP(e.Addr, transparent)
	}
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, explainBind(err, "udp://"+e.Addr.String())
	}
	return &udpPort{proxy: p, fd: fd, port: localAddr(fd).Port()}, nil
}

func (u *udpPort) descriptor() int { return u.fd }

func (u *udpPort) serves() *service { return u.service }

func (u *udpPort) serve(s service) {
	s.counts.MaxFlows.Store(int64(s.config.Load().MaxFlows))
	started := u.service != nil
	u.service = &s
	if started {
		return
	}
	if err := u.proxy.loop.watch(u.fd, unix.EPOLLIN, u); err != nil {
		u.proxy.log.Error("watch UDP port", "listener", s.name, "port", u.port, "err", err)
	}
}

// close ends the port and its flows, which have nothing to reply from any more.
func (u *udpPort) close() {
	u.proxy.loop.call(func(now leaky.Time) {
		u.proxy.arrivals.each(func(w *arrival) {
			if w.f.key.port == u {
				w.close(now)
			}
		})
		u.proxy.flowList.each(func(f *udpFlow) { // with those that were let in just now
			if f.key.port == u {
				f.close(now)
			}
		})
		u.proxy.loop.forget(u.fd) // systemd may have a duplicate
		unix.Close(u.fd)
	})
}

// pause has datagrams left where they are; replies go on.
func (u *udpPort) pause() { u.proxy.loop.forget(u.fd) }

// ready takes in a batch of datagrams; epoll reports the port again when there
// are more.
func (u *udpPort) ready(_ uint32, now leaky.Time) {
	l := u.proxy.loop
	n, _ := l.batch.receive(u.fd)
	for i := range n {
		m := l.batch.message(i)
		if m.truncated || !m.from.IsValid() {
			u.service.counts.SendErrors.Add(1)
			continue
		}
		if f := u.flow(m, now); f != nil {
			f.hear(m, now)
		}
	}
	l.batch.train.leave()
}

// hear sends on what the source of f sent.
func (f *udpFlow) hear(m message, now leaky.Time) {
	if f.mute && !f.regular && f.asked > 0 {
		f.goesOn(now)
	}
	f.asked += charged(m.data)
	f.touch(now)
	if !f.known && f.told > 0 {
		f.known = true
		f.file(now)
	}
	f.forward(m, false, now)
}

// flow returns the flow of m, made if need be, or nil when it cannot be had.
func (u *udpPort) flow(m message, now leaky.Time) *udpFlow {
	p, s := u.proxy, u.service
	key := flowKey{port: u, client: m.from, scope: m.scope, asked: m.to}
	if f := p.flows[key]; f != nil {
		return f
	}
	if w := p.arriving[key]; w != nil {
		w.lose(w.keep(m))
		return nil
	}
	f := &udpFlow{key: key, proxy: p, site: s.site, fd: -1, mute: true, to: newReplyTo(m), many: m.many, seen: now}
	f.begun = now
	f.flow = shaper.Flow{
		Source: m.from.Addr().Unmap().WithZone(""), Port: u.port, Protocol: shaper.UDP,
		Connection: p.nextID.Add(1),
	}
	if !f.admit(*s, m, now) {
		return nil
	}
	return f
}
