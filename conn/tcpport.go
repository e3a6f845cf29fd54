// Owner: the loop's thread, once a port is bound to a listener.

package conn

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// tcpPort is a listening socket.
type tcpPort struct {
	proxy       *worker // of the listener; nil until the port is bound
	fd          int
	local       netip.AddrPort
	binding     *binding
	batch       int         // how many connections the last round accepted at most, see ready
	round       uint64      // that round
	resumeTimer pacer.Event // ends a pause
}

const (
	// Backlog is how many connections may wait in the kernel to be accepted. The system has its own
	// maximum, net.core.somaxconn.
	Backlog = 4096

	// maxAcceptBatch is how many connections a port accepts before other sockets, and departures, have
	// their turn.
	maxAcceptBatch = 8
)

func (p *Proxy) openTCP(e shaper.Endpoint, l *shaper.Listener) (port, error) {
	fd, err := p.takeInherited(e), error(nil)
	inherited := fd >= 0
	if !inherited {
		fd, err = sock.NewTCP(e.Addr.Addr())
	}
	if err == nil {
		sock.SetNoDelay(fd) // its connections inherit all this
		sock.SetKeepAlive(fd)
		p.tagSocket(fd)
		if !inherited {
			err = sock.BindTCP(fd, e.Addr, intercepts(l, e), l.Instances > 1)
		}
	}
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, explainBind(err, "tcp://"+e.Addr.String())
	}
	t := &tcpPort{fd: fd, local: localAddr(fd)}
	t.resumeTimer.Fire = func(leaky.Time) { t.proxy.loop.setEvents(t.fd, unix.EPOLLIN) }
	return t, nil
}

func (t *tcpPort) listen() error {
	if err := unix.Listen(t.fd, Backlog); err != nil { // an inherited socket may listen already
		return explainBind(err, "tcp://"+t.local.String())
	}
	return nil
}

func (t *tcpPort) descriptor() int { return t.fd }

func (t *tcpPort) bound() *binding { return t.binding }

func (t *tcpPort) bind(b binding) {
	started := t.binding != nil
	t.binding, t.proxy = &b, b.proxy
	if started {
		return
	}
	if err := t.proxy.loop.watch(t.fd, unix.EPOLLIN, t); err != nil {
		t.proxy.log.Error("watching TCP port failed", "listener", b.name, "port", t.local.Port(), "err", err)
	}
}

// close closes the port. Connections that it has not accepted yet are reset.
func (t *tcpPort) close() {
	if t.proxy == nil {
		unix.Close(t.fd)
		return
	}
	t.proxy.loop.call(func(leaky.Time) {
		t.proxy.loop.pacer.Cancel(&t.resumeTimer)
		t.proxy.loop.unwatch(t.fd) // systemd may have a duplicate
		unix.Close(t.fd)
	})
}

// ready accepts connections. Epoll reports the port again if there are more, and only then the batch grows: with few
// connections at a time there is no call that finds none.
func (t *tcpPort) ready(_ uint32, now leaky.Time) {
	if t.proxy.loop.overloaded(acceptWatermark) {
		t.pauseAccepting("low on descriptors or memory", now)
		return
	}
	if l := t.proxy.loop; t.round+1 == l.rounds {
		t.batch, t.round = min(2*t.batch, maxAcceptBatch), l.rounds
	} else {
		t.batch, t.round = 1, l.rounds
	}
	for range t.batch {
		fd, from, errno := sock.Accept(t.fd)
		switch errno {
		case 0:
			t.proxy.startSession(t, fd, from, now)
		case unix.EAGAIN:
			return
		case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM:
			t.pauseAccepting(errno.Error(), now)
			return
		default: // the connection has already ended
		}
	}
}

// pauseAccepting leaves connections in the kernel's queue for a while.
func (t *tcpPort) pauseAccepting(why string, now leaky.Time) {
	t.proxy.trafficLog.warn("accepting paused", "listener", t.binding.name, "reason", why)
	t.proxy.loop.setEvents(t.fd, 0)
	t.proxy.loop.pacer.Schedule(&t.resumeTimer, now+acceptPause)
}

// destination returns the address that an accepted connection is to.
func (t *tcpPort) destination(fd int) netip.Addr {
	if t.local.Addr().IsUnspecified() {
		return localAddr(fd).Addr().WithZone("")
	}
	return t.local.Addr().WithZone("")
}

// startSession starts the session of an accepted connection.
func (p *worker) startSession(t *tcpPort, fd int, from netip.AddrPort, now leaky.Time) {
	b := t.binding
	b.counts.Accepted.Add(1)
	s := &session{proxy: p, binding: b, port: t, clientAddr: from, stage: stageArrived}
	s.admission, s.owner, s.listen, s.started = p.admission, s, b.name, now
	s.flow = shaper.Flow{Source: from.Addr(), Destination: t.destination(fd), Port: t.local.Port(), Protocol: shaper.TCP, Connection: p.nextID.Add(1)}
	s.client = endpoint{session: s, fd: fd}
	s.server = endpoint{session: s, fd: -1}
	if err := p.loop.watch(fd, endpointEvents, &s.client); err != nil {
		p.trafficLog.warn("watching connection failed", "listener", b.name, "err", err)
		unix.Close(fd)
		return
	}
	p.tagSocket(fd) // its listener may have had no tag when it arrived
	p.sessions.add(s, s.flow.Connection)
	p.scheduleAckCheck(now)
	p.scheduleStats(now)
	p.openConns.Add(1)
}

// begin begins with s at the first event of its client, which tells whether that has sent something already.
func (s *session) begin(now leaky.Time) {
	for _, prefix := range s.config.Load().AcceptProxyFrom {
		if prefix.Contains(s.clientAddr.Addr()) {
			s.stage = stageHeader
			due := now + headerTimeout
			s.timer.Fire = func(now leaky.Time) {
				if !s.proxy.loop.unheard(&s.timer, due) {
					s.rejectHeader(now)
				}
			}
			s.proxy.loop.pacer.Schedule(&s.timer, due)
			return
		}
	}
	s.stage = stageWaiting
	s.admission.acquire(&s.waiter, now)
}
