package conn

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// tcpPort is a socket that listens. It belongs to the loop's thread once it serves.
type tcpPort struct {
	proxy   *Proxy
	fd      int
	port    uint16
	service *service
	rested  leaky.Event // ends the rest of a port that could not accept
}

const (
	// Backlog is how many connections wait in the kernel to be accepted; the system
	// has its own bound, net.core.somaxconn.
	Backlog = 4096

	// acceptTurn is how many connections a port accepts before other sockets, and
	// departures, have their turn.
	acceptTurn = 8
)

func (p *Proxy) openTCP(e Endpoint, transparent bool) (port, error) {
	fd, err := p.inheritedSocket(e), error(nil)
	if fd >= 0 {
		p.mark(fd)
		setTCPOptions(fd)
		err = unix.Listen(fd, Backlog) // it may do so already
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
	t.rested.Fire = func(leaky.Time) { p.loop.rewatch(t.fd, unix.EPOLLIN) }
	return t, nil
}

// listenTCP returns a listening socket, whose options its connections inherit.
func (p *Proxy) listenTCP(addr netip.AddrPort, transparent bool) (int, error) {
	fd, err := tcpSocket(addr.Addr())
	if err != nil {
		return -1, err
	}
	p.mark(fd)
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

// tcpSocket returns a socket that sends small segments at once and finds out when the
// other side is gone. An error of these options leaves them as they are.
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
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepAlive)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, keepAlive)
}

func (t *tcpPort) descriptor() int { return t.fd }

// keepAlive is after how many seconds of silence the other side is asked whether it is
// there, and how often.
const keepAlive = 15

var errInUse = errors.New("the port is in use")

// explainBind says what to do about the usual reasons why a port cannot be had.
func explainBind(err error, endpoint string) error {
	var errno unix.Errno
	switch errors.As(err, &errno); errno {
	case unix.EADDRINUSE:
		return fmt.Errorf("listen on %s: %w; see \"ss -lntup\" for whose it is", endpoint, errInUse)
	case unix.EACCES:
		return fmt.Errorf("listen on %s: not permitted; a port below 1024 needs CAP_NET_BIND_SERVICE", endpoint)
	case unix.EADDRNOTAVAIL:
		return fmt.Errorf("listen on %s: this host has no such address", endpoint)
	}
	return fmt.Errorf("listen on %s: %w", endpoint, err)
}

func (t *tcpPort) serves() *service { return t.service }

func (t *tcpPort) serve(s service) {
	started := t.service != nil
	t.service = &s
	if started {
		return
	}
	if err := t.proxy.loop.watch(t.fd, unix.EPOLLIN, t); err != nil {
		t.proxy.log.Error("watch TCP port", "listener", s.name, "port", t.port, "err", err)
	}
}

// close ends the port. Connections that it has not accepted yet are reset.
func (t *tcpPort) close() {
	t.proxy.loop.call(func(leaky.Time) {
		t.proxy.loop.pacer.Cancel(&t.rested)
		t.proxy.loop.forget(t.fd) // systemd may have a duplicate
		unix.Close(t.fd)
	})
}

// ready accepts connections; epoll reports the port again when there are more.
func (t *tcpPort) ready(_ uint32, now leaky.Time) {
	if t.proxy.loop.short(enough) {
		t.rest("descriptors or memory run short", now)
		return
	}
	for range acceptTurn {
		fd, from, errno := accept(t.fd)
		switch errno {
		case 0:
			t.proxy.accepted(t, fd, from, now)
		case unix.EAGAIN:
			return
		case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM:
			t.rest(errno.Error(), now)
			return
		default: // of a connection that has ended already
		}
	}
}

// rest leaves connections in the kernel's queue for a while.
func (t *tcpPort) rest(why string, now leaky.Time) {
	t.proxy.refused.note("accept no connections", "listener", t.service.name, "reason", why)
	t.proxy.loop.rewatch(t.fd, 0)
	t.proxy.loop.pacer.Schedule(&t.rested, now+overloadRest)
}

// accepted brings a connection to the gates.
func (p *Proxy) accepted(t *tcpPort, fd int, from netip.AddrPort, now leaky.Time) {
	sv := t.service
	sv.counts.Accepted.Add(1)
	s := &session{proxy: p, service: sv, port: t, from: from}
	s.gates, s.owner, s.listen, s.begun = p.gates, s, sv.name, now
	s.flow = shaper.Flow{Source: from.Addr(), Port: t.port, Protocol: shaper.TCP, Connection: p.nextID.Add(1)}
	s.client = side{session: s, fd: fd}
	s.server = side{session: s, fd: -1}
	if err := p.loop.watch(fd, edges, &s.client); err != nil {
		p.refused.note("watch connection", "listener", sv.name, "err", err)
		unix.Close(fd)
		return
	}
	p.mark(fd) // it may have come before its listener had an owner
	p.sessions.add(s, s.flow.Connection)
	p.watchPeers(now)
	p.open.Add(1)
	for _, prefix := range sv.config.Load().AcceptProxyFrom {
		if prefix.Contains(from.Addr()) {
			s.stage = announcing
			s.timer.Fire = s.badHeader
			p.loop.pacer.Schedule(&s.timer, now+headerTimeout)
			return
		}
	}
	p.gates.enter(&s.entrant, now)
}

// admitted is called at the last gate.
func (s *session) admitted(now leaky.Time) {
	s.stage = dialing
	if s.proxy.loop.short(tooMuch) {
		s.proxy.refused.note("shed connection", "listener", s.name, "source", s.flow.Source)
		s.abort(shaper.Overload, now)
		return
	}
	s.timer.Fire = func(now leaky.Time) { s.dialAgain(unix.ETIMEDOUT, now) }
	s.dial(now)
}

// dial connects to a downstream, or to the next one when that fails. When the next one is
// full it waits again, and holds nothing meanwhile.
func (s *session) dial(now leaky.Time) {
	config := s.config.Load()
	for {
		if s.to == nil {
			d, full := s.pick(s.target(), s.failed, now)
			switch {
			case full:
				s.stage, s.paid = entering, true
				s.release(now)
				s.gates.enter(&s.entrant, now)
				return
			case d == nil:
				s.counts.DialErrors.Add(1)
				s.abort(shaper.NotConnected, now)
				return
			}
			s.to = d
			d.inFlight++
		}
		err := s.connect(s.to)
		if err == nil {
			s.proxy.loop.pacer.Schedule(&s.timer, now+leaky.FromDuration(config.Connect))
			return
		}
		s.dialFailed(err, now)
	}
}

func (s *session) target() target { return target{s.flow.Source, s.flow.Port, s.samePort} }

// connect begins to connect to d.
func (s *session) connect(d *downstream) error {
	var from netip.Addr
	if s.config.Load().Transparent {
		from = s.flow.Source
	}
	fd, err := s.proxy.connectTCP(from, netip.AddrPortFrom(d.host.addr(), s.target().at(d)))
	if err != nil {
		return err
	}
	s.server = side{session: s, fd: fd}
	if err = s.proxy.loop.watch(fd, edges, &s.server); err != nil {
		s.server.fd = -1
		unix.Close(fd)
	}
	return err
}

// connectTCP returns a socket that is on its way to to, from another host's address where
// from is one.
func (p *Proxy) connectTCP(from netip.Addr, to netip.AddrPort) (int, error) {
	fd, err := tcpSocket(to.Addr())
	if err != nil {
		return -1, err
	}
	p.mark(fd)
	if from.IsValid() {
		err = bindSource(fd, from, to.Addr())
	}
	if err == nil {
		err = unix.Connect(fd, sockaddr(to))
	}
	if err != nil && err != unix.EINPROGRESS {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// dialFailed notes that the downstream s was to go to could not be reached.
func (s *session) dialFailed(err error, now leaky.Time) {
	d := s.to
	s.proxy.refused.note("dial downstream", "listener", s.name, "downstream", d.address(s.flow.Port, s.samePort), "err", err)
	s.leaveDownstream(now)
	if !ours(err) {
		d.failed(s.target().at(d), err, now)
	}
	s.failed = append(s.failed, d)
}

// leaveDownstream gives back s's place at its downstream.
func (s *session) leaveDownstream(now leaky.Time) {
	if s.to == nil {
		return
	}
	s.to.giveBack()
	s.to = nil
}

// dialed is told of the connection under way.
func (s *session) dialed(events uint32, now leaky.Time) {
	if events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		errno, _ := unix.GetsockoptInt(s.server.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		s.dialAgain(unix.Errno(errno), now)
		return
	}
	if events&unix.EPOLLOUT != 0 {
		s.proxy.loop.pacer.Cancel(&s.timer)
		s.to.reached(s.target().at(s.to), now)
		header, err := s.announcement()
		if err != nil {
			s.abort(shaper.NotConnected, now)
			return
		}
		s.begin(header, now)
	}
}

func (s *session) dialAgain(err error, now leaky.Time) {
	l := s.proxy.loop
	l.pacer.Cancel(&s.timer)
	l.close(s.server.fd)
	s.server.fd = -1
	s.dialFailed(err, now)
	s.dial(now)
}
