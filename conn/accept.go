package conn

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// tcpPort is a listening socket. It belongs to the loop's thread once it is bound to a listener.
type tcpPort struct {
	proxy       *Proxy
	fd          int
	port        uint16
	binding     *binding
	resumeTimer pacer.Event // ends a pause
}

const (
	// Backlog is how many connections may wait in the kernel to be accepted. The system has its own
	// maximum, net.core.somaxconn.
	Backlog = 4096

	// acceptBatch is how many connections a port accepts before other sockets, and departures, have
	// their turn.
	acceptBatch = 8
)

func (p *Proxy) openTCP(e Endpoint, transparent bool) (port, error) {
	fd, err := p.takeInherited(e), error(nil)
	if fd >= 0 {
		p.tagSocket(fd)
		setTCPOptions(fd)
		err = unix.Listen(fd, Backlog) // an inherited socket may listen already
	} else {
		fd, err = p.listenTCP(e.Addr, transparent)
	}
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, explainBind(err, "tcp://"+e.Addr.String())
	}
	t := &tcpPort{proxy: p, fd: fd, port: localAddr(fd).Port()}
	t.resumeTimer.Fire = func(leaky.Time) { p.loop.setEvents(t.fd, unix.EPOLLIN) }
	return t, nil
}

// listenTCP returns a listening socket. Connections inherit its options.
func (p *Proxy) listenTCP(addr netip.AddrPort, transparent bool) (int, error) {
	fd, err := tcpSocket(addr.Addr())
	if err != nil {
		return -1, err
	}
	p.tagSocket(fd)
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err == nil && addr.Addr().Is6() {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
	}
	if err == nil && transparent {
		err = setTransparent(fd, addr.Addr(), true)
	}
	if err == nil {
		err = unix.Bind(fd, sockaddr(addr))
	}
	if err == nil {
		err = unix.Listen(fd, Backlog)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// tcpSocket returns a socket that sends small segments at once and detects dead peers. Failures to set
// these options are ignored.
func tcpSocket(a netip.Addr) (int, error) {
	fd, err := socket(a, unix.SOCK_STREAM)
	if err == nil {
		setTCPOptions(fd)
	}
	return fd, err
}

func setTCPOptions(fd int) {
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepAliveSeconds)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, keepAliveSeconds)
}

func (t *tcpPort) descriptor() int { return t.fd }

// keepAliveSeconds is the idle time before the first keep-alive probe, and the interval between
// probes.
const keepAliveSeconds = 15

var errInUse = errors.New("address already in use")

// explainBind adds a hint to the usual errors of binding a port.
func explainBind(err error, endpoint string) error {
	var errno unix.Errno
	switch errors.As(err, &errno); errno {
	case unix.EADDRINUSE:
		return fmt.Errorf("listen on %s: %w; \"ss -lntup\" shows by which process", endpoint, errInUse)
	case unix.EACCES:
		return fmt.Errorf("listen on %s: not permitted; a port below 1024 needs CAP_NET_BIND_SERVICE", endpoint)
	case unix.EADDRNOTAVAIL:
		return fmt.Errorf("listen on %s: this host does not have the address", endpoint)
	}
	return fmt.Errorf("listen on %s: %w", endpoint, err)
}

func (t *tcpPort) bound() *binding { return t.binding }

func (t *tcpPort) bind(b binding) {
	started := t.binding != nil
	t.binding = &b
	if started {
		return
	}
	if err := t.proxy.loop.watch(t.fd, unix.EPOLLIN, t); err != nil {
		t.proxy.log.Error("watching TCP port failed", "listener", b.name, "port", t.port, "err", err)
	}
}

// close closes the port. Connections that it has not accepted yet are reset.
func (t *tcpPort) close() {
	t.proxy.loop.call(func(leaky.Time) {
		t.proxy.loop.pacer.Cancel(&t.resumeTimer)
		t.proxy.loop.unwatch(t.fd) // systemd may have a duplicate
		unix.Close(t.fd)
	})
}

// ready accepts connections. Epoll reports the port again if there are more.
func (t *tcpPort) ready(_ uint32, now leaky.Time) {
	if t.proxy.loop.overloaded(acceptWatermark) {
		t.pauseAccepting("low on descriptors or memory", now)
		return
	}
	for range acceptBatch {
		fd, from, errno := accept(t.fd)
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

// startSession starts the session of an accepted connection.
func (p *Proxy) startSession(t *tcpPort, fd int, from netip.AddrPort, now leaky.Time) {
	b := t.binding
	b.counts.Accepted.Add(1)
	s := &session{proxy: p, binding: b, port: t, clientAddr: from}
	s.admission, s.owner, s.listen, s.started = p.admission, s, b.name, now
	s.flow = shaper.Flow{Source: from.Addr(), Port: t.port, Protocol: shaper.TCP, Connection: p.nextID.Add(1)}
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
	p.openConns.Add(1)
	for _, prefix := range b.config.Load().AcceptProxyFrom {
		if prefix.Contains(from.Addr()) {
			s.stage = stageHeader
			s.timer.Fire = s.rejectHeader
			p.loop.pacer.Schedule(&s.timer, now+headerTimeout)
			return
		}
	}
	p.admission.acquire(&s.waiter, now)
}

// admitted is called when the last gate was passed.
func (s *session) admitted(now leaky.Time) {
	s.stage = stageDialing
	if s.proxy.loop.overloaded(shedWatermark) {
		s.proxy.trafficLog.warn("connection shed", "listener", s.name, "source", s.flow.Source)
		s.abort(shaper.Overload, now)
		return
	}
	s.timer.Fire = func(now leaky.Time) { s.redial(unix.ETIMEDOUT, now) }
	s.dial(now)
}

// dial connects to a downstream, and to the next one if that fails. If the next one is full, the
// session waits again, without slots.
func (s *session) dial(now leaky.Time) {
	config := s.config.Load()
	for {
		if s.downstream == nil {
			d, full := s.pick(s.target(), s.failedDownstreams, now)
			switch {
			case full:
				s.stage, s.paid = stageWaiting, true
				s.release(now)
				s.admission.acquire(&s.waiter, now)
				return
			case d == nil:
				s.counts.DialErrors.Add(1)
				s.abort(shaper.NotConnected, now)
				return
			}
			s.downstream = d
			d.inFlight++
		}
		err := s.connect(s.downstream)
		if err == nil {
			s.proxy.loop.pacer.Schedule(&s.timer, now+leaky.FromDuration(config.Connect))
			return
		}
		s.dialFailed(err, now)
	}
}

func (s *session) target() target { return target{s.flow.Source, s.flow.Port, s.samePort} }

// connect starts to connect to d.
func (s *session) connect(d *downstream) error {
	var from netip.Addr
	if s.config.Load().Transparent {
		from = s.flow.Source
	}
	fd, err := s.proxy.connectTCP(from, netip.AddrPortFrom(d.host.addr(), s.target().portOn(d)))
	if err != nil {
		return err
	}
	s.server = endpoint{session: s, fd: fd}
	if err = s.proxy.loop.watch(fd, endpointEvents, &s.server); err != nil {
		s.server.fd = -1
		unix.Close(fd)
	}
	return err
}

// connectTCP starts a non-blocking connect to to, from the address from if that is valid.
func (p *Proxy) connectTCP(from netip.Addr, to netip.AddrPort) (int, error) {
	fd, err := tcpSocket(to.Addr())
	if err != nil {
		return -1, err
	}
	p.tagSocket(fd)
	if from.IsValid() {
		err = bindSource(fd, from, to.Addr())
	}
	if err == nil {
		err = unix.Connect(fd, sockaddr(to))
	}
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// dialFailed records that the connection to the downstream of s failed.
func (s *session) dialFailed(err error, now leaky.Time) {
	d := s.downstream
	s.proxy.trafficLog.warn("dialing downstream failed", "listener", s.name, "downstream", d.address(s.flow.Port, s.samePort), "err", err)
	s.releaseDownstream(now)
	if !isLocalError(err) {
		d.recordFailure(s.target().portOn(d), err, now)
	}
	s.failedDownstreams = append(s.failedDownstreams, d)
}

// releaseDownstream frees the slot of s at its downstream.
func (s *session) releaseDownstream(now leaky.Time) {
	if s.downstream == nil {
		return
	}
	s.downstream.release()
	s.downstream = nil
}

// dialReady handles the events of a connect.
func (s *session) dialReady(events uint32, now leaky.Time) {
	if events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		errno, _ := unix.GetsockoptInt(s.server.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		s.redial(unix.Errno(errno), now)
		return
	}
	if events&unix.EPOLLOUT != 0 {
		s.proxy.loop.pacer.Cancel(&s.timer)
		s.downstream.recordSuccess(s.target().portOn(s.downstream), now)
		header, err := s.proxyHeader()
		if err != nil {
			s.abort(shaper.NotConnected, now)
			return
		}
		s.relay(header, now)
	}
}

func (s *session) redial(err error, now leaky.Time) {
	l := s.proxy.loop
	l.pacer.Cancel(&s.timer)
	l.close(s.server.fd)
	s.server.fd = -1
	s.dialFailed(err, now)
	s.dial(now)
}
